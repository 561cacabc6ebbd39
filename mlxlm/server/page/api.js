/** The server's API: OpenAI's, with paths relative to the page, so that it also works below a prefix. */
import { SSEParser } from "./sse.js";

const KEY = "mlxlm.api-key";
let key = storedKey();

/** What the server (or the network) has to say about a failed request, in words for the user. */
export class APIError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

function storedKey() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null; // the browser blocks storage
  }
}

export const hasAPIKey = () => Boolean(key);

/** Keeps the API key until the browser tab is closed. */
export function setAPIKey(newKey) {
  key = newKey;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // Then it is asked for again after a reload.
  }
}

/** @returns {Promise<object[]>} The models, as `GET /v1/models` describes them. */
export async function listModels() {
  const { data } = await (await request("v1/models")).json();
  return data;
}

export const loadModel = (model) => post("v1/models/load", { model });
export const unloadModel = (model) => post("v1/models/unload", { model });

/** @returns {Promise<object[]>} The models that can be downloaded by name; none if this server downloads nothing. */
export async function listCatalog() {
  return (await (await request("v1/catalog")).json()).data;
}

/**
 * Downloads a model to the server.
 * @param {string} model  a name of the catalog, or owner/name of the Hugging Face hub
 * @param {(progress: {completed?: number, total?: number}) => void} onProgress
 */
export async function pullModel(model, onProgress) {
  let rest = "";
  for await (const text of textOf(await post("api/pull", { model }))) {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const progress of lines.map((line) => JSON.parse(line))) {
      if (progress.error) throw new APIError(progress.error);
      onProgress(progress);
    }
  }
}

/** @returns {Promise<{count: number, max_model_len: number}>} The tokens of a text, and those that a model can see. */
export async function countTokens(model, prompt) {
  return (await post("v1/tokenize", { model, prompt, add_special_tokens: false })).json();
}

/**
 * Streams an answer.
 * @param {object} body  of `POST /v1/chat/completions`
 * @param {AbortSignal} signal
 * @yields {{progress?: {read: number, total: number}, text?: string, reasoning?: string, logprobs?: object[],
 *   finish?: string,
 *   stats?: {promptTokens: number, tokens: number, speed?: number}}}
 */
export async function* streamChat(body, signal) {
  const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
  const parser = new SSEParser();
  let finished = false;
  for await (const text of textOf(await post("v1/chat/completions", streamed, signal))) {
    for (const event of parser.push(text)) {
      if (event.data === "[DONE]") return;
      for (const part of partsOf(event)) {
        finished ||= Boolean(part.finish);
        yield part;
      }
    }
  }
  if (!finished) throw new APIError("The connection to the server was lost before the answer was complete.");
}

/** Yields the text of a response as it comes. (Safari has no `for await` over a stream.) */
async function* textOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read().catch((error) => fail(error));
    if (done) return;
    yield value;
  }
}

function partsOf({ comment, data }) {
  if (comment !== undefined) {
    const [, read, total] = /reading the prompt, ([\d,]+) of ([\d,]+)/.exec(comment) ?? [];
    return total ? [{ progress: { read: toNumber(read), total: toNumber(total) } }] : [];
  }
  const chunk = JSON.parse(data);
  if (chunk.error) throw new APIError(chunk.error.message ?? "The server reported an error.", chunk.error.code);
  const { delta, finish_reason: finish, logprobs } = chunk.choices?.[0] ?? {};
  const { content: text, reasoning_content: reasoning } = delta ?? {};
  const entries = reasoning ? null : logprobs?.content;
  const stats = chunk.usage && statsOf(chunk);
  const parts = [{ reasoning }, { text }, { logprobs: entries }, { finish }, { stats }];
  return parts.filter((part) => Object.values(part)[0]);
}

const statsOf = ({ usage, timings }) => ({
  promptTokens: usage.prompt_tokens,
  tokens: usage.completion_tokens,
  speed: timings?.predicted_per_second,
});

const toNumber = (text) => Number(text.replaceAll(",", ""));

function post(path, body, signal = undefined) {
  const headers = { "Content-Type": "application/json" };
  return request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

async function request(path, options = {}) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers }).catch((error) => fail(error));
  if (response.ok) return response;
  const text = await response.text();
  let message;
  try {
    const { error } = JSON.parse(text);
    message = error.message ?? error; // a text in ollama's API
  } catch {
    message = `The server answered ${response.status} ${response.statusText}: ${text.slice(0, 300)}`;
  }
  throw new APIError(message, response.status);
}

function fail(error) {
  if (error.name === "AbortError") throw error;
  throw new APIError("The server can't be reached. Check that it is still running.");
}
