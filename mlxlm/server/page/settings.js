import { $, remember } from "./dom.js";

const DEFAULTS = "mlxlm.settings";
const TEXTS = ["system", "reasoning"];
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

/** @returns {object} The settings of new conversations. */
export function defaultSettings() {
  try {
    return validSettings(JSON.parse(localStorage.getItem(DEFAULTS)));
  } catch {
    return {};
  }
}

/** @returns {object} What of any value can be the settings of a conversation. */
export function validSettings(value) {
  const known = Object.entries(Object(value)).filter(([name, setting]) =>
    TEXTS.includes(name) ? typeof setting === "string" : NUMBERS.includes(name) && Number.isFinite(setting));
  return Object.fromEntries(known);
}

/**
 * Opens the dialog with the settings of a conversation: the fields of its form by name, without those left empty.
 * @param {object} settings
 * @param {(settings: object) => void} onSave
 */
export function editSettings(settings, onSave) {
  const dialog = $("#settings");
  const form = $("form", dialog);
  const fields = [...form.elements].filter(({ name }) => name);
  const clear = () => fields.forEach((field) => (field.value = field.name === "reasoning" ? "collapsed" : ""));
  clear();
  for (const field of fields) field.value = settings[field.name] ?? field.value;
  $("#as-default").checked = false;
  $("#clear-settings").onclick = clear;
  form.onsubmit = (event) => {
    event.preventDefault();
    const filled = fields.filter(({ value }) => value.trim());
    const valueOf = (field) => (field.type === "number" ? field.valueAsNumber : field.value);
    const saved = Object.fromEntries(filled.map((field) => [field.name, valueOf(field)]));
    if ($("#as-default").checked) remember(DEFAULTS, JSON.stringify(saved));
    dialog.close();
    onSave(saved);
  };
  dialog.showModal();
}
