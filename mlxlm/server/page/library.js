/** All conversations of this browser: in memory, and in the store as far as the browser allows it. */
import { $ } from "./dom.js";
import * as store from "./store.js";
import { fromJSON } from "./transfer.js";

const conversations = new Map(); // by id

export const all = () => [...conversations.values()];
export const get = (id) => conversations.get(id);

/**
 * Reads the stored conversations.
 * @param {(id: string) => boolean} isBusy  whether this tab is writing one; then what other tabs say is ignored
 * @param {(id: string) => void} onChange  called when another tab has changed one
 */
export async function load(isBusy, onChange) {
  try {
    await store.openStore();
    for (const conversation of await store.loadAll()) conversations.set(conversation.id, conversation);
  } catch (error) {
    showError(error);
    return;
  }
  store.onOtherTab(async (id) => {
    const conversation = await store.load(id);
    if (isBusy(id)) return;
    if (conversation) conversations.set(id, conversation);
    else conversations.delete(id);
    onChange(id);
  });
}

export function add(conversation) {
  conversations.set(conversation.id, conversation);
  return save(conversation);
}

/** Stores a conversation, unless it is new or has been removed. */
export async function save(conversation) {
  if (conversations.get(conversation.id) !== conversation) return;
  try {
    await store.save(conversation);
    $("#storage-error").hidden = true;
  } catch (error) {
    showError(error);
  }
}

export function remove({ id }) {
  conversations.delete(id);
  store.remove(id).catch(showError);
}

/** @returns {Promise<import("./conversation.js").Conversation[]>} those in the files, none if one can't be read */
export async function importFiles(files) {
  const imported = (await Promise.all([...files].map(async (file) => fromJSON(await file.text())))).flat();
  await Promise.all(imported.map(add));
  return imported;
}

function showError(error) {
  const full = error?.name === "QuotaExceededError";
  $("#storage-error").textContent = full
    ? "The browser has no room for more. Export and delete conversations: closing the page now loses what is new."
    : "The browser doesn't let this page keep conversations: they are lost when you close it. Export those you need.";
  $("#storage-error").hidden = false;
}
