/** An answer token by token: each is shaded by its probability, and shows what else could have stood there. */
import { $, h } from "./dom.js";

const MARGIN = 8; // pixels between the list of alternatives and the edge

export class TokensView {
  #entries = [];
  #at = -1;

  constructor() {
    const label = "Tokens. Use the left and right arrow keys to read their probabilities.";
    this.list = h("div", { class: "token-list", tabindex: 0, role: "group", "aria-label": label });
    this.details = h("div", { class: "token-details", role: "status", hidden: true });
    this.element = h("div", { class: "tokens" }, this.list, this.details);
    this.list.addEventListener("pointerover", ({ target }) => this.#show([...this.list.children].indexOf(target)));
    this.list.addEventListener("pointerleave", () => this.#show(-1));
    this.list.addEventListener("blur", () => this.#show(-1));
    this.list.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) this.#show(Math.max(0, Math.min(this.#at + step, this.#entries.length - 1)));
      else if (event.key === "Escape" && this.#at >= 0) this.#show(-1);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  }

  /** Shows entries of OpenAI's `logprobs.content`; those that were there before stay. */
  update(entries) {
    this.#entries = entries;
    for (const { token, logprob } of entries.slice(this.list.children.length)) {
      const span = h("span", {}, token);
      span.style.setProperty("--doubt", `${Math.round(100 * (1 - Math.exp(logprob)))}%`);
      this.list.append(span);
    }
    while (this.list.children.length > entries.length) this.list.lastChild.remove();
  }

  #show(at) {
    this.list.children[this.#at]?.classList.remove("current");
    this.#at = at;
    const span = this.list.children[at];
    this.details.hidden = !span;
    if (!span) return;
    span.classList.add("current");
    const chosen = this.#entries[at];
    const all = [...(chosen.top_logprobs ?? [])];
    if (!all.some(({ token }) => token === chosen.token)) all.push(chosen);
    this.details.replaceChildren(...all.map((entry) => row(entry, entry.token === chosen.token)));
    const { offsetWidth: width, offsetHeight: height } = this.details;
    const left = Math.min(span.offsetLeft, this.element.clientWidth - width - MARGIN);
    const below = span.offsetTop + span.offsetHeight + MARGIN / 2;
    const bottom = span.getBoundingClientRect().bottom + height + MARGIN;
    const fits = bottom < $("#scroller").getBoundingClientRect().bottom;
    this.details.style.left = `${Math.max(0, left)}px`;
    this.details.style.top = `${fits ? below : span.offsetTop - height - MARGIN / 2}px`;
  }
}

function row({ token, logprob }, chosen) {
  const shown = token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
  const percent = `${(100 * Math.exp(logprob)).toFixed(1)} %`;
  return h("div", { class: chosen ? "chosen" : null }, h("span", {}, shown), h("span", {}, percent));
}
