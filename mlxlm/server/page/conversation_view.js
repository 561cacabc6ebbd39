import { comparedAnswers, path } from "./conversation.js";
import { $ } from "./dom.js";
import { enableCodeCopying, MessageView } from "./message_view.js";

const AT_END = 4; // pixels, for fractions and rounding

/** The messages of the conversation that is open. Stays at their end while the reader is there. */
export class ConversationView {
  #views = new Map(); // message id → view
  #following = true;
  #top = 0;

  constructor(actions) {
    this.actions = actions;
    this.scroller = $("#scroller");
    this.list = $("#messages");
    this.toEnd = $("#to-end");
    this.scroller.addEventListener("scroll", () => this.#onScroll(), { passive: true });
    const observer = new ResizeObserver(() => this.#keepAtEnd());
    observer.observe(this.scroller);
    observer.observe(this.list); // messages are laid out when they come into view
    this.toEnd.addEventListener("click", () => {
      this.follow();
      $("#question").focus();
    });
    enableCodeCopying(this.list);
  }

  /**
   * Shows the messages on the current branch.
   * @param {import("./conversation.js").Conversation} conversation
   * @param {Set<import("./conversation.js").Message>} running  the answers that are being written
   */
  show(conversation, running) {
    const compared = comparedAnswers(conversation);
    const messages = compared.length ? [...path(conversation).slice(0, -1), ...compared] : path(conversation);
    if (this.conversation !== conversation) this.#views.clear();
    Object.assign(this, { conversation, running, compared });
    const views = messages.map((message) => [message.id, this.#viewOf(message)]);
    this.#views = new Map(views);
    views.forEach(([, { element }], i) => { // those that stay keep selections, focus and scrolled code
      const before = this.list.children[i] ?? null;
      if (before !== element) this.list.insertBefore(element, before);
    });
    while (this.list.children.length > views.length) this.list.lastElementChild.remove();
    messages.forEach((message) => this.#update(message));
    $("#welcome").hidden = messages.length > 0;
    this.#keepAtEnd();
  }

  #viewOf(message) {
    const view = this.#views.get(message.id);
    return view?.message === message ? view : new MessageView(this.conversation, message, this.actions);
  }

  /** Shows a message as it is now. */
  update(message, progress) {
    this.#update(message, progress);
    this.#keepAtEnd();
  }

  #update(message, progress = undefined) { // measures nothing: with a layout for each message, long ones are slow
    this.#views.get(message.id)?.update({
      running: this.running.has(message),
      busy: this.running.size > 0,
      last: message.next === null,
      compared: this.compared.includes(message),
      progress,
    });
  }

  /** Goes to the end and stays there. */
  follow() {
    this.#following = true;
    this.#top = 0;
    this.#keepAtEnd();
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
    const atEnd = scrollHeight - scrollTop - clientHeight <= AT_END;
    this.#following = atEnd || (this.#following && scrollTop >= this.#top); // any way up is away from the end
    this.#top = scrollTop;
    this.toEnd.hidden = this.#following;
  }

  #keepAtEnd() {
    this.#onScroll(); // the event of a scroll that has happened may be yet to come
    if (!this.#following) return;
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.#onScroll();
  }
}
