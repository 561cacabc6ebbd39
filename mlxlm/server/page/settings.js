import { $, remember } from "./dom.js";

const DEFAULTS = "mlxlm.settings";
const isText = (value) => typeof value === "string";
const VALID = {
  system: isText,
  reasoning: isText,
  stop: (value) => Array.isArray(value) && value.every(isText),
  logprobs: (value) => value === true,
};
for (const name of ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"]) {
  VALID[name] = Number.isFinite;
}

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
  return Object.fromEntries(Object.entries(Object(value)).filter(([name, setting]) => VALID[name]?.(setting)));
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
  const fill = (values) => fields.forEach((field) => setField(field, values[field.name]));
  fill(settings);
  $("#as-default").checked = false;
  $("#clear-settings").onclick = () => fill({});
  form.onsubmit = (event) => {
    event.preventDefault();
    const saved = validSettings(Object.fromEntries(fields.map((field) => [field.name, valueOf(field)])));
    if ($("#as-default").checked) remember(DEFAULTS, JSON.stringify(saved));
    dialog.close();
    onSave(saved);
  };
  dialog.showModal();
}

function setField(field, value) {
  if (field.type === "checkbox") field.checked = Boolean(value);
  else if (field.name === "stop") field.value = (value ?? []).map((text) => text.replaceAll("\n", "\\n")).join("\n");
  else field.value = value ?? (field.name === "reasoning" ? "collapsed" : "");
}

/** @returns {*} The setting of a field; undefined if it is empty. */
function valueOf(field) {
  if (field.type === "checkbox") return field.checked || undefined;
  if (!field.value.trim()) return undefined;
  if (field.type === "number") return field.valueAsNumber;
  if (field.name === "stop") return field.value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  return field.value;
}
