/** The server's API: OpenAI's, with paths relative to the page, so that it also works below a prefix. */
import { recall, remember } from "./dom.js";

const KEY = "mlxlm.api-key"; // kept until the tab is closed
let key = recall(KEY, "sessionStorage");

/** What the server (or the network) has to say about a failed request, in words for the user. */
export class APIError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export const hasAPIKey = () => Boolean(key);

export function setAPIKey(newKey) {
  key = newKey;
  remember(KEY, key, "sessionStorage");
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
  let progress;
  for await (const line of linesOf(await post("api/pull", { model }))) {
    progress = JSON.parse(line);
    if (progress.error) throw new APIError(progress.error);
    onProgress(progress);
  }
  if (progress?.status !== "success") throw new APIError("The connection to the server was lost during the download.");
}

/** @returns {Promise<string>} The text of a file. */
export async function extractText(name, content) {
  const path = `v1/extract-text?name=${encodeURIComponent(name)}`;
  return (await (await request(path, { method: "POST", body: content })).json()).text;
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
 *   finish?: string, stats?: {promptTokens: number, tokens: number, speed?: number}}}
 */
export async function* streamChat(body, signal) {
  const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
  let finished = false;
  for await (const line of linesOf(await post("v1/chat/completions", streamed, signal))) {
    if (line === "data: [DONE]") return;
    const part = line.startsWith("data: ") ? partOf(JSON.parse(line.slice(6))) : progressOf(line);
    finished ||= Boolean(part.finish);
    yield part;
  }
  if (!finished) throw new APIError("The connection to the server was lost before the answer was complete.");
}

/** Yields the lines of a response as they come, without the empty ones. (Safari has no `for await` over a stream.) */
async function* linesOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(fail);
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines.filter(Boolean);
  }
}

/** The server says in comments how much of the prompt it has read. */
function progressOf(comment) {
  const [, read, total] = /reading the prompt, ([\d,]+) of ([\d,]+)/.exec(comment) ?? [];
  const toNumber = (text) => Number(text.replaceAll(",", ""));
  return total ? { progress: { read: toNumber(read), total: toNumber(total) } } : {};
}

function partOf(chunk) {
  if (chunk.error) throw new APIError(chunk.error.message ?? "The server reported an error.", chunk.error.code);
  const { delta, finish_reason: finish, logprobs } = chunk.choices?.[0] ?? {};
  const { content: text, reasoning_content: reasoning } = delta ?? {};
  const { usage, timings } = chunk;
  const stats = usage && {
    promptTokens: usage.prompt_tokens, tokens: usage.completion_tokens, speed: timings?.predicted_per_second,
  };
  return { text, reasoning, finish, stats, logprobs: reasoning ? undefined : logprobs?.content };
}

function post(path, body, signal = undefined) {
  const headers = { "Content-Type": "application/json" };
  return request(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

async function request(path, options = {}) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers }).catch(fail);
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
  throw new APIError("Can't reach the server. Check that it is running.");
}
