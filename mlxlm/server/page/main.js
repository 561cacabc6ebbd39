/** The chat page: connects the server, the library of conversations and what is shown. */
import { writeAnswer } from "./answer.js";
import { closeSidebarOnPhone, enableControls } from "./controls.js";
import { ConversationView } from "./conversation_view.js";
import { addMessage, newConversation, path, show } from "./conversation.js";
import { $, announce, download, toast } from "./dom.js";
import * as library from "./library.js";
import { loadModels, modelOf } from "./models.js";
import { Pace } from "./pace.js";
import { defaultSettings, editSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { toJSON, toMarkdown } from "./transfer.js";

const SAVE = 2000; // milliseconds between two saves of a growing answer

const running = new Map(); // conversation id → { message, controller } of the answer that is being written
let current = newConversation(defaultSettings());

const question = $("#question");
const view = new ConversationView({
  retry,
  continueAnswer: (message) => runAnswer(current, message),
  edit: (message, text) => ask(current.messages[message.parent], text),
  show(message, label) {
    show(current, message);
    library.save(current);
    redraw();
    view.focus(message, label);
  },
});
const sidebar = new Sidebar({
  open,
  remove,
  rename(conversation, title) {
    conversation.title = title;
    library.save(conversation);
    redraw();
  },
});

// Asking and answering

function send(text) {
  if (!text.trim() || running.has(current.id)) return;
  question.value = "";
  fitQuestion();
  ask(path(current).at(-1), text.replace(/^(\s*\n)+|\s+$/g, "")); // keeps the indentation of the first line
}

function ask(parent, text) {
  if (running.has(current.id)) return;
  const asked = addMessage(current, parent, { role: "user", text });
  library.add(current);
  location.hash = current.id;
  answer(current, asked);
}

function answer(conversation, asked) {
  runAnswer(conversation, addMessage(conversation, asked, { role: "assistant" }));
}

function retry(message) {
  if (message.text || message.reasoning) answer(current, current.messages[message.parent]);
  else runAnswer(current, message);
}

/** Writes an answer, or continues it. */
async function runAnswer(conversation, message) {
  const controller = new AbortController();
  running.set(conversation.id, { message, controller });
  message.model = modelOf(conversation);
  library.save(conversation);
  redraw();
  if (conversation === current) view.follow();
  focusQuestion();
  announce("The model is answering.");

  let progress;
  let saved = Date.now();
  const drawing = new Pace(() => {
    if (conversation === current) view.update(message, message, progress);
    if (Date.now() - saved < SAVE) return;
    saved = Date.now();
    library.save(conversation);
  });
  const error = await writeAnswer(conversation, message, controller.signal, (newProgress) => {
    progress = newProgress;
    drawing.request();
  });
  drawing.stop();

  running.delete(conversation.id);
  conversation.updated = Date.now();
  library.save(conversation);
  redraw();
  if (conversation === current) announceEnd(message);
  if (error?.status === 401 && (await loadModels())) runAnswer(conversation, message);
}

function announceEnd({ text, error }) {
  announce(error ?? (text.length < 300 ? `The model answered: ${text}` : "The answer is complete."));
}

function stop() {
  running.get(current.id)?.controller.abort();
  focusQuestion();
}

/** On a device without a mouse it would open the keyboard on the screen. */
function focusQuestion() {
  if (matchMedia("(hover: hover)").matches) question.focus();
}

// Conversations

function open(conversation) {
  current = conversation;
  closeSidebarOnPhone();
  if (library.get(current.id)) location.hash = current.id;
  else history.replaceState(null, "", location.pathname + location.search);
  redraw();
  view.follow();
  focusQuestion();
}

function startNew() {
  open(newConversation(defaultSettings(), current.model));
}

function remove(conversation) {
  running.get(conversation.id)?.controller.abort();
  library.remove(conversation);
  if (conversation === current) startNew();
  else redraw();
  const undo = () => {
    library.add(conversation);
    open(conversation);
  };
  toast(`Deleted “${conversation.title}”.`, { label: "Undo", run: undo });
  $("#toast button").focus();
}

async function importFiles({ target }) {
  try {
    const imported = await library.importFiles(target.files);
    if (imported.length) open(imported[0]);
    toast(imported.length === 1 ? "Imported one conversation." : `Imported ${imported.length} conversations.`);
  } catch (error) {
    toast(error.message);
  }
  target.value = "";
}

function fileName(extension) {
  const words = current.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  return `${words.slice(0, 60) || "conversation"}.${extension}`;
}

function openFromAddress() {
  const conversation = library.get(location.hash.slice(1));
  if (conversation && conversation !== current) open(conversation);
  else if (!location.hash && library.get(current.id)) startNew();
}

// Drawing

function redraw() {
  const answering = running.get(current.id)?.message ?? null;
  view.show(current, answering);
  sidebar.show(library.all(), current.id, (id) => running.has(id));
  document.title = current.title ? `${current.title} – mlxlm` : "mlxlm";
  $("#title").textContent = current.title || "New conversation";
  $("#send").hidden = Boolean(answering);
  $("#stop").hidden = !answering;
  $("#system-set").hidden = !current.settings.system;
  $("#model").value = modelOf(current) ?? "";
  $("#export-markdown").disabled = $("#export-json").disabled = !library.get(current.id);
  $("#export-all").disabled = !library.all().length;
}

function fitQuestion() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
  $("#send").disabled = !question.value.trim();
}

// Start

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
  library.save(current);
});
$("#import-file").addEventListener("change", importFiles);
enableControls({
  "new": startNew,
  "stop": stop,
  "settings-button": () => editSettings(current.settings, (settings) => {
    current.settings = settings;
    library.save(current);
    view.reset();
    redraw();
  }),
  "export-markdown": () => download(fileName("md"), "text/markdown", toMarkdown(current)),
  "export-json": () => download(fileName("json"), "application/json", toJSON([current])),
  "export-all": () => download("conversations.json", "application/json", toJSON(library.all())),
  "import": () => $("#import-file").click(),
  "retry-server": () => loadModels().then(redraw),
});
$(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the conversation
  question.focus();
});
addEventListener("hashchange", openFromAddress);

redraw();
fitQuestion();
await library.load((id) => running.has(id), (id) => {
  if (id === current.id) current = library.get(id) ?? current;
  redraw();
});
openFromAddress();
await loadModels();
redraw();
