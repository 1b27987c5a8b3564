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

function mount({ body }) {
  const breakers = h("ul", { class: "cards" });
  const limits = h("ul", { class: "cards" });
  const noBreaker = h("div");
  const noLimit = h("div");
  replace(body, h("h2", { class: "section" }, "Circuit breakers"), noBreaker, breakers, h("h2", { class: "section" }, "Rate and depth limits"), noLimit, limits);
  return {
    navigate: () => {},
    failed: (error) => replace(noBreaker, h("p", { class: "note tone-bad", role: "alert" }, error.message)),
    refresh: async () => {
      const answer = await admin("/admin/breakers");
      replace(noBreaker, answer.breakers.length ? null : empty("No breaker is needed", "The local provider makes no outside calls. With a remote one, set STUDYHALL_PROVIDER and it is guarded by a breaker that all workers share."));
      keyed(breakers, answer.breakers, (one) => one.name, breakerCard, (node, one) => node.show(one));
      const all = answer.limits ?? [];
      replace(noLimit, all.length ? null : empty("No limit is set", "STUDYHALL_USER_RATE, STUDYHALL_AI_RATE and STUDYHALL_QUEUE_DEPTH set them."));
      keyed(limits, all, (one) => one.name, limitCard, (node, one) => node.show(one));
    },
  };
}

export const breakers = { id: "breakers", title: "Breakers", icon: "breakers", admin: true, about: "Who is left alone after failing, and how fast work may go.", mount };
