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
 * @property {string} [reasoning]
 * @property {string} [model]  that wrote it
 * @property {string} [finish]  why it ended: OpenAI's finish_reason, or "stopped" by the user
 * @property {string} [error]  why it could not be written
 * @property {{promptTokens: number, tokens: number, speed?: number}} [stats]
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {number} updated  milliseconds since 1970
 * @property {?string} next  the first message that is shown
 * @property {string} [model]
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
  if (!conversation.title && message.role === "user") conversation.title = titleOf(message.text);
  return message;
}

/** Makes `message` the one that is shown among its alternatives. */
export function show(conversation, message) {
  (conversation.messages[message.parent] ?? conversation).next = message.id;
}

/** @returns {Message[]} The messages that are shown, in order, up to and including `last`. */
export function path(conversation, last = undefined) {
  const messages = [];
  for (let message = conversation; message.next && message !== last; messages.push(message)) {
    message = conversation.messages[message.next];
  }
  return messages;
}

/** @returns {Message[]} The alternatives at this place, the message itself included. */
export function alternatives(conversation, message) {
  return Object.values(conversation.messages).filter((other) => other.parent === message.parent);
}

/** @returns {object[]} What the model reads to write `answer`, or to continue it: then that is the last message. */
export function promptOf(conversation, answer) {
  const { system } = conversation.settings;
  const prompt = system ? [{ role: "system", content: system }] : [];
  for (const { role, text } of path(conversation, answer).filter((message) => message.text)) {
    // A question whose answer failed is part of the next one: many templates want roles to alternate.
    if (prompt.at(-1)?.role === role) prompt.at(-1).content += `\n\n${text}`;
    else prompt.push({ role, content: text });
  }
  return prompt;
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}
