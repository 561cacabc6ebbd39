/** The chat page: connects the server, the stored conversations and what is shown. */
import { writeAnswer } from "./answer.js";
import { listModels, setAPIKey } from "./api.js";
import { ConversationView } from "./conversation_view.js";
import { closeSidebarOnPhone, enableControls } from "./controls.js";
import { addMessage, newConversation, path, show } from "./conversation.js";
import { $, announce, download, h, toast } from "./dom.js";
import { defaultSettings, editSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";
import { fromJSON, toJSON, toMarkdown } from "./transfer.js";

const REDRAW = 40; // milliseconds between two drawings of a growing answer, at least
const SAVE = 2000; // milliseconds between two saves of it

const conversations = new Map(); // id → conversation; those in the store
const running = new Map(); // conversation id → { message, controller } of the answer that is being written
let current = newConversation(defaultSettings());
let models = [];

const view = new ConversationView({
  retry,
  continueAnswer: (message) => runAnswer(current, message),
  edit(message, text) {
    ask(current.messages[message.parent], text);
    $("#question").focus();
  },
  show(message, label) {
    show(current, message);
    redraw();
    view.focus(message, label);
    save(current);
  },
});
const sidebar = new Sidebar({
  open,
  rename(conversation, title) {
    conversation.title = title;
    save(conversation);
    redraw();
  },
  remove: removeConversation,
});
const question = $("#question");

// Asking and answering

function send(text) {
  if (!text.trim() || running.has(current.id)) return;
  question.value = "";
  fitQuestion();
  ask(path(current).at(-1), text.trim());
}

function ask(parent, text) {
  const asked = addMessage(current, parent, { role: "user", text });
  conversations.set(current.id, current);
  if (location.hash !== `#${current.id}`) location.hash = current.id;
  answer(current, asked);
}

function answer(conversation, asked) {
  runAnswer(conversation, addMessage(conversation, asked, { role: "assistant", model: modelOf(conversation) }));
}

function retry(message) {
  if (message.text || message.reasoning) answer(current, current.messages[message.parent]);
  else runAnswer(current, message);
}

async function runAnswer(conversation, message) {
  const controller = new AbortController();
  message.model = modelOf(conversation);
  running.set(conversation.id, { message, controller });
  save(conversation);
  redraw();
  view.follow();
  announce("The model is answering.");
  const drawing = new Drawing(conversation, message);
  const error = await writeAnswer(conversation, message, controller.signal, (progress) => drawing.request(progress));
  drawing.stop();
  running.delete(conversation.id);
  conversation.updated = Date.now();
  save(conversation);
  redraw();
  announceEnd(message);
  if (error?.status === 401 && (await askForKey())) {
    await loadModels();
    runAnswer(conversation, message);
  }
}

function announceEnd({ text, error }) {
  announce(error ?? (text.length < 300 ? `The model answered: ${text}` : "The answer is complete."));
}

/** Draws and saves a growing answer, at most so often that the browser has most of its time for other things. */
class Drawing {
  #timer = null;
  #delay = REDRAW;
  #saved = Date.now();

  constructor(conversation, message) {
    Object.assign(this, { conversation, message });
  }

  request(progress) {
    this.progress = progress;
    this.#timer ??= setTimeout(() => this.#draw(), this.#delay);
  }

  stop() {
    clearTimeout(this.#timer);
  }

  #draw() {
    this.#timer = null;
    const start = performance.now();
    if (this.conversation === current) view.update(this.message, this.message, this.progress);
    this.#delay = Math.max(REDRAW, 3 * (performance.now() - start));
    if (Date.now() - this.#saved < SAVE) return;
    this.#saved = Date.now();
    save(this.conversation);
  }
}

const stop = () => running.get(current.id)?.controller.abort();

// Conversations

function open(conversation) {
  current = conversation;
  closeSidebarOnPhone();
  if (conversations.has(current.id)) location.hash = current.id;
  else history.replaceState(null, "", location.pathname + location.search);
  redraw();
  view.follow();
  if (matchMedia("(hover: hover)").matches) question.focus(); // elsewhere it would open the keyboard of a phone
}

const startNew = () => open(newConversation(defaultSettings(), current.model));

function removeConversation(conversation) {
  running.get(conversation.id)?.controller.abort();
  conversations.delete(conversation.id);
  store.remove(conversation.id).catch(showStorageError);
  if (conversation === current) startNew();
  else redraw();
  const undo = () => {
    conversations.set(conversation.id, conversation);
    save(conversation);
    open(conversation);
  };
  toast(`Deleted “${conversation.title}”.`, { label: "Undo", run: undo });
  $("#toast button").focus();
}

async function save(conversation) {
  if (!conversations.has(conversation.id)) return;
  try {
    await store.save(conversation);
    $("#storage-error").hidden = true;
  } catch (error) {
    showStorageError(error);
  }
}

function showStorageError(error) {
  const full = error?.name === "QuotaExceededError";
  $("#storage-error").textContent = full
    ? "The browser has no room for more conversations. Export and delete some of them; until then, new messages are lost when you close the page."
    : "The browser doesn't let this page keep conversations: they are lost when you close it. Export those you need.";
  $("#storage-error").hidden = false;
}

async function importFiles(files) {
  try {
    const imported = (await Promise.all([...files].map(async (file) => fromJSON(await file.text())))).flat();
    for (const conversation of imported) conversations.set(conversation.id, conversation);
    await Promise.all(imported.map(save));
    if (imported.length) open(imported[0]);
    toast(imported.length === 1 ? "Imported one conversation." : `Imported ${imported.length} conversations.`);
  } catch (error) {
    toast(error.message);
  }
}

const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";

// Drawing

function redraw() {
  const answering = running.get(current.id)?.message ?? null;
  view.show(current, answering);
  sidebar.show([...conversations.values()], current.id, (id) => running.has(id));
  document.title = current.title ? `${current.title} – mlxlm` : "mlxlm";
  $("#title").textContent = current.title || "New conversation";
  $("#send").hidden = Boolean(answering);
  $("#stop").hidden = !answering;
  $("#system-set").hidden = !current.settings.system;
  $("#model").value = modelOf(current) ?? "";
  $("#export-markdown").disabled = $("#export-json").disabled = !conversations.has(current.id);
  $("#export-all").disabled = !conversations.size;
}

function fitQuestion() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
  $("#send").disabled = !question.value.trim();
}

// Models and the API key

const modelOf = ({ model }) => (models.find(({ id }) => id === model) ?? models[0])?.id;

async function loadModels() {
  try {
    models = await listModels();
    $("#server-error").hidden = true;
  } catch (error) {
    if (error.status === 401 && (await askForKey())) return loadModels();
    $("#server-error span").textContent = error.message;
    $("#server-error").hidden = false;
  }
  const select = $("#model");
  select.replaceChildren(...models.map(({ id }) => h("option", { value: id }, id)));
  select.disabled = models.length < 2;
  select.hidden = !models.length;
  $("#welcome-model").textContent = models.length === 1 ? models[0].id : "the model";
  return redraw();
}

/** @returns {Promise<boolean>} whether a key was entered */
function askForKey() {
  const dialog = $("#key");
  const input = $("input", dialog);
  input.value = "";
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => {
      if (dialog.returnValue === "use") setAPIKey(input.value.trim());
      resolve(dialog.returnValue === "use");
    };
  });
}

// Controls and start

question.addEventListener("input", fitQuestion);
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send(question.value);
  } else if (event.key === "ArrowUp" && !question.value && !running.has(current.id)) {
    event.preventDefault();
    view.editLast();
  }
});
$("#composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(question.value);
});
for (const example of document.querySelectorAll("#examples button")) {
  example.addEventListener("click", () => send(example.textContent));
}
$("#model").addEventListener("change", ({ target }) => {
  current.model = target.value;
  save(current);
});
$("#import-file").addEventListener("change", async ({ target }) => {
  await importFiles(target.files);
  target.value = "";
});
enableControls({
  "new": startNew,
  "stop": stop,
  "settings-button": () => editSettings(current.settings, (settings) => {
    current.settings = settings;
    save(current);
    redraw();
  }),
  "export-markdown": () => download(`${fileName(current.title)}.md`, "text/markdown", toMarkdown(current)),
  "export-json": () => download(`${fileName(current.title)}.json`, "application/json", toJSON([current])),
  "export-all": () => download("conversations.json", "application/json", toJSON([...conversations.values()])),
  "import": () => $("#import-file").click(),
  "retry-server": loadModels,
});

function openFromAddress() {
  const conversation = conversations.get(location.hash.slice(1));
  if (conversation && conversation !== current) open(conversation);
  else if (!location.hash && conversations.has(current.id)) startNew();
}

async function updateFromOtherTab(id) {
  if (running.has(id)) return;
  const conversation = await store.load(id);
  if (conversation) conversations.set(id, conversation);
  else conversations.delete(id);
  if (id === current.id && conversation) current = conversation;
  redraw();
}

async function start() {
  redraw();
  fitQuestion();
  try {
    await store.openStore();
    for (const conversation of await store.loadAll()) conversations.set(conversation.id, conversation);
    store.onOtherTab(updateFromOtherTab);
  } catch (error) {
    showStorageError(error);
  }
  addEventListener("hashchange", openFromAddress);
  openFromAddress();
  await loadModels();
}

start();
