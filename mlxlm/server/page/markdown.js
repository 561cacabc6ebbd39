/**
 * Markdown that a model wrote → DOM. Nothing in it is trusted: HTML is shown as text, images become links, the rest
 * passes DOMPurify with a short list of allowed tags, and the server's content security policy forbids what is left.
 */
import { button, h, icon } from "./dom.js";
import { findMath, renderMath } from "./math.js";
import hljs from "./vendor/highlight.min.mjs";
import MarkdownIt from "./vendor/markdown-it.min.mjs";
import "./vendor/purify.min.js"; // a script: sets `DOMPurify`

const ALLOWED = {
  ALLOWED_TAGS: ("a blockquote br code div em h1 h2 h3 h4 h5 h6 hr li ol p pre s span strong " +
    "table tbody td th thead tr ul #text").split(" "),
  ALLOWED_ATTR: ["class", "href", "start"],
  ADD_URI_SAFE_ATTR: ["start"],
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const TASK = /^\[([ xX])\]\s+/; // at the beginning of a list item
const MAX_HIGHLIGHTED = 20_000; // characters of a code block; longer ones would slow down streaming

const markdown = new MarkdownIt({ linkify: true, breaks: true }).use(findMath);
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // main.py is no web address
markdown.validateLink = (url) => ALLOWED.ALLOWED_URI_REGEXP.test(url);

const { rules } = markdown.renderer;
const escape = markdown.utils.escapeHtml;
rules.fence = rules.code_block = (tokens, i) => codeBlock(tokens[i].content, tokens[i].info.trim().split(/\s/)[0]);
rules.code_inline = (tokens, i) => `<code>${escape(showDirections(tokens[i].content))}</code>`;
rules.image = (tokens, i) => {
  const { content } = tokens[i]; // its description
  return `<a href="${escape(tokens[i].attrGet("src"))}">🖼 ${escape(content || "image")}</a>`;
};
rules.table_open = () => '<div class="table"><table>';
rules.table_close = () => "</table></div>";
markdown.core.ruler.push("align", ({ tokens }) => {
  for (const token of tokens) {
    const style = token.attrGet("style"); // the policy forbids style attributes
    if (style) token.attrs = [["class", style.replace("text-align:", "align-")]];
  }
});

markdown.core.ruler.push("tasks", ({ tokens }) => {
  tokens.forEach((token, i) => {
    const [, paragraph, inline] = tokens.slice(i, i + 3);
    const [, mark] = (token.type === "list_item_open" && inline?.type === "inline" && TASK.exec(inline.content)) || [];
    if (!mark || paragraph.type !== "paragraph_open") return;
    token.attrSet("class", mark === " " ? "task" : "task done");
    inline.children[0].content = inline.children[0].content.replace(TASK, "");
  });
});

const highlighted = new Map(); // code blocks by language and content

function codeBlock(content, language) {
  const key = `${language}\n${content}`;
  if (!highlighted.has(key)) {
    if (highlighted.size > 100) highlighted.clear();
    const code = showDirections(content);
    const known = hljs.getLanguage(language) && code.length < MAX_HIGHLIGHTED;
    highlighted.set(key, known ? hljs.highlight(code, { language, ignoreIllegals: true }).value : escape(code));
  }
  return `<div class="code"><div class="code-bar"><span>${escape(language)}</span></div>` +
    `<pre><code>${highlighted.get(key)}</code></pre></div>`;
}

/** Makes characters that change the direction of text visible: they can make code look like other code. */
function showDirections(code) {
  return code.replace(/[\u202a-\u202e\u2066-\u2069]/g, (c) => `⟨U+${c.charCodeAt(0).toString(16).toUpperCase()}⟩`);
}

const shown = new WeakMap(); // element → { source, blocks }, its Markdown and the HTML of each block

/**
 * Renders `source` into `element`, and leaves what hasn't changed since the last time as it is: selections, focus and
 * scrolled code survive streaming.
 */
export function renderMarkdown(element, source) {
  const before = shown.get(element);
  if (before?.source === source) return;
  const blocks = topLevelBlocks(source);
  const changed = [...blocks.keys()].filter((i) => blocks[i] !== before?.blocks[i]);
  const fresh = sanitize(changed.map((i) => blocks[i]));
  changed.forEach((i, k) => {
    if (element.children[i]) morph(element.children[i], fresh[k]);
    else element.append(fresh[k]);
  });
  while (element.children.length > blocks.length) element.lastElementChild.remove();
  shown.set(element, { source, blocks });
}

/** @returns {string[]} The HTML of each paragraph, list, table... */
function topLevelBlocks(source) {
  const env = {};
  const tokens = markdown.parse(source, env);
  const blocks = [];
  let start = 0;
  let depth = 0;
  tokens.forEach((token, i) => {
    depth += token.nesting;
    if (depth > 0) return;
    blocks.push(markdown.renderer.render(tokens.slice(start, i + 1), markdown.options, env));
    start = i + 1;
  });
  return blocks;
}

/** @returns {Element[]} The elements of the blocks: all at once, since each call of DOMPurify takes a millisecond. */
function sanitize(blocks) {
  const fragment = DOMPurify.sanitize(blocks.map((html) => `<div>${html}</div>`).join(""), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
    link.title = link.href; // where it leads, whatever it says
  }
  for (const bar of fragment.querySelectorAll(".code-bar")) {
    bar.append(button("Copy code", { class: "copy-code" }, icon("copy")));
  }
  for (const item of fragment.querySelectorAll("li.task")) {
    const checked = item.classList.contains("done");
    const label = checked ? "done" : "to do";
    const box = h("input", { type: "checkbox", disabled: true, checked, "aria-label": label });
    (item.firstElementChild?.localName === "p" ? item.firstElementChild : item).prepend(box, " ");
  }
  fragment.querySelectorAll(".math").forEach(renderMath);
  return [...fragment.children].map((wrapper) => wrapper.firstElementChild ?? wrapper);
}

/** Makes `old` look like `fresh` with as few changes as possible. */
function morph(old, fresh) {
  if (!old.cloneNode(false).isEqualNode(fresh.cloneNode(false))) return old.replaceWith(fresh);
  if (old.nodeType !== Node.ELEMENT_NODE) return undefined;
  const [before, after] = [[...old.childNodes], [...fresh.childNodes]];
  after.forEach((child, i) => (before[i] ? morph(before[i], child) : old.append(child)));
  before.slice(after.length).forEach((child) => child.remove());
  return undefined;
}
