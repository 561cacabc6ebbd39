const PAUSE = 40; // milliseconds between two runs, at least

/** Runs an action as often as asked, but so seldom that the browser has most of its time for other things. */
export class Pace {
  #timer = null;
  #pause = PAUSE;

  constructor(action) {
    this.action = action;
  }

  request() {
    this.#timer ??= setTimeout(() => this.#run(), this.#pause);
  }

  stop() {
    clearTimeout(this.#timer);
  }

  #run() {
    this.#timer = null;
    const start = performance.now();
    this.action();
    this.#pause = Math.max(PAUSE, 3 * (performance.now() - start));
  }
}
