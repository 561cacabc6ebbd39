import { alternatives, contentOf, describeTokens } from "./conversation.js";
import { $, copy, h, icon, iconButton } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { contextLengthOf } from "./models.js";
import { TokensView } from "./tokens_view.js";

const LONG_QUESTION = 1500; // characters; the rest is shown on demand
const CUT_OFF = { length: "The answer reached its maximum length.", stopped: "Stopped." }; // it can be continued
const NEARLY_FULL = 0.5; // of the model's context, from where on it is said

/**
 * One message on the page.
 *
 * `actions` has what can be done with it: `retry(message)`, `continueAnswer(message)`, `edit(message, text)`,
 * `remove(message)`, `show(message)`, another branch, and of two answers that are compared, `stop(message)` and
 * `keep(message)`.
 */
export class MessageView {
  constructor(conversation, message, actions) {
    Object.assign(this, { conversation, message, actions });
    const byUser = message.role === "user";
    this.text = h("div", { class: "text" });
    this.waiting = h("div", { class: "waiting", hidden: true });
    this.notice = h("div", { class: "notice", hidden: true });
    this.footer = h("div", { class: "actions" });
    this.element = h("article", { class: `message ${message.role}`, "aria-label": byUser ? "You" : this.writer });
    if (byUser) this.element.append(...(message.files ?? []).map(fileDetails));
    else this.element.append(this.#makeReasoning());
    this.element.append(this.text);
    if (!byUser) this.element.append(this.waiting);
    this.element.append(this.notice, this.footer);
  }

  get writer() {
    return this.message.model ?? "Model";
  }

  /**
   * Shows the message as it is now.
   * @param {object} state
   * @param {boolean} state.running  whether it is being written
   * @param {boolean} state.busy  whether the conversation has such a message
   * @param {boolean} state.last  whether it is the last one
   * @param {boolean} state.compared  whether it is one of two answers of which one is to be kept
   * @param {{read: number, total: number}} [state.progress]  while the prompt is being read
   */
  update({ running, busy, last, compared, progress }) {
    Object.assign(this, { running, last, compared });
    this.element.classList.toggle("running", running);
    this.element.classList.toggle("last", last);
    this.element.classList.toggle("compared", compared);
    if (this.message.role === "user") this.#updateQuestion();
    else this.#updateAnswer(progress);
    this.footer.inert = busy; // keeps its place
    if (!running) this.footer.replaceChildren(...this.#footerParts());
  }

  #updateQuestion() {
    this.text.textContent = this.message.text;
    this.text.hidden = !this.message.text; // there are only files
    const long = this.message.text.length > LONG_QUESTION && !this.expanded;
    this.text.classList.toggle("shortened", long);
    this.notice.hidden = !long;
    const expand = () => {
      this.expanded = true;
      this.#updateQuestion();
    };
    this.notice.replaceChildren(h("button", { type: "button", class: "link", onclick: expand }, "Show more"));
  }

  #updateAnswer(progress) {
    const { message: { text, reasoning, error }, running } = this;
    this.#updateText();
    const { reasoning: choice } = this.conversation.settings;
    if (this.choice !== choice) this.reasoning.open = choice === "open";
    this.choice = choice;
    this.reasoning.hidden = !reasoning || choice === "hidden";
    if (reasoning) renderMarkdown($(".text", this.reasoning), reasoning);
    $("summary span", this.reasoning).textContent = running && !text ? "Thinking…" : "Reasoning";
    this.waiting.hidden = !running || Boolean(text) || !this.reasoning.hidden;
    if (running) this.#updateWaiting(progress);
    const parts = running ? [] : this.#noticeParts();
    if (this.compared) parts.push(this.#choice());
    this.notice.hidden = !parts.length;
    this.notice.classList.toggle("error", Boolean(error));
    if (this.notice.textContent !== parts.map(({ textContent }) => textContent).join("")) {
      this.notice.replaceChildren(...parts);
    }
  }

  /** The text as Markdown, or as tokens with their probabilities if the settings want them. */
  #updateText() {
    const { text, logprobs } = this.message;
    const asTokens = Boolean(this.conversation.settings.logprobs && logprobs?.length);
    if (asTokens && !this.tokens) this.text.after((this.tokens = new TokensView()).element);
    if (this.tokens) this.tokens.element.hidden = !asTokens;
    this.text.hidden = asTokens;
    if (asTokens) this.tokens.update(logprobs);
    else renderMarkdown(this.text, text);
  }

  #updateWaiting(progress) {
    let label = this.message.reasoning ? "Thinking…" : "Waiting for the model…";
    let sign = h("span", { class: "pulse", "aria-hidden": "true" });
    if (progress) {
      const { read, total } = progress;
      label = `Reading the prompt: ${read.toLocaleString()} of ${total.toLocaleString()} tokens`;
      sign = h("progress", { value: read, max: total, "aria-label": label });
    }
    if (this.waiting.textContent !== label) this.waiting.replaceChildren(sign, h("span", {}, label));
  }

  #noticeText() {
    const { error, finish = "stopped", text, reasoning } = this.message; // a reload leaves no `finish`
    if (error) return error;
    if (CUT_OFF[finish]) return this.last ? CUT_OFF[finish] : "";
    return text || reasoning ? "" : "The answer is empty.";
  }

  #noticeParts() {
    const notice = this.#noticeText();
    if (!notice) return [];
    const { error, text } = this.message;
    const { retry, continueAnswer } = this.actions;
    const canContinue = !error && text;
    const run = () => (canContinue ? continueAnswer(this.message) : retry(this.message));
    const label = canContinue ? "Continue" : "Try again";
    return [h("span", {}, notice), ...(this.last ? [h("button", { type: "button", onclick: run }, label)] : [])];
  }

  #choice() {
    const { message, actions, running } = this;
    const run = () => (running ? actions.stop(message) : actions.keep(message));
    return h("button", { type: "button", onclick: run }, running ? "Stop this answer" : "Keep this answer");
  }

  #footerParts() {
    const { message, actions } = this;
    const copyText = () => iconButton("Copy", "copy", (event) => copy(message.text, event.currentTarget));
    if (this.compared) return message.text ? [copyText(), this.#stats()] : [];
    const remove = iconButton("Delete", "trash", () => actions.remove(message));
    if (!contentOf(message) && !message.reasoning) return [this.#branchSwitch(), remove]; // the notice has a button
    return [
      this.#branchSwitch(),
      copyText(),
      message.role === "user"
        ? iconButton("Edit", "edit", () => this.startEditing())
        : iconButton("Regenerate", "retry", () => actions.retry(message)),
      remove,
      this.#stats(),
    ];
  }

  /** ‹ 2/3 › */
  #branchSwitch() {
    const all = alternatives(this.conversation, this.message);
    if (all.length < 2) return "";
    const at = all.indexOf(this.message);
    const arrow = (label, name, step) =>
      iconButton(label, name, () => this.actions.show(all.at((at + step) % all.length), label));
    const spoken = { "aria-label": `Version ${at + 1} of ${all.length}`, role: "img" };
    const position = h("span", spoken, `${at + 1}/${all.length}`);
    const label = this.message.role === "user" ? "Versions of this question" : "Versions of this answer";
    return h("span", { class: "branches", role: "group", "aria-label": label },
      arrow("Previous version", "left", -1), position, arrow("Next version", "right", 1));
  }

  #stats() {
    const { promptTokens, tokens, speed } = this.message.stats ?? {};
    if (!tokens) return "";
    const rate = speed ? ` · ${speed.toFixed(1)} tokens/s` : "";
    const full = (promptTokens + tokens) / contextLengthOf(this.message.model);
    const context = full > NEARLY_FULL ? ` · ${Math.round(100 * full)}% of the context` : "";
    const title = `${promptTokens.toLocaleString()} prompt tokens, ${tokens.toLocaleString()} generated`;
    return h("span", { class: "stats", title }, `${tokens.toLocaleString()} tokens${rate}${context}`);
  }

  #makeReasoning() {
    const summary = h("summary", {}, icon("right"), h("span", {}, "Reasoning"));
    this.reasoning = h("details", { class: "reasoning", hidden: true }, summary, h("div", { class: "text" }));
    return this.reasoning;
  }

  /** Puts the question into a text box. Sending it starts a branch. */
  startEditing() {
    if ($("form", this.element)) return;
    const rows = Math.min(12, this.message.text.split("\n").length + 1);
    const area = h("textarea", { "aria-label": "Edit your question", rows });
    area.value = this.message.text;
    const stop = () => {
      form.replaceWith(this.text);
      this.footer.hidden = false;
      this.#updateQuestion();
      $('[aria-label="Edit"]', this.footer)?.focus();
    };
    const send = (event) => {
      event.preventDefault();
      if (area.value.trim() || this.message.files) this.actions.edit(this.message, area.value.trim());
    };
    const cancel = h("button", { type: "button", onclick: stop }, "Cancel");
    const buttons = h("div", {}, cancel, h("button", { class: "primary" }, "Send"));
    const form = h("form", { class: "edit", onsubmit: send }, area, buttons);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") stop();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.notice.hidden = true;
    this.footer.hidden = true;
    this.text.replaceWith(form);
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }
}

/** A file of a question: its name, which shows the text. */
function fileDetails({ name, text, tokens }) {
  const label = [h("span", { class: "name" }, name), h("span", {}, describeTokens(tokens))];
  const summary = h("summary", {}, icon("file"), ...label);
  return h("details", { class: "file" }, summary, h("pre", {}, text));
}

/** Copies the code next to the button that was clicked, wherever in `root`. */
export function enableCodeCopying(root) {
  root.addEventListener("click", ({ target }) => {
    const copyButton = target.closest(".copy-code");
    if (copyButton) copy($("code", copyButton.closest(".code")).textContent, copyButton);
  });
}
