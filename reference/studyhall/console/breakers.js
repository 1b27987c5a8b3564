import { admin } from "../api.js";
import { bar, cell, empty, h, keyed, pill, replace, setPill, table, text } from "../dom.js";
import { count, seconds } from "../format.js";

const MEANING = {
  closed: "Calls go through.",
  open: "It failed too often: no calls are made, jobs wait without spending a try.",
  "half-open": "One call at a time finds out whether it is back.",
  unknown: "Redis does not answer, so nobody knows.",
};

function breakerCard(breaker) {
  const state = pill(breaker.state);
  const meaning = h("p");
  const more = h("p", { class: "small muted number" });
  const node = h("li", { class: "card" }, h("div", { class: "card-head" }, h("h3", null, breaker.name), state), meaning, more);
  node.show = (latest) => {
    setPill(state, latest.state);
    text(meaning, MEANING[latest.state] ?? "");
    const after = latest.retry_after > 0 ? `, next probe in ${seconds(latest.retry_after)}` : "";
    text(more, `${count(latest.failures)} recent failures${after}`);
  };
  return node;
}

function rateCards({ rate_limits: rates, pending }) {
  const rate = (limit) => (limit.per_second ? `${count(limit.per_second)} per second` : "no limit");
  const parked = Object.keys(pending.parked).length;
  return [
    ["AI jobs of one user", rate(rates.user), rates.user.per_second ? `bursts of ${count(rates.user.burst)}; nobody takes all of the AI` : "set STUDYHALL_USER_RATE to share the AI fairly"],
    ["AI jobs of everybody", rate(rates.all), rates.all.per_second ? `bursts of ${count(rates.all.burst)}; what the provider allows` : "set STUDYHALL_AI_RATE to what the provider allows"],
    ["Waiting for Redis", pending.waiting ? count(pending.waiting) : "nothing", parked ? `${count(parked)} parked: see studyhall limits` : pending.waiting ? `oldest ${seconds(pending.oldest)}` : "requests taken while Redis is away wait in the database"],
  ];
}

function rateCard() {
  const [label, value, note] = [h("div", { class: "tile-label" }), h("div", { class: "tile-value" }), h("div", { class: "tile-note" })];
  const node = h("li", { class: "tile" }, label, value, note);
  node.show = (words) => [label, value, note].forEach((part, index) => text(part, words[index]));
  return node;
}

function loadRow([name]) {
  const depth = bar(`${name}: share of the depth limit`);
  const line = h("span", { class: "number" });
  const age = h("span", { class: "number" });
  const node = h("tr", { role: "row" }, cell("Queue", h("span", { class: "title" }, name)), cell("In line", line), cell("Of the limit", depth), cell("Oldest", age));
  node.show = ([, load], most, oldest) => {
    text(line, `${count(load.depth)}${most ? ` of ${count(most)}` : ""}`);
    const share = most ? (100 * load.depth) / most : 0;
    depth.show(share, share >= 80 ? "failed" : "completed");
    text(age, `${seconds(load.oldest_seconds)}${oldest ? ` of ${seconds(oldest)}` : ""}`);
  };
  return node;
}

function mount({ body }) {
  const breakers = h("ul", { class: "cards" });
  const rates = h("ul", { class: "tiles" });
  const loads = table("How full each queue may get", ["Queue", "In line", "Of the limit", "Oldest"]);
  const noBreaker = h("div");
  replace(body, h("h2", { class: "section" }, "Circuit breakers"), noBreaker, breakers, h("h2", { class: "section" }, "Rate limits"), rates, h("h2", { class: "section" }, "How full each queue may get"), h("p", { class: "muted small status-line" }, "Beyond its limit new work is refused with 503 and a time to come back."), loads);
  return {
    navigate: () => {},
    failed: (error) => replace(noBreaker, h("p", { class: "note tone-bad", role: "alert" }, error.message)),
    refresh: async () => {
      const answer = await admin("/admin/breakers");
      replace(noBreaker, answer.breakers.length ? null : empty("No breaker is needed", "The local provider makes no outside calls. With a remote one, set STUDYHALL_PROVIDER and it is guarded by a breaker that all workers share."));
      keyed(breakers, answer.breakers, (breaker) => breaker.name, breakerCard, (node, breaker) => node.show(breaker));
      keyed(rates, rateCards(answer), (words) => words[0], rateCard, (node, words) => node.show(words));
      keyed(loads.body, Object.entries(answer.queues), ([name]) => name, loadRow, (node, row) => node.show(row, answer.depth_limit, answer.age_limit));
    },
  };
}

export const view = { id: "breakers", title: "Breakers", icon: "breakers", admin: true, about: "Who is left alone after failing, and how fast work may go.", mount };
