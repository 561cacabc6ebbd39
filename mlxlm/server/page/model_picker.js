/** The dialog with the server's models: choosing one or two, loading, unloading and downloading. */
import { listCatalog, loadModel, pullModel, unloadModel } from "./api.js";
import { $, h, openDialog } from "./dom.js";
import { allModels, loadModels, modelOf, secondModelOf } from "./models.js";

const pending = new Set(); // ids of models that are being loaded or unloaded
let conversation; // whose models are chosen
let onChange;

/**
 * Opens the dialog.
 * @param {import("./conversation.js").Conversation} chooser  whose `model` and `secondModel` are chosen
 * @param {(chooser: import("./conversation.js").Conversation) => void} callback  called when they or the models change
 */
export async function pickModel(chooser, callback) {
  [conversation, onChange] = [chooser, callback];
  $("#pull").onsubmit = download;
  draw();
  openDialog($("#models"));
  await refresh(); // another program may have loaded or downloaded one
  await showErrors(drawCatalog);
}

function choose(model, secondModel) {
  Object.assign(conversation, { model, secondModel });
  onChange(conversation);
  draw();
}

async function refresh() {
  await loadModels();
  onChange(conversation);
  draw();
}

function draw() {
  const focused = document.activeElement.dataset.key;
  $("#model-list").replaceChildren(...allModels().map(row));
  if (focused) $(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

function row(model) {
  const { id, loaded } = model;
  const [first, second] = [modelOf(conversation), secondModelOf(conversation)];
  const waits = pending.has(id);
  const label = loaded ? "Unload" : "Load";
  const action = (name, properties, ...children) =>
    h("button", { type: "button", "data-key": `${name} ${id}`, ...properties }, ...children);
  const use = () => {
    choose(id, id === second ? undefined : second);
    $("#models").close();
  };
  const compare = () => choose(first, id === second ? undefined : id);
  const load = () => waits || run(id, loaded ? unloadModel : loadModel);
  return h("li", {},
    action("use", { class: "model", "aria-pressed": String(id === first), onclick: use },
      h("strong", {}, id), h("small", {}, describe(model))),
    action("compare", {
      "aria-pressed": String(id === second), "aria-label": `Compare with ${id}`, disabled: id === first, onclick: compare,
    }, "Compare"),
    action("load", { "aria-disabled": waits && "true", "aria-label": `${label} ${id}`, onclick: load },
      waits ? `${label}ing…` : label));
}

async function run(id, action) {
  pending.add(id);
  draw();
  await showErrors(() => action(id));
  pending.delete(id);
  await refresh();
}

async function download(event) {
  event.preventDefault();
  const [input, start, progress, output] = ["input", "button", "progress", "output"].map((tag) => $(tag, $("#pull")));
  const name = input.value.trim();
  start.disabled = true;
  progress.hidden = false;
  progress.removeAttribute("value"); // until the size is known
  let report = "";
  await showErrors(async () => {
    await pullModel(name, ({ completed, total }) => {
      if (total) progress.value = completed / total;
      output.textContent = total ? `${size(completed)} of ${size(total)}` : "";
    });
    report = `Downloaded ${name}.`;
    input.value = "";
    await drawCatalog();
  });
  output.textContent = report;
  start.disabled = false;
  progress.hidden = true;
  await refresh();
}

/** Offers the models that can be downloaded, if the server downloads any. */
async function drawCatalog() {
  const catalog = await listCatalog();
  $("#pull").hidden = !catalog.length;
  $("#catalog").replaceChildren(...catalog.map((model) =>
    h("option", { value: model.id }, `${size(model.size)} · ${model.description}`)));
}

async function showErrors(action) {
  const error = $("#models-error");
  error.hidden = true;
  try {
    await action();
  } catch ({ message }) {
    error.textContent = message;
    error.hidden = false;
  }
}

function describe({ parameters, quantization, context_length: context, size: bytes, loaded }) {
  const facts = [
    loaded && "loaded",
    parameters && `${short(parameters)} parameters`,
    quantization,
    context && `context ${context.toLocaleString()}`,
    bytes && size(bytes),
  ];
  return facts.filter(Boolean).join(" · ");
}

const short = (number) => number.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
const size = (bytes) => `${short(bytes).replace(/[KMBT]?$/, (unit) => ` ${unit.replace("B", "G")}B`)}`;
