/** Conversations as files: Markdown for people, JSON to read back. */
import { contentOf, newConversation, path } from "./conversation.js";
import { validSettings } from "./settings.js";

const FORMAT = "mlxlm conversations";

/** The branch that is shown, as Markdown. */
export function toMarkdown(conversation) {
  const { system } = conversation.settings;
  const parts = [`# ${conversation.title}`, ...(system ? ["## System prompt", system] : [])];
  for (const message of path(conversation)) {
    parts.push(`## ${message.role === "user" ? "You" : (message.model ?? "Model")}`, contentOf(message));
  }
  return `${parts.join("\n\n")}\n`;
}

/** Whole conversations with all their branches and settings, as JSON. */
export function toJSON(conversations) {
  return `${JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1)}\n`;
}

/**
 * Reads what `toJSON` wrote.
 * @returns {import("./conversation.js").Conversation[]} with new ids
 */
export function fromJSON(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("The file isn't JSON. Choose one that was exported from this page.");
  }
  if (file?.format !== FORMAT || file.version !== 1 || !Array.isArray(file.conversations)) {
    throw new Error("The file has no conversations of this page. Choose one that was exported as JSON.");
  }
  return file.conversations.map(copyConversation);
}

function copyConversation(source, index) {
  const fail = (problem) => {
    throw new Error(`Conversation ${index + 1} of the file can't be imported: ${problem}.`);
  };
  const { title, updated, next = null, model, settings, messages } = Object(source);
  if (!isText(title)) fail("it has no title");
  const copied = {};
  for (const [id, message] of Object.entries(Object(messages))) {
    copied[id] = copyMessage(id, Object(message)) ?? fail(`message ${id.slice(0, 20)} has no valid role or text`);
  }
  const isMessage = (id) => Object.hasOwn(copied, id);
  const follows = (child, parent) => child === null || (isMessage(child) && copied[child].parent === parent);
  for (const { id, parent, next: child } of Object.values(copied)) {
    const hasPlace = parent === null || (isMessage(parent) && numberOf(parent) < numberOf(id));
    if (!hasPlace || !follows(child, id)) fail(`message ${id} has an invalid position`); // or path() would not end
  }
  if (!follows(next, null)) fail("its first message is missing");
  const conversation = newConversation(validSettings(settings), isText(model) ? model : undefined);
  if (Number.isFinite(updated)) conversation.updated = updated;
  return { ...conversation, title: title || "Untitled", next, messages: copied };
}

function copyMessage(id, source) {
  const { parent = null, next = null, role, text, reasoning, model, finish, error, stats, files, logprobs } = source;
  if (!/^m\d{1,9}$/.test(id) || !["user", "assistant"].includes(role) || !isText(text)) return null;
  const texts = Object.entries({ reasoning, model, finish, error }).filter(([, value]) => isText(value));
  const { promptTokens, tokens, speed: given } = Object(stats);
  const measured = [promptTokens, tokens].every(Number.isFinite);
  const speed = Number.isFinite(given) ? given : null;
  const optional = { ...Object.fromEntries(texts), ...(measured && { stats: { promptTokens, tokens, speed } }) };
  if (isListOf(files, isFile)) optional.files = files;
  if (isListOf(logprobs, isLogprob)) optional.logprobs = logprobs;
  return { id, parent, next, role, text, ...optional };
}

const isListOf = (value, isItem) => Array.isArray(value) && value.every((item) => isItem(Object(item)));
const isFile = ({ name, text, tokens = 0 }) => isText(name) && isText(text) && Number.isFinite(tokens);
const isLogprob = ({ token, logprob, top_logprobs: top = [] }) =>
  isText(token) && Number.isFinite(logprob) && isListOf(top, isLogprob);
const isText = (value) => typeof value === "string";
const numberOf = (id) => Number(id.slice(1));
