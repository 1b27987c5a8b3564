import { figure } from "../charts.js";
import { h, keyed, pill, replace, set, setPill, text } from "../dom.js";
import { count, percent, seconds } from "../format.js";
import { SLOTS, queues } from "../queues.js";

const ORDER = ["documents", "graphs", "quizzes", "explanations"]; // as a document passes them; others follow
const FIGURES = [
  ["depth", "Waiting", "area", (n) => count(n), () => false],
  ["oldest", "Oldest waits", "area", seconds, (n) => n >= 60],
  ["rate", "Done per minute", "bars", (n) => count(n), () => false],
  ["failures", "Failing", "area", percent, (n) => n >= 0.05],
];

function tile(label, href) {
  const value = h("div", { class: "tile-value" });
  const note = h("div", { class: "tile-note" });
  const node = h(href ? "a" : "div", { class: "tile", href }, h("div", { class: "tile-label" }, label), value, note);
  node.show = (words, more = "", tone = "") => {
    text(value, words);
    text(note, more);
    set(node, "class", tone ? `tile tone-${tone}` : "tile");
  };
  return node;
}

function queueCard(row) {
  const state = pill("running");
  const sub = h("p", { class: "small muted number" });
  const figures = FIGURES.map(([, label, kind]) => figure(label, kind));
  const link = h("a", { href: `#/jobs/${encodeURIComponent(row.queue)}` }, "Jobs", h("span", { class: "hidden-text" }, ` of ${row.queue}`));
  const node = h("li", { class: "card" }, h("div", { class: "card-head" }, h("h2", null, row.queue), state), h("div", { class: "figures" }, figures), h("div", { class: "card-head card-foot" }, sub, link));
  node.show = (now) => {
    setPill(state, now.paused ? "paused" : "running");
    const more = [`${count(now.active)} running`, `${count(now.delayed)} delayed`, `${count(now.waiting_children)} behind another stage`];
    if (now.overdue) more.push(`${count(now.overdue)} overdue`);
    text(sub, more.join(" · "));
    const kept = queues.history.get(now.queue);
    FIGURES.forEach(([name, , , words, alarm], index) => {
      figures[index].show(kept[name], SLOTS, words, alarm(kept[name].at(-1) ?? 0));
    });
  };
  return node;
}

function mount({ body }) {
  const tiles = {
    backlog: tile("Waiting now", "#/jobs"),
    active: tile("Running", "#/jobs"),
    rate: tile("Done per minute"),
    oldest: tile("Oldest waits"),
    letters: tile("Dead letters", "#/letters"),
  };
  const cards = h("ul", { class: "cards" });
  const hint = h("div");
  replace(body, h("div", { class: "tiles" }, Object.values(tiles)), hint, cards);
  const draw = () => {
    const all = queues.totals;
    if (!queues.rows.length) return;
    tiles.backlog.show(count(all.backlog), all.delayed ? `${count(all.delayed)} more later` : "in all queues");
    tiles.active.show(count(all.active), "jobs at work");
    tiles.rate.show(count(all.rate), "in the last minute");
    tiles.oldest.show(seconds(all.oldest), all.oldest >= 60 ? "longer than a minute: more workers?" : "before it starts", all.oldest >= 60 ? "warn" : "");
    tiles.letters.show(count(all.letters), all.letters ? "wait for you" : "nothing to repair", all.letters ? "bad" : "");
    const idle = all.backlog === 0 && all.active === 0 && all.rate === 0;
    const stuck = all.active === 0 && all.oldest >= 30;
    replace(
      hint,
      stuck ? h("p", { class: "note tone-warn" }, `Jobs wait and nothing runs. Is a worker up? Start one: studyhall worker`) : null,
      idle ? h("p", { class: "note" }, "Everything is done. ", h("a", { href: "#/documents" }, "Upload a document"), " and watch it go through the queues.") : null,
    );
    const place = (row) => (ORDER.indexOf(row.queue) + 1 || 99);
    keyed(cards, [...queues.rows].sort((a, b) => place(a) - place(b)), (row) => row.queue, queueCard, (node, row) => node.show(row));
  };
  queues.addEventListener("sample", draw);
  if (!queues.rows.length) cards.append(h("li", { class: "muted", "data-key": "first" }, "Counting…"));
  draw();
  return { navigate: () => {}, unmount: () => queues.removeEventListener("sample", draw) };
}

export const overview = { id: "overview", title: "Overview", icon: "overview", admin: true, about: "How every queue is doing, now and in the last minutes.", mount };
