import { $, openDialog, recall, remember } from "./dom.js";

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
    return validSettings(JSON.parse(recall(DEFAULTS)));
  } catch {
    return {}; // not JSON
  }
}

/** @returns {object} What of any value can be the settings of a conversation. */
export function validSettings(value) {
  return Object.fromEntries(Object.entries(Object(value)).filter(([name, setting]) => VALID[name]?.(setting)));
}

/**
 * Opens the dialog with the settings of a conversation: the fields of its form by name, without those left empty.
 * @param {object} settings
 * @returns {Promise<?object>} the new ones; null if they are not saved
 */
export async function editSettings(settings) {
  const dialog = $("#settings");
  const fields = [...$("form", dialog).elements].filter(({ name }) => name);
  const fill = (values) => fields.forEach((field) => setField(field, values[field.name]));
  fill(settings);
  $("#as-default").checked = false;
  $("#clear-settings").onclick = () => fill({});
  if (!(await openDialog(dialog))) return null;
  const saved = validSettings(Object.fromEntries(fields.map((field) => [field.name, valueOf(field)])));
  if ($("#as-default").checked) remember(DEFAULTS, JSON.stringify(saved));
  return saved;
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
