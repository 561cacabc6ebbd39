import { streamChat } from "./api.js";
import { promptOf } from "./conversation.js";

const PAUSE = 40; // milliseconds between two drawings, at least

/**
 * Streams an answer into `message`, after the text that it already has. How it ended is in its `finish` or `error`.
 * @param {import("./conversation.js").Conversation} conversation
 * @param {import("./conversation.js").Message} message
 * @param {AbortSignal} signal
 * @param {(progress?: {read: number, total: number}) => void} onChange  `progress`: while the prompt is being read
 * @returns {Promise<?import("./api.js").APIError>}  the error, if there was one
 */
export async function writeAnswer(conversation, message, signal, onChange) {
  const { system, reasoning, logprobs, ...options } = conversation.settings;
  const body = { model: message.model, messages: promptOf(conversation, message), ...options };
  if (logprobs) Object.assign(body, { logprobs, top_logprobs: 5 });
  delete message.error;
  delete message.finish;
  delete message.stats;
  if (!logprobs || !message.text) message.logprobs = logprobs ? [] : undefined;
  try {
    for await (const part of streamChat(body, signal)) {
      if (part.text) message.text += part.text;
      if (part.reasoning) message.reasoning = (message.reasoning ?? "") + part.reasoning;
      if (part.logprobs) message.logprobs?.push(...part.logprobs);
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

/**
 * Makes a function that runs `action` as often as it is called, but so seldom that the browser has most of its time for
 * other things.
 */
export function paced(action) {
  let timer = null;
  let pause = PAUSE;
  const run = () => {
    timer = null;
    const start = performance.now();
    action();
    pause = Math.max(PAUSE, 3 * (performance.now() - start));
  };
  const request = () => {
    timer ??= setTimeout(run, pause);
  };
  request.stop = () => clearTimeout(timer);
  return request;
}
