// Server-sent events by fetch: unlike EventSource it can carry the token, and it shows why it was refused.
// Cut off (server restart, lost network) it reconnects after growing pauses and asks for what it missed.
import { access, address, token } from "./api.js";

const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 5000;
const SILENCE = 45000; // the server sends something at least every 10 s: longer than this and the line is dead

/** Emits "event" {id, name, data} and "state" {state: connecting | live | polling | offline, retryIn}. */
export class Live extends EventTarget {
  #lastId = null;
  #failures = 0;
  #wake = null;
  #abort = null;
  state = "connecting";
  retryAt = 0;

  /** `stream`: whether the server has one; without one the views are polled. */
  async run(stream) {
    this.stream = stream;
    if (!stream) this.#become("polling");
    while (stream) {
      let reached = false;
      try {
        await this.#listen(() => (reached = true));
      } catch {
        // cut off: pause below, then again
      }
      if (reached) this.#failures = 0;
      this.#failures += 1;
      const pause = Math.min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (this.#failures - 1)) * (0.75 + Math.random() / 2);
      this.retryAt = Date.now() + pause;
      this.#become(this.state === "polling" ? "polling" : "offline");
      await new Promise((resolve) => {
        this.#wake = resolve;
        setTimeout(resolve, pause);
      });
    }
  }

  /** Do not wait for the rest of the pause. */
  now() {
    this.#wake?.();
  }

  /** Take the line down and up again, for example with a new token. */
  renew() {
    this.#abort?.abort();
    this.#failures = 0;
    setTimeout(() => this.now(), 20);
  }

  /** A poll succeeded or failed while there is no line. */
  polled(worked) {
    if (this.state === "live") return;
    this.#become(worked ? "polling" : "offline");
  }

  async #listen(connected) {
    const stop = (this.#abort = new AbortController());
    const headers = { Accept: "text/event-stream" };
    if (this.#lastId !== null) headers["Last-Event-ID"] = this.#lastId;
    const all = access.state === "accepted"; // an administrator sees everybody's events, others their own
    if (all) headers.Authorization = `Bearer ${token()}`;
    let watchdog = setTimeout(() => stop.abort(), 10000);
    try {
      const answer = await fetch(address(all ? "/admin/events" : "/events"), { headers, signal: stop.signal, credentials: "omit", cache: "no-store" });
      if (!answer.ok || !answer.body) throw new Error(`events: ${answer.status}`);
      connected();
      this.#become("live");
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        clearTimeout(watchdog);
        watchdog = setTimeout(() => stop.abort(), SILENCE);
        const { value, done } = await reader.read();
        if (done) return;
        const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) this.#take(block);
      }
    } finally {
      clearTimeout(watchdog);
      stop.abort();
    }
  }

  #take(block) {
    let name = "message";
    let id = null;
    const lines = [];
    for (const line of block.split("\n")) {
      const [, field, value] = /^([^:]*):? ?(.*)$/.exec(line);
      if (field === "data") lines.push(value);
      else if (field === "event") name = value;
      else if (field === "id") id = value;
    }
    if (id !== null) this.#lastId = id;
    if (lines.length === 0 || name === "idle") return;
    let data = lines.join("\n");
    try {
      data = JSON.parse(data);
    } catch {
      // plain text is fine too
    }
    this.dispatchEvent(new CustomEvent("event", { detail: { id, name, data, at: Date.now() / 1000 } }));
  }

  #become(state) {
    const same = this.state === state;
    this.state = state;
    if (!same || state === "offline") this.dispatchEvent(new CustomEvent("state"));
  }
}
