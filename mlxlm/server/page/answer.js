import { streamChat } from "./api.js";
import { promptOf } from "./conversation.js";

/** Why an answer can be continued: it was cut off. */
export const CUT_OFF = { length: "The answer reached its maximum length.", stopped: "Stopped." };

/**
 * Streams an answer into `message`, after the text that it already has. How it ended is in its `finish` or `error`.
 * @param {import("./conversation.js").Conversation} conversation
 * @param {import("./conversation.js").Message} message
 * @param {AbortSignal} signal
 * @param {(progress?: {read: number, total: number}) => void} onChange  `progress`: while the prompt is being read
 * @returns {Promise<?import("./api.js").APIError>}  the error, if there was one
 */
export async function writeAnswer(conversation, message, signal, onChange) {
  const { system, reasoning, ...options } = conversation.settings;
  const body = { model: message.model, messages: promptOf(conversation, message), ...options };
  delete message.error;
  delete message.finish;
  delete message.stats;
  try {
    for await (const part of streamChat(body, signal)) {
      if (part.text) message.text += part.text;
      if (part.reasoning) message.reasoning = (message.reasoning ?? "") + part.reasoning;
      if (part.finish) message.finish = part.finish;
      if (part.stats) message.stats = part.stats;
      onChange(part.progress);
    }
    message.finish ??= "stop";
  } catch (error) {
    if (error.name === "AbortError") {
      message.finish = "stopped";
    } else {
      message.error = error.message;
      return error;
    }
  }
  return null;
}
