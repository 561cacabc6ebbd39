/** Formulas: a markdown-it plugin that finds them, and KaTeX, which renders them. */
import "./vendor/katex.min.js"; // a script: sets `katex`

const FORMS = [
  /\\\(.{1,1000}?\\\)/,
  /\\\[.{1,1000}?\\\]/,
  /\$\$.{1,1000}?\$\$/,
  /\$(?![\s$])[^$\n]{0,300}?(?<![\s\\])\$(?!\d)/, // no space inside the dollars and no digit after: not $5 and $6
];
const INLINE = new RegExp(FORMS.map(({ source }) => source).join("|"), "sy");
const OPENING = /^(\$\$|\\\[)/;
const CLOSING = { "$$": /\$\$\s*$/, "\\[": /\\\]\s*$/ };
const PARTS = /^(?<opening>\$\$?|\\[([])(?<tex>.*?)(?:\$\$?|\\[)\]])$/s;

/** Marks formulas as elements of the class `math` with their source, which the sanitizer passes as text. */
export function findMath(markdown) {
  const { escapeHtml } = markdown.utils;
  markdown.inline.ruler.before("escape", "math", inlineMath);
  markdown.block.ruler.before("fence", "math_block", mathBlock, { alt: ["paragraph", "blockquote", "list"] });
  markdown.renderer.rules.math = (tokens, i) => `<span class="math">${escapeHtml(tokens[i].content)}</span>`;
  markdown.renderer.rules.math_block = (tokens, i) => `<div class="math">${escapeHtml(tokens[i].content)}</div>`;
}

/** Renders an element that `findMath` marked. What isn't valid TeX stays as it is written. */
export function renderMath(element) {
  const source = element.textContent;
  const { opening, tex } = PARTS.exec(source).groups;
  try {
    katex.render(tex, element, { displayMode: OPENING.test(opening), strict: "ignore", maxSize: 20, maxExpand: 200 });
  } catch {
    element.textContent = source;
    return;
  }
  // KaTeX sets most styles through the CSSOM, but the width of these as an attribute, which the policy forbids.
  for (const svg of element.querySelectorAll(".katex-overlay svg")) svg.style.width = svg.getAttribute("width");
}

function inlineMath(state, silent) {
  INLINE.lastIndex = state.pos;
  const match = INLINE.exec(state.src);
  if (!match) return false;
  if (!silent) state.push("math", "", 0).content = match[0];
  state.pos += match[0].length;
  return true;
}

/** A line that starts with $$ or \[ up to the line that ends with the other half. */
function mathBlock(state, firstLine, endLine, silent) {
  const lineAt = (line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
  const [opening] = OPENING.exec(lineAt(firstLine)) ?? [];
  if (!opening) return false;
  let line = firstLine;
  let rest = lineAt(line).slice(2);
  while (!CLOSING[opening].test(rest)) {
    line += 1;
    if (line >= endLine || !lineAt(line)) return false;
    rest = lineAt(line);
  }
  if (silent) return true;
  const token = state.push("math_block", "", 0);
  token.content = state.getLines(firstLine, line + 1, state.blkIndent, false).trim();
  token.map = [firstLine, line + 1];
  state.line = line + 1;
  return true;
}
