/** The models of the server, and the API key that it may ask for. */
import { hasAPIKey, listModels, setAPIKey } from "./api.js";
import { $, h } from "./dom.js";

let models = [];

/** @returns {string|undefined} The model of a conversation: the first of the server unless another was chosen. */
export const modelOf = ({ model }) => (models.find(({ id }) => id === model) ?? models[0])?.id;

/** @returns {number|undefined} How many tokens a model can see, as far as the server has said it. */
export const contextLengthOf = (model) => models.find(({ id }) => id === model)?.context_length ?? undefined;

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
  const select = $("#model");
  select.replaceChildren(...models.map(({ id }) => h("option", { value: id }, id)));
  select.disabled = models.length < 2;
  select.hidden = !models.length;
  $("#welcome-model").textContent = models.length === 1 ? models[0].id : "the model";
  $("#server-error").hidden = true;
  return true;
}

/** @returns {Promise<boolean>} whether a key was entered */
function askForKey(reason) {
  const dialog = $("#key");
  const input = $("input", dialog);
  input.value = "";
  dialog.returnValue = "";
  $("#key-reason").textContent = hasAPIKey() ? reason : "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => {
      if (dialog.returnValue) setAPIKey(input.value);
      resolve(Boolean(dialog.returnValue));
    };
  });
}
