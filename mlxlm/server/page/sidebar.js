import { $, h, iconButton } from "./dom.js";

const DAY = 24 * 60 * 60 * 1000;

/**
 * The list of conversations.
 *
 * `actions` has `open(conversation)`, `rename(conversation, title)` and `remove(conversation)`.
 */
export class Sidebar {
  constructor(actions) {
    this.actions = actions;
    this.search = $("#search");
    this.search.addEventListener("input", () => this.#draw());
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "Enter") $("#conversations .title")?.click();
    });
  }

  /**
   * @param {import("./conversation.js").Conversation[]} conversations
   * @param {string} currentID
   * @param {(id: string) => boolean} isRunning  whether an answer is being written in it
   */
  show(conversations, currentID, isRunning) {
    Object.assign(this, { conversations, currentID, isRunning });
    this.#draw();
  }

  #draw() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.conversations
      .filter((conversation) => words.every((word) => contains(conversation, word)))
      .sort((a, b) => b.updated - a.updated);
    const groups = Map.groupBy(found, ({ updated }) => age(updated));
    const empty = words.length ? "No conversations found." : "Your conversations appear here. They are stored only in this browser.";
    const list = $("#conversations");
    const focused = list.contains(document.activeElement) && document.activeElement.dataset.key;
    list.replaceChildren(
      ...[...groups].map(([name, group]) => this.#group(name, group)),
      found.length ? "" : h("p", { class: "soft" }, empty),
    );
    if (focused) $(`[data-key="${focused}"]`, list)?.focus();
  }

  #group(name, conversations) {
    const id = `group-${name.replaceAll(" ", "-").toLowerCase()}`;
    return h("section", {}, h("h3", { id }, name),
      h("ul", { "aria-labelledby": id }, ...conversations.map((conversation) => this.#row(conversation))));
  }

  #row(conversation) {
    const { id, title } = conversation;
    const current = id === this.currentID;
    const open = h("button", {
      type: "button", class: "title", title, "data-key": `open ${id}`, "aria-current": current && "page",
      onclick: () => this.actions.open(conversation),
    }, title);
    if (this.isRunning(id)) open.append(h("span", { class: "pulse", role: "img", "aria-label": "answering" }));
    const rename = () => this.#rename(conversation, row);
    const remove = () => this.actions.remove(conversation);
    const row = h("li", { class: current ? "current" : null }, open,
      iconButton(`Rename “${title}”`, "edit", rename, { "data-key": `rename ${id}` }),
      iconButton(`Delete “${title}”`, "trash", remove, { "data-key": `delete ${id}` }));
    return row;
  }

  #rename(conversation, row) {
    const input = h("input", { "aria-label": "Name of the conversation", maxlength: 200 });
    input.value = conversation.title;
    const finish = (title) => {
      input.onblur = null;
      this.actions.rename(conversation, title.trim() || conversation.title);
      $(`[data-key="rename ${conversation.id}"]`)?.focus();
    };
    input.onblur = () => finish(input.value);
    input.onkeydown = (event) => {
      if (event.key === "Enter") finish(input.value);
      else if (event.key === "Escape") finish("");
      else return;
      event.stopPropagation();
    };
    row.replaceChildren(input);
    input.select();
  }
}

function contains({ title, messages }, word) {
  return [title, ...Object.values(messages).map(({ text }) => text)].some((text) => text.toLowerCase().includes(word));
}

function age(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  return time >= today ? "Today" : time >= today - 7 * DAY ? "Last 7 days" : "Earlier";
}
