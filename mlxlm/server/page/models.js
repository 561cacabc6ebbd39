/** The models of the server, and the API key that it may ask for. */
import { hasAPIKey, listModels, setAPIKey } from "./api.js";
import { $, openDialog } from "./dom.js";

const EXAMPLES = [
  "Explain how a refrigerator works to a curious ten-year-old.",
  "Write a Python function that finds the longest word in a text file.",
  "Compare tea and coffee in a table.",
];

let models = [];

const find = (model) => models.find(({ id }) => id === model);

/** @returns {object[]} The models, as the server described them last. */
export const allModels = () => models;

/** @returns {string|undefined} The model of a conversation: the chosen one, or one that is loaded, or the first. */
export const modelOf = ({ model }) => (find(model) ?? models.find(({ loaded }) => loaded) ?? models[0])?.id;

/** @returns {string|undefined} The model that answers as well, if one was chosen. */
export const secondModelOf = ({ secondModel }) => find(secondModel)?.id;

/** @returns {number|undefined} How many tokens a model can see, as far as the server has said it. */
export const contextLengthOf = (model) => find(model)?.context_length ?? undefined;

/** @returns {string[]} Prompts to try with a model: its own, or else some for any model. */
export function examplesOf(model) {
  const own = find(model)?.example_prompt;
  return own ? [own] : EXAMPLES;
}

/** Asks the server for its models, and the user for an API key if it wants one. Returns whether it worked. */
export async function loadModels() {
  try {
    models = await listModels();
  } catch (error) {
    if (error.status === 401 && (await askForKey(error.message))) return loadModels();
    $("#server-error span").textContent = error.message;
    $("#server-error").hidden = false;
    return false;
  }
  $("#server-error").hidden = true;
  return true;
}

/** @returns {Promise<boolean>} whether a key was entered */
async function askForKey(reason) {
  const dialog = $("#key");
  const input = $("input", dialog);
  input.value = "";
  $("#key-reason").textContent = hasAPIKey() ? reason : "";
  const entered = await openDialog(dialog);
  if (entered) setAPIKey(input.value);
  return entered;
}
