/** Files that go with a message: their text, read in the browser. */
import { h } from "./dom.js";
import DOMPurify from "./vendor/purify.mjs";

const MB = 1 << 20;
const MAX_BYTES = 4 * MB; // far more text than fits into any context
const ONLY_TEXT = { ALLOWED_ATTR: [], FORBID_TAGS: ["style"], RETURN_DOM_FRAGMENT: true };

/**
 * Reads a text file; of HTML, what a reader sees.
 * @param {File} file
 * @returns {Promise<{name: string, text: string}>}
 * @throws {Error} with words for the user if it isn't text
 */
export async function readFile(file) {
  const { name, type, size } = file;
  const fail = (problem) => {
    throw new Error(`${name} ${problem}`);
  };
  if (/^image\/(?!svg)/.test(type)) fail("is an image. The models of this server read only text.");
  if (size > MAX_BYTES) fail(`has ${Math.ceil(size / MB)} MB; the limit is ${MAX_BYTES / MB} MB.`);
  const content = await file.arrayBuffer().catch(() => fail("can't be read. If it is a folder, add its files instead."));
  if (isPDF(content)) fail("is a PDF, which this page can't read. Paste its text, or use mlxlm chat -f.");
  const text = decode(content) ?? fail("isn't a text file, or its encoding isn't UTF-8.");
  const visible = (/^text\/html|xhtml/.test(type) ? textOfHTML(text) : text).replace(/^\n+|\n+$/g, "");
  return { name, text: visible.trim() ? visible : fail("has no text.") };
}

const isPDF = (content) => new TextDecoder("latin1").decode(content.slice(0, 1024)).includes("%PDF-");

/** @returns {?string} The text, with line feeds as line ends; null if it isn't text. */
function decode(content) {
  const [first, second] = new Uint8Array(content);
  const encoding = { 0xfffe: "utf-16le", 0xfeff: "utf-16be" }[(first << 8) | second] ?? "utf-8";
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(content);
    return text.includes("\0") ? null : text.replace(/\r\n?/g, "\n");
  } catch {
    return null;
  }
}

function textOfHTML(html) {
  const body = h("div", {}, DOMPurify.sanitize(html, ONLY_TEXT));
  const host = h("div", { class: "visually-hidden" });
  host.attachShadow({ mode: "open" }).append(body); // where the page's style doesn't apply
  document.body.append(host);
  const text = body.innerText; // knows paragraphs and tables, but only of what is drawn
  host.remove();
  return text;
}

/** How many tokens a file has: "1,234 tokens". */
export const describeTokens = (tokens) => (tokens === undefined ? "" : `${tokens.toLocaleString()} tokens`);
