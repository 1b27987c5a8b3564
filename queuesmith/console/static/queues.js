// The queues' numbers, sampled while the page is open, so that every view finds a history to draw.
import { access, admin } from "./api.js";

const EVERY = 2000;
export const SLOTS = 90; // samples kept: three minutes

class Queues extends EventTarget {
  #timer = null;
  #seeded = false;
  trouble = "";
  history = new Map(); // queue -> {depth: [], oldest: [], rate: [], failures: []}
  rows = [];
  unreadable = {}; // queue -> why
  totals = {};

  start() {
    if (this.#timer === null) this.#sample();
  }

  /** Do not wait for the next turn. */
  again() {
    if (this.#timer !== null) this.#sample();
  }

  stop() {
    clearTimeout(this.#timer);
    this.#timer = null;
  }

  async #sample() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#sample(), EVERY);
    if (!this.#seeded) {
      this.#seeded = true; // what the server saw before this page was opened
      for (const sample of await admin("/admin/history").catch(() => [])) this.#keep(sample.queues);
    }
    if (document.hidden) return;
    try {
      this.#take(await admin("/admin/queues"));
      this.#say("");
    } catch (error) {
      // The banner says that a server is down; a gap in the chart is honest.
      if (error.status >= 500) this.#say(error.message);
      if (access.state !== "accepted") this.stop();
    }
  }

  #say(trouble) {
    if (this.trouble === trouble) return;
    this.trouble = trouble;
    this.dispatchEvent(new Event("sample"));
  }

  #take(answer) {
    this.rows = answer.queues;
    this.unreadable = answer.unreadable;
    this.known = true;
    this.#keep(this.rows);
    const sum = (field) => this.rows.reduce((total, row) => total + (Number(row[field]) || 0), 0);
    this.totals = {
      letters: answer.dead_letters ?? 0,
      backlog: sum("backlog"),
      active: sum("active"),
      delayed: sum("delayed"),
      failed: sum("failed"),
      rate: sum("rate"),
      oldest: Math.max(0, ...this.rows.map((row) => Number(row.oldest) || 0)),
      unattended: this.rows.filter((row) => row.unattended).length,
      memory: answer.memory,
    };
    this.dispatchEvent(new Event("sample"));
  }

  #keep(rows) {
    for (const row of rows) {
      row.rate = row.completed_last_minute;
      if (!this.history.has(row.queue)) this.history.set(row.queue, { depth: [], oldest: [], rate: [], failures: [] });
      const kept = this.history.get(row.queue);
      for (const [name, value] of [["depth", row.backlog], ["oldest", row.oldest], ["rate", row.rate], ["failures", row.failure_rate]]) {
        kept[name].push(Number(value) || 0);
        if (kept[name].length > SLOTS) kept[name].shift();
      }
    }
  }
}

export const queues = new Queues();
