/** Parses server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html). */
export class SSEParser {
  #rest = "";
  #data = [];

  /**
   * Adds a piece of the stream, which may end anywhere, and returns what it completes.
   * @param {string} text
   * @returns {{data?: string, comment?: string}[]}
   */
  push(text) {
    // A CR at the very end may be the first half of a CRLF.
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    return lines.map((line) => this.#parseLine(line)).filter(Boolean);
  }

  #parseLine(line) {
    if (line === "") {
      const data = this.#data;
      this.#data = [];
      return data.length ? { data: data.join("\n") } : null;
    }
    if (line.startsWith(":")) return { comment: line.slice(1).trim() };
    const [, field, value] = /^([^:]*):? ?(.*)$/s.exec(line);
    if (field === "data") this.#data.push(value);
    return null;
  }
}
