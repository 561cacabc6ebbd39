import { path } from "./conversation.js";
import { $ } from "./dom.js";
import { enableCodeCopying, MessageView } from "./message_view.js";

const NEAR_END = 60; // pixels

/** The messages of the conversation that is open. Stays at their end while the reader is there. */
export class ConversationView {
  #views = new Map(); // message id → view
  #following = true;

  constructor(actions) {
    this.actions = actions;
    this.scroller = $("#scroller");
    this.list = $("#messages");
    this.toEnd = $("#to-end");
    this.scroller.addEventListener("scroll", () => this.#onScroll(), { passive: true });
    new ResizeObserver(() => this.#keepAtEnd()).observe(this.scroller);
    this.toEnd.addEventListener("click", () => {
      this.follow();
      $("#question").focus();
    });
    enableCodeCopying(this.list);
  }

  /**
   * Shows the messages on the current branch.
   * @param {import("./conversation.js").Conversation} conversation
   * @param {?import("./conversation.js").Message} running  the answer that is being written
   */
  show(conversation, running) {
    const messages = path(conversation);
    if (this.conversation !== conversation) this.#views.clear();
    this.conversation = conversation;
    const views = messages.map((message) => [message.id, this.#viewOf(message)]);
    this.#views = new Map(views);
    this.list.replaceChildren(...views.map(([, view]) => view.element));
    for (const message of messages) this.update(message, running);
    $("#welcome").hidden = messages.length > 0;
    this.#onScroll();
  }

  #viewOf(message) {
    const view = this.#views.get(message.id);
    return view?.message === message ? view : new MessageView(this.conversation, message, this.actions);
  }

  /** Shows a message as it is now. */
  update(message, running, progress = undefined) {
    const last = message.next === null;
    this.#views.get(message.id)?.update({ running: message === running, busy: Boolean(running), last, progress });
    this.#keepAtEnd();
  }

  /** Goes to the end and stays there. */
  follow() {
    this.#following = true;
    this.#keepAtEnd();
    this.#onScroll();
  }

  /** Puts the focus on a button of a message. */
  focus(message, label) {
    $(`[aria-label="${label}"]`, this.#views.get(message.id).element)?.focus();
  }

  /** Edits the last question. */
  editLast() {
    const question = path(this.conversation).findLast(({ role }) => role === "user");
    if (question) this.#views.get(question.id).startEditing();
  }

  #onScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.#following = scrollHeight - scrollTop - clientHeight < NEAR_END;
    this.toEnd.hidden = this.#following;
  }

  #keepAtEnd() {
    if (this.#following) this.scroller.scrollTop = this.scroller.scrollHeight;
    else this.#onScroll();
  }
}
