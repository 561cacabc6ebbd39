/** Conversations in the browser's IndexedDB. Other tabs of the page are told about every change. */
const channel = new BroadcastChannel("mlxlm");
let database = null;

/** Opens the database. Rejects where the browser doesn't allow it, as in some private windows. */
export async function openStore() {
  const opening = indexedDB.open("mlxlm", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("conversations", { keyPath: "id" });
  database = await completed(opening);
}

/** @returns {Promise<import("./conversation.js").Conversation[]>} */
export function loadAll() {
  return inStore("readonly", (store) => store.getAll());
}

/** @returns {Promise<import("./conversation.js").Conversation|undefined>} */
export function load(id) {
  return inStore("readonly", (store) => store.get(id));
}

/** Writes a conversation. Rejects with a QuotaExceededError when the browser has no room for it. */
export async function save(conversation) {
  await inStore("readwrite", (store) => store.put(conversation));
  channel.postMessage(conversation.id);
}

export async function remove(id) {
  await inStore("readwrite", (store) => store.delete(id));
  channel.postMessage(id);
}

/** Calls `callback` with the id of each conversation that another tab writes or removes. */
export function onOtherTab(callback) {
  channel.onmessage = ({ data }) => callback(data);
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
