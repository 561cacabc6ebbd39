/**
 * A conversation is a tree of messages. A message with several children is where it branches; `next` is the child that
 * is shown.
 *
 * @typedef {object} Message
 * @property {string} id
 * @property {?string} parent  null for a first message
 * @property {?string} next
 * @property {"user"|"assistant"} role
 * @property {string} text
 * @property {{name: string, text: string, tokens?: number}[]} [files]  that go with a question
 * @property {string} [reasoning]
 * @property {string} [model]  that wrote it
 * @property {string} [finish]  why it ended: OpenAI's finish_reason, or "stopped" by the user
 * @property {string} [error]  why it could not be written
 * @property {object[]} [logprobs]  of its tokens, as in OpenAI's API
 * @property {{promptTokens: number, tokens: number, speed?: number}} [stats]
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {number} updated  milliseconds since 1970
 * @property {?string} next  the first message that is shown
 * @property {string} [model]
 * @property {string} [secondModel]  that answers, too
 * @property {string[]} [compared]  ids of the two answers of which the user is to keep one
 * @property {object} settings  `system`, `reasoning` (collapsed, open or hidden), and options of the API by their names
 * @property {Object<string, Message>} messages  by id, oldest first
 */

/** @returns {Conversation} */
export function newConversation(settings = {}, model = undefined) {
  return { id: randomID(), title: "", updated: Date.now(), next: null, model, settings: { ...settings }, messages: {} };
}

function randomID() { // crypto.randomUUID would need https or localhost
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Adds a message after `parent` (null: at the beginning) and shows it.
 * @returns {Message}
 */
export function addMessage(conversation, parent, fields) {
  const number = 1 + Math.max(0, ...Object.keys(conversation.messages).map((id) => Number(id.slice(1))));
  const message = { id: `m${number}`, parent: parent?.id ?? null, next: null, text: "", ...fields };
  conversation.messages[message.id] = message;
  show(conversation, message);
  conversation.updated = Date.now();
  if (!conversation.title && message.role === "user") conversation.title = titleOf(message);
  return message;
}

/** Makes `message` the one that is shown among its alternatives. */
export function show(conversation, message) {
  (conversation.messages[message.parent] ?? conversation).next = message.id;
}

/** @returns {Message[]} The messages that are shown, in order. */
export function path(conversation) {
  const messages = [];
  for (let message = conversation; message.next; messages.push(message)) message = conversation.messages[message.next];
  return messages;
}

/** @returns {Message[]} The two answers at the end of which one is to be kept; none if there is no such choice. */
export function comparedAnswers(conversation) {
  const { compared = [], messages } = conversation;
  const last = path(conversation).at(-1);
  return compared.includes(last?.id) ? compared.map((id) => messages[id]) : [];
}

/**
 * Removes a message and all that follow it, and shows another version of it if there is one.
 * @returns {() => void} puts them back, as long as no message has been added
 */
export function removeMessage(conversation, message) {
  const { messages } = conversation;
  const holder = messages[message.parent] ?? conversation;
  const { next } = holder;
  const removed = new Set([message.id]);
  for (const { id, parent } of Object.values(messages)) if (removed.has(parent)) removed.add(id); // parents are older
  conversation.messages = Object.fromEntries(Object.entries(messages).filter(([id]) => !removed.has(id)));
  holder.next = alternatives(conversation, message).at(-1)?.id ?? null;
  return () => {
    conversation.messages = messages;
    holder.next = next;
  };
}

/** @returns {Message[]} The alternatives at this place, the message itself included. */
export function alternatives(conversation, message) {
  return Object.values(conversation.messages).filter((other) => other.parent === message.parent);
}

/** @returns {object[]} What the model reads to write `answer`, or to continue it: then that is the last message. */
export function promptOf(conversation, answer) {
  const { system } = conversation.settings;
  const prompt = system ? [{ role: "system", content: system }] : [];
  const messages = [];
  for (let message = answer; message; message = conversation.messages[message.parent]) messages.unshift(message);
  for (const message of messages) {
    const { role } = message;
    const content = contentOf(message);
    // A question whose answer failed is part of the next one: many templates want roles to alternate.
    if (content && prompt.at(-1)?.role === role) prompt.at(-1).content += `\n\n${content}`;
    else if (content) prompt.push({ role, content });
  }
  return prompt;
}

/** @returns {string} What the model reads of a message: its files, then its text. */
export function contentOf({ text, files = [] }) {
  return [...files.map(fileBlock), text].filter(Boolean).join("\n\n");
}

/** @returns {string} A file in a prompt, as `mlxlm chat` writes it: its text in a fence that doesn't occur in it. */
export function fileBlock({ name, text }) {
  const longest = Math.max(0, ...(text.match(/`+/g) ?? []).map(({ length }) => length));
  const fence = "`".repeat(Math.max(3, longest + 1));
  return `File: ${name}\n${fence}\n${text}\n${fence}`;
}

/** How many tokens a file has: "1,234 tokens". */
export const describeTokens = (tokens) =>
  tokens === undefined ? "" : `${tokens.toLocaleString()} ${tokens === 1 ? "token" : "tokens"}`;

function titleOf({ text, files }) {
  const line = text.trim().split("\n")[0] || (files?.[0].name ?? "");
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}
