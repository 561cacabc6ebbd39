/** The chat page: connects the server, the library of conversations and what is shown. */
import { paced, writeAnswer } from "./answer.js";
import { Composer } from "./composer.js";
import { closeSidebarOnPhone, enableControls } from "./controls.js";
import { ConversationView } from "./conversation_view.js";
import { addMessage, comparedAnswers, newConversation, path, removeMessage, show } from "./conversation.js";
import { $, announce, dismissToast, download, h, toast } from "./dom.js";
import * as library from "./library.js";
import { pickModel } from "./model_picker.js";
import { examplesOf, loadModels, modelOf, secondModelOf } from "./models.js";
import { defaultSettings, editSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { toJSON, toMarkdown } from "./transfer.js";

const SAVE = 2000; // milliseconds between two saves of a growing answer

const running = new Map(); // message → { conversation, controller } of the answers that are being written
let current = newConversation(defaultSettings());

const composer = new Composer({ send, editLast: () => isBusy(current.id) || view.editLast() }, () => modelOf(current));
const view = new ConversationView({
  retry,
  continueAnswer: (message) => runAnswer(current, message),
  edit: (message, text) => ask(current.messages[message.parent], text, message.files),
  remove: removeFrom,
  stop: (message) => (running.has(message) ? running.get(message).controller.abort() : stop()),
  keep,
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

const answeredHere = () => [...running.values()].map(({ conversation }) => conversation.id);
const isBusy = (id) => answeredHere().includes(id) || library.isAnsweredElsewhere(id);

/** @returns {boolean} whether it was sent */
function send(text, files = []) {
  if (isBusy(current.id)) return false;
  if (comparedAnswers(current).length) {
    toast("Keep one of the two answers first.");
    return false;
  }
  ask(path(current).at(-1), text, files);
  return true;
}

function ask(parent, text, files = []) {
  if (isBusy(current.id)) return;
  const asked = addMessage(current, parent, { role: "user", text, ...(files.length && { files }) });
  library.add(current);
  location.hash = current.id;
  answer(current, asked);
}

/** Answers a question with the model of the conversation, and with a second one if there is one. */
function answer(conversation, asked) {
  conversation.model = modelOf(conversation) ?? conversation.model;
  const second = secondModelOf(conversation);
  const models = second ? [conversation.model, second] : [conversation.model];
  const answers = models.map((model) => addMessage(conversation, asked, { role: "assistant", model }));
  conversation.compared = answers.length > 1 ? answers.map(({ id }) => id) : undefined;
  for (const message of answers) runAnswer(conversation, message);
}

function retry(message) {
  if (message.text || message.reasoning) answer(current, current.messages[message.parent]);
  else runAnswer(current, message);
}

/** Goes on with one of two answers. The other one stays as another version. */
function keep(message) {
  if (library.isAnsweredElsewhere(current.id)) return;
  stop();
  dismissToast();
  current.compared = undefined;
  show(current, message);
  library.save(current);
  redraw();
  composer.focus();
}

/** Writes an answer, or continues it. */
async function runAnswer(conversation, message) {
  const controller = new AbortController();
  running.set(message, { conversation, controller });
  if (!comparedAnswers(conversation).includes(message)) message.model = modelOf(conversation);
  dismissToast(); // undoing a deletion would remove what is being written
  library.save(conversation);
  redraw();
  if (conversation === current) view.follow();
  composer.focus();
  announce("The model is answering.");

  let progress;
  let saved = Date.now();
  const draw = paced(() => {
    if (conversation === current) view.update(message, progress);
    if (Date.now() - saved < SAVE) return;
    saved = Date.now();
    library.save(conversation);
  });
  const error = await writeAnswer(conversation, message, controller.signal, (newProgress) => {
    progress = newProgress;
    draw();
  });
  draw.stop();

  running.delete(message);
  conversation.updated = Date.now();
  library.save(conversation);
  redraw();
  if (conversation === current) announceEnd(message);
  if (error?.status === 401 && (await loadModels())) runAnswer(conversation, message);
  if (error?.status === 404 && (await loadModels())) redraw(); // the server has other models now
}

function announceEnd({ text, error }) {
  announce(error ?? (text.length < 300 ? `The model answered: ${text}` : "The answer is complete."));
}

function stop(id = current.id) {
  for (const { conversation, controller } of running.values()) if (conversation.id === id) controller.abort();
  if (library.stopElsewhere(id)) redraw();
}

/** Deletes a message and what follows it. */
function removeFrom(message) {
  const conversation = current;
  const undo = removeMessage(conversation, message);
  library.save(conversation);
  redraw();
  offerUndo("Deleted the message and those after it.", () => {
    undo();
    library.save(conversation);
    open(conversation);
  });
}

// Conversations

function open(conversation) {
  current = conversation;
  closeSidebarOnPhone();
  if (library.get(current.id)) location.hash = current.id;
  else history.replaceState(null, "", location.pathname + location.search);
  redraw();
  view.follow();
  composer.focus();
}

function startNew() {
  open({ ...newConversation(defaultSettings(), current.model), secondModel: current.secondModel });
}

function remove(conversation) {
  stop(conversation.id);
  library.remove(conversation);
  if (conversation === current) startNew();
  else redraw();
  offerUndo(`Deleted “${conversation.title}”.`, () => {
    library.add(conversation);
    open(conversation);
  });
}

function offerUndo(text, run) {
  toast(text, { label: "Undo", run });
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
  const answering = answersBeingWritten();
  view.show(current, answering);
  sidebar.show(library.all(), current.id, isBusy);
  document.title = current.title ? `${current.title} – mlxlm` : "mlxlm";
  $("#title").textContent = current.title || "New conversation";
  $("#send").hidden = isBusy(current.id);
  $("#stop").hidden = !isBusy(current.id);
  $("#system-set").hidden = !current.settings.system;
  drawModels();
  $("#export-markdown").disabled = $("#export-json").disabled = !library.get(current.id);
  $("#export-all").disabled = !library.all().length;
}

/** The answers of the current conversation that are being written, here or in another tab. */
function answersBeingWritten() {
  const isUnfinished = ({ role, finish, error }) => role === "assistant" && !finish && !error;
  const isRunning = library.isAnsweredElsewhere(current.id) ? isUnfinished : (message) => running.has(message);
  return new Set([...path(current).slice(-1), ...comparedAnswers(current)].filter(isRunning));
}

function drawModels() {
  const [model, second] = [modelOf(current), secondModelOf(current)];
  $("#model").hidden = !model;
  $("#model span").textContent = second ? `${model} and ${second}` : model;
  $("#welcome-model").textContent = model ?? "the model";
  const example = (text) => h("li", {}, h("button", { type: "button", onclick: () => send(text) }, text));
  $("#examples").replaceChildren(...examplesOf(model).map(example));
}

// Start

$("#import-file").addEventListener("change", importFiles);
enableControls({
  "new": startNew,
  "model": () => pickModel(current, (conversation) => {
    library.save(conversation);
    composer.recount();
    redraw();
  }),
  "stop": () => {
    stop();
    composer.focus();
  },
  "settings-button": async () => {
    const conversation = current;
    conversation.settings = (await editSettings(conversation.settings)) ?? conversation.settings;
    library.save(conversation);
    redraw();
  },
  "export-markdown": () => download(fileName("md"), "text/markdown", toMarkdown(current)),
  "export-json": () => download(fileName("json"), "application/json", toJSON([current])),
  "export-all": () => download("conversations.json", "application/json", toJSON(library.all())),
  "import": () => $("#import-file").click(),
  "retry-server": () => loadModels().then(redraw),
});
$(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the conversation
  $("#question").focus();
});
addEventListener("hashchange", openFromAddress);

redraw();
await library.load({ answering: answeredHere, stop, onChange: redraw });
openFromAddress();
await loadModels();
redraw();
