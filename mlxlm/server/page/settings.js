/** The settings of a conversation. Their form in index.html declares them: each has a field of its name. */
import { $, openDialog, recall, remember } from "./dom.js";

const DEFAULTS = "mlxlm.settings";
const dialog = $("#settings");
const fields = [...$("form", dialog).elements].filter(({ name }) => name);
const isText = (value) => typeof value === "string";

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
  const settings = fields.map((field) => [field, Object(value)[field.name]]);
  return Object.fromEntries(settings.filter(isValid).map(([{ name }, setting]) => [name, setting]));
}

function isValid([{ name, type }, setting]) {
  if (type === "checkbox") return setting === true;
  if (type === "number") return Number.isFinite(setting);
  return name === "stop" ? Array.isArray(setting) && setting.every(isText) : isText(setting);
}

/**
 * Opens the dialog with the settings of a conversation.
 * @param {object} settings
 * @returns {Promise<?object>} the new ones, without those left empty; null if they are not saved
 */
export async function editSettings(settings) {
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
