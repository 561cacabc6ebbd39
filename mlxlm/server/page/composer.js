/** The message box: the text and the files of the next question. */
import { countTokens, extractText } from "./api.js";
import { describeTokens, fileBlock } from "./conversation.js";
import { $, h, iconButton, toast } from "./dom.js";

const MB = 1 << 20;
const MAX_BYTES = 16 * MB; // of a request
const LONG_PASTE = 5000; // characters, from where on pasted text becomes a file

export class Composer {
  #files = []; // with `tokens`, when they are known; Infinity for more than the server counts
  #context = Infinity; // of the model that counted them
  #counter = undefined;

  /**
   * @param {object} actions  `send(text, files)`, which returns whether it was sent; `editLast()`
   * @param {() => string|undefined} model  whose tokens are counted
   */
  constructor(actions, model) {
    Object.assign(this, { actions, model });
    this.box = $("#question");
    this.box.addEventListener("input", () => this.#fit());
    this.box.addEventListener("keydown", (event) => this.#onKey(event));
    this.box.addEventListener("paste", (event) => this.#onPaste(event));
    $("#composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    $("#attach").addEventListener("click", () => $("#file").click());
    $("#file").addEventListener("change", ({ target }) => {
      this.#add([...target.files]);
      target.value = "";
    });
    this.#acceptDrops(document.body);
    this.#fit();
  }

  /** On a device without a mouse it would open the keyboard on the screen. */
  focus() {
    if (matchMedia("(hover: hover)").matches) this.box.focus();
  }

  /** Counts the tokens of the files again if the model is another one. */
  recount() {
    if (this.#counter !== this.model()) this.#files.forEach((file) => this.#count(file));
  }

  #send() {
    const text = this.box.value.replace(/^(\s*\n)+|\s+$/g, ""); // keeps the indentation of the first line
    if (!text && !this.#files.length) return;
    if (this.#problem()) {
      toast(this.#problem());
    } else if (this.actions.send(text, this.#files)) {
      this.box.value = "";
      this.#files = [];
      this.#draw();
    }
  }

  #onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.#send();
    } else if (event.key === "ArrowUp" && !this.box.value) {
      event.preventDefault();
      this.actions.editLast();
    }
  }

  #onPaste(event) {
    const { files, types } = event.clipboardData;
    const text = event.clipboardData.getData("text/plain");
    // Office programs copy a picture of the text with it.
    if (files.length && !types.includes("text/html")) this.#add([...files]);
    else if (text.length > LONG_PASTE) this.#add([new File([text], "pasted text", { type: "text/plain" })]);
    else return;
    event.preventDefault();
  }

  #acceptDrops(area) {
    const hasFiles = ({ dataTransfer }) => dataTransfer.types.includes("Files");
    area.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      area.classList.add("dropping");
    });
    area.addEventListener("dragleave", ({ relatedTarget }) => {
      if (!area.contains(relatedTarget)) area.classList.remove("dropping");
    });
    area.addEventListener("drop", (event) => {
      area.classList.remove("dropping");
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.#add([...event.dataTransfer.files]);
    });
  }

  async #add(files) {
    const results = await Promise.allSettled(files.map(readFile));
    const read = results.filter(({ value }) => value).map(({ value }) => value);
    const problems = results.filter(({ reason }) => reason).map(({ reason }) => reason.message);
    if (problems.length) toast(problems.join("; "));
    this.#files.push(...read);
    this.#draw();
    read.forEach((file) => this.#count(file));
    this.focus();
  }

  async #count(file) {
    const model = this.#counter = this.model();
    delete file.tokens;
    try {
      const { count, max_model_len: context } = await countTokens(model, fileBlock(file));
      if (model !== this.#counter) return; // another one counts them now
      file.tokens = count;
      this.#context = context;
    } catch (error) {
      if (error.status === 400) file.tokens = Infinity; // other errors don't say that it is too long
    }
    this.#draw();
  }

  /** Why the files can't be sent; "" if they can. */
  #problem() {
    const tokens = this.#files.reduce((sum, file) => sum + (file.tokens ?? 0), 0);
    if (tokens < this.#context) return "";
    const [taken, context] = [tokens, this.#context].map((count) => count.toLocaleString());
    const numbers = Number.isFinite(tokens) ? `: they take ${taken} of ${context} tokens` : "";
    return `The files don't fit into the context of ${this.#counter}${numbers}. Remove some, or choose another model.`;
  }

  #draw() {
    const remove = (file) => {
      this.#files = this.#files.filter((other) => other !== file);
      this.#draw();
      this.box.focus();
    };
    $("#files").replaceChildren(...this.#files.map((file) => h("li", { class: "chip" },
      h("span", { class: "name" }, file.name),
      h("span", { class: "soft" }, Number.isFinite(file.tokens ?? 0) ? describeTokens(file.tokens) : "too long"),
      iconButton(`Remove ${file.name}`, "close", () => remove(file)))));
    $("#files-problem").textContent = this.#problem();
    this.#fit();
  }

  #fit() {
    this.box.style.height = "auto";
    this.box.style.height = `${this.box.scrollHeight}px`;
    $("#send").disabled = !this.box.value.trim() && !this.#files.length;
  }
}

/** @returns {Promise<{name: string, text: string}>} The text of a file, as the server reads it. */
async function readFile(file) {
  const { name, size } = file;
  if (size > MAX_BYTES) throw new Error(`${name} has ${Math.ceil(size / MB)} MB; the limit is ${MAX_BYTES / MB} MB`);
  const content = await file.arrayBuffer().catch(() => {
    throw new Error(`${name} can't be read. If it is a folder, add its files instead`);
  });
  return { name, text: await extractText(name, content) };
}
