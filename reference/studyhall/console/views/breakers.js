import { admin } from "../api.js";
import { empty, h, keyed, pill, replace, setPill, text } from "../dom.js";
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
  node.show = (one) => {
    setPill(state, one.state);
    text(meaning, MEANING[one.state] ?? "");
    const after = one.retry_after > 0 ? `, next probe in ${seconds(one.retry_after)}` : "";
    text(more, `${count(one.failures)} recent failures${after}`);
  };
  return node;
}

function limitCard(limit) {
  const about = h("p");
  const more = h("p", { class: "small muted number" });
  const node = h("li", { class: "card" }, h("div", { class: "card-head" }, h("h3", null, limit.name)), about, more);
  node.show = (one) => {
    text(about, one.about ?? "");
    text(more, one.value ?? "");
  };
  return node;
}

function limitsOf({ rate_limits: rates, queues, depth_limit: depth, age_limit: age, pending }) {
  const rate = (one) => (one.per_second ? `${count(one.per_second)} jobs per second, bursts of ${count(one.burst)}` : "no limit");
  const rows = [
    { name: "AI jobs of one user", about: rate(rates.user), value: "STUDYHALL_USER_RATE: nobody takes all of the AI" },
    { name: "AI jobs of everybody", about: rate(rates.all), value: "STUDYHALL_AI_RATE: what the provider allows us" },
  ];
  for (const [name, load] of Object.entries(queues)) {
    const room = [depth ? `of ${count(depth)} at most` : "no depth limit", `oldest ${seconds(load.oldest_seconds)}${age ? ` of ${seconds(age)} at most` : ""}`];
    rows.push({ name: `Queue ${name}`, about: `${count(load.depth)} in line, ${room.join(", ")}`, value: "beyond its limit new work is refused with a time to come back" });
  }
  const parked = Object.keys(pending.parked).length;
  rows.push({ name: "Waiting for Redis", about: pending.waiting ? `${count(pending.waiting)} requests, oldest ${seconds(pending.oldest)}` : "nothing", value: parked ? `${count(parked)} parked: see studyhall limits` : "accepted while Redis was away, kept in the database" });
  return rows;
}

function mount({ body }) {
  const breakers = h("ul", { class: "cards" });
  const limits = h("ul", { class: "cards" });
  const noBreaker = h("div");
  replace(body, h("h2", { class: "section" }, "Circuit breakers"), noBreaker, breakers, h("h2", { class: "section" }, "Rate and depth limits"), limits);
  return {
    navigate: () => {},
    failed: (error) => replace(noBreaker, h("p", { class: "note tone-bad", role: "alert" }, error.message)),
    refresh: async () => {
      const answer = await admin("/admin/breakers");
      replace(noBreaker, answer.breakers.length ? null : empty("No breaker is needed", "The local provider makes no outside calls. With a remote one, set STUDYHALL_PROVIDER and it is guarded by a breaker that all workers share."));
      keyed(breakers, answer.breakers, (one) => one.name, breakerCard, (node, one) => node.show(one));
      const all = limitsOf(answer);
      keyed(limits, all, (one) => one.name, limitCard, (node, one) => node.show(one));
    },
  };
}

export const breakers = { id: "breakers", title: "Breakers", icon: "breakers", admin: true, about: "Who is left alone after failing, and how fast work may go.", mount };
