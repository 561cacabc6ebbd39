/**
 * All conversations of this browser: in memory, and in its IndexedDB as far as it allows that. The tabs of the page tell
 * each other what they store, and which conversations they are answering in.
 */
import { $ } from "./dom.js";
import { fromJSON } from "./transfer.js";

const conversations = new Map(); // by id
const elsewhere = new Set(); // ids of those that another tab is answering in
const channel = new BroadcastChannel("mlxlm");
let database = null;
let tab = null;

export const all = () => [...conversations.values()];
export const get = (id) => conversations.get(id);
export const isAnsweredElsewhere = (id) => elsewhere.has(id);

/**
 * Reads the stored conversations, and from then on changes them when other tabs do.
 * @param {object} thisTab
 * @param {() => string[]} thisTab.answering  the ids of the conversations that it is answering in: only it writes those
 * @param {(id: string) => void} thisTab.stop  stops answering in a conversation
 * @param {() => void} thisTab.onChange  called when another tab has changed something
 */
export async function load(thisTab) {
  tab = thisTab;
  try {
    const opening = indexedDB.open("mlxlm", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("conversations", { keyPath: "id" });
    database = await completed(opening);
    const stored = await inStore("readonly", (store) => store.getAll());
    for (const conversation of stored) conversations.set(conversation.id, conversation);
  } catch (error) {
    showError(error);
    return;
  }
  channel.onmessage = ({ data }) => receive(data);
  channel.postMessage({ hello: true });
  addEventListener("pagehide", () => tab.answering().forEach((id) => channel.postMessage({ id, answering: false })));
}

export function add(conversation) {
  conversations.set(conversation.id, conversation);
  return save(conversation);
}

/** Stores a conversation, unless it is new or has been removed. */
export async function save(conversation) {
  if (conversations.get(conversation.id) !== conversation) return;
  try {
    await inStore("readwrite", (store) => store.put(conversation));
    tellTabs(conversation.id);
    $("#storage-error").hidden = true;
  } catch (error) {
    showError(error);
  }
}

export async function remove({ id }) {
  conversations.delete(id);
  await inStore("readwrite", (store) => store.delete(id)).then(() => tellTabs(id), showError);
}

/** @returns {Promise<import("./conversation.js").Conversation[]>} those in the files, none if one can't be read */
export async function importFiles(files) {
  const imported = (await Promise.all([...files].map(async (file) => fromJSON(await file.text())))).flat();
  await Promise.all(imported.map(add));
  return imported;
}

/**
 * Stops the answer that another tab is writing. From then on this tab may answer: the other one may have crashed.
 * @returns {boolean} whether there was one
 */
export function stopElsewhere(id) {
  const found = elsewhere.delete(id);
  if (found) channel.postMessage({ id, stop: true });
  return found;
}

function tellTabs(id) {
  channel.postMessage({ id, answering: elsewhere.has(id) || tab.answering().includes(id) });
}

async function receive({ id, answering, stop, hello }) {
  if (hello) return tab.answering().forEach(tellTabs);
  if (stop) return tab.stop(id);
  if (answering) elsewhere.add(id);
  else elsewhere.delete(id);
  const stored = await inStore("readonly", (store) => store.get(id));
  if (!stored) conversations.delete(id);
  else if (!tab.answering().includes(id)) conversations.set(id, update(conversations.get(id), stored));
  return tab.onChange();
}

/** Makes `old` equal to `stored`. Its messages stay the same objects, so that what shows them stays, too. */
function update(old, stored) {
  if (!old) return stored;
  for (const [id, message] of Object.entries(stored.messages)) {
    if (old.messages[id]) stored.messages[id] = become(old.messages[id], message);
  }
  return become(old, stored);
}

function become(target, source) {
  Object.keys(target).forEach((key) => delete target[key]);
  return Object.assign(target, source);
}

async function inStore(mode, action) {
  const transaction = database.transaction("conversations", mode);
  const result = await completed(action(transaction.objectStore("conversations")));
  if (mode === "readwrite") await new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
  return result;
}

function completed(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function showError(error) {
  const full = error?.name === "QuotaExceededError";
  $("#storage-error").textContent = full
    ? "The browser's storage is full. Export and delete conversations: what is new is lost when you close this page."
    : "The browser doesn't let this page store conversations: they are lost when you close it. Export those you need.";
  $("#storage-error").hidden = false;
}
