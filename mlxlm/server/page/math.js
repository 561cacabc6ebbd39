/** A markdown-it plugin: formulas are shown as they are written, instead of being taken for emphasis or lists. */
const FORMS = [
  /\\\(.{1,1000}?\\\)/,
  /\\\[.{1,1000}?\\\]/,
  /\$\$.{1,1000}?\$\$/,
  /\$(?![\s$])[^$\n]{0,300}?(?<![\s\\])\$(?!\d)/, // no space inside the dollars and no digit after: not $5 and $6
];
const INLINE = new RegExp(FORMS.map(({ source }) => source).join("|"), "sy");
const OPENING = /^(\$\$|\\\[)/;
const CLOSING = { "$$": /\$\$\s*$/, "\\[": /\\\]\s*$/ };

export function displayMath(markdown) {
  const { escapeHtml } = markdown.utils;
  markdown.inline.ruler.before("escape", "math", inlineMath);
  markdown.block.ruler.before("fence", "math_block", mathBlock, { alt: ["paragraph", "blockquote", "list"] });
  markdown.renderer.rules.math = (tokens, i) => `<span class="math">${escapeHtml(tokens[i].content)}</span>`;
  markdown.renderer.rules.math_block = (tokens, i) => `<div class="math">${escapeHtml(tokens[i].content)}</div>`;
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
