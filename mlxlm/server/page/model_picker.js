/** The dialog with the server's models: choosing one or two, loading, unloading and downloading. */
import { listCatalog, loadModel, pullModel, unloadModel } from "./api.js";
import { $, h } from "./dom.js";
import { allModels, loadModels, modelOf, secondModelOf } from "./models.js";

const pending = new Set(); // ids of models that are being loaded or unloaded

/**
 * Opens the dialog.
 * @param {import("./conversation.js").Conversation} conversation  whose models are shown
 * @param {(model: string, secondModel: ?string) => void} onChoice
 */
export async function pickModel(conversation, onChoice) {
  const dialog = $("#models");
  const draw = () => {
    const focused = document.activeElement.dataset.key;
    $("#model-list").replaceChildren(...allModels().map((model) => row(model)));
    if (focused) $(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  };
  const refresh = async () => {
    await loadModels();
    onChoice(conversation.model, conversation.secondModel);
    draw();
  };

  function row(model) {
    const { id, loaded } = model;
    const chosen = id === modelOf(conversation);
    const second = id === secondModelOf(conversation);
    const choose = () => {
      onChoice(id, second ? undefined : conversation.secondModel);
      dialog.close();
    };
    const compare = () => {
      onChoice(modelOf(conversation), second ? undefined : id);
      draw();
    };
    const waits = pending.has(id);
    const load = () => waits || run(id, () => (loaded ? unloadModel(id) : loadModel(id)));
    const name = h("button", { type: "button", class: "model", "aria-pressed": String(chosen), "data-key": `use ${id}`, onclick: choose },
      h("strong", {}, id), h("small", {}, describe(model)));
    const label = waits ? "Wait…" : loaded ? "Unload" : "Load";
    return h("li", {}, name,
      h("button", { type: "button", "aria-pressed": String(second), "aria-label": `Compare with ${id}`, "data-key": `compare ${id}`, onclick: compare }, "Compare"),
      h("button", { type: "button", "aria-disabled": waits && "true", "aria-label": `${label} ${id}`, "data-key": `load ${id}`, onclick: load }, label));
  }

  async function run(id, action) {
    pending.add(id);
    draw();
    await showErrors(action);
    pending.delete(id);
    await refresh();
  }

  $("#pull").onsubmit = async (event) => {
    event.preventDefault();
    const name = $("#pull input").value.trim();
    const [start, progress] = [$("#pull button"), $("#pull progress")];
    start.disabled = true;
    progress.hidden = false;
    progress.removeAttribute("value"); // until the size is known
    let report = "";
    await showErrors(async () => {
      await pullModel(name, ({ completed, total }) => {
        if (total) progress.value = completed / total;
        $("#pull output").textContent = total ? `${size(completed)} of ${size(total)}` : "";
      });
      report = `${name} is here.`;
      await drawCatalog();
    });
    $("#pull output").textContent = report;
    start.disabled = false;
    progress.hidden = true;
    await refresh();
  };

  draw();
  dialog.showModal();
  await refresh(); // another program may have loaded or downloaded one
  await showErrors(drawCatalog);
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
    context && `${context.toLocaleString()} tokens of context`,
    bytes && size(bytes),
  ];
  return facts.filter(Boolean).join(" · ");
}

const short = (number) => number.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
const size = (bytes) => `${short(bytes).replace(/[KMBT]?$/, (unit) => ` ${unit.replace("B", "G")}B`)}`;
