import { figure } from "../charts.js";
import { admin, path } from "../api.js";
import { attempt, confirmAction, empty, h, keyed, pill, replace, set, setPill, text, unread } from "../dom.js";
import { count, percent, plural, seconds } from "../format.js";
import { SLOTS, queues } from "../queues.js";

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

async function pause(row, again) {
  const words = row.paused
    ? [`Resume ${row.queue}?`, "Workers take jobs from it again.", "Resume it"]
    : [`Pause ${row.queue}?`, "No worker, in whatever language, takes a job from it until it is resumed. Running jobs are finished.", "Pause it"];
  if (!(await confirmAction(...words))) return;
  await attempt(async () => {
    await admin(path("/admin/queues", row.queue, row.paused ? "resume" : "pause"), { method: "POST" });
    return row.paused ? `${row.queue} goes on.` : `${row.queue} is paused.`;
  }, again);
}

/** Running: it has a worker, which a queue without jobs does not need. */
function stateOf(row) {
  if (row.paused) return "paused";
  if (row.unattended) return "unattended";
  return row.workers === 0 ? "idle" : "running";
}

function queueCard(row) {
  let last = row;
  const hold = h("button", { class: "small-button", onclick: () => pause(last, () => queues.again()) });
  const state = pill("running");
  const sub = h("p", { class: "small muted number" });
  const figures = FIGURES.map(([, label, kind]) => figure(label, kind));
  const link = h("a", { href: `#/jobs/${encodeURIComponent(row.queue)}` }, "Jobs", h("span", { class: "hidden-text" }, ` of ${row.queue}`));
  const node = h("li", { class: "card" }, h("div", { class: "card-head" }, h("h2", null, row.queue), state), h("div", { class: "figures" }, figures), h("div", { class: "card-head card-foot" }, sub, h("div", { class: "actions" }, link, hold)));
  node.show = (now) => {
    last = now;
    setPill(state, stateOf(now));
    replace(hold, now.paused ? "Resume" : "Pause", h("span", { class: "hidden-text" }, ` ${now.queue}`));
    const more = [now.workers === null ? "workers unknown" : plural(now.workers, "worker"), `${count(now.active)} running`, `${count(now.delayed)} delayed`, `${count(now.waiting_children)} behind another stage`];
    if (now.failed) more.push(`${count(now.failed)} failed`);
    if (now.overdue) more.push(`${count(now.overdue)} overdue`);
    if (now.stalls) more.push(`${count(now.stalls)} lost their worker`);
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
    backlog: tile("Waiting now", "#/jobs?state=wait"),
    active: tile("Running", "#/jobs?state=active"),
    rate: tile("Done per minute"),
    oldest: tile("Oldest waits"),
    failed: tile("Failed", "#/jobs?state=failed"),
    letters: tile("Dead letters", "#/letters"),
  };
  const cards = h("ul", { class: "cards" });
  const hint = h("div");
  replace(body, h("div", { class: "tiles" }, Object.values(tiles)), hint, cards);
  const draw = () => {
    const all = queues.totals;
    if (queues.known && !queues.rows.length) {
      replace(hint, unread(queues.unreadable), empty("No queues", "No job was ever added under this prefix. A queue appears with its first job."));
      replace(cards);
    }
    if (!queues.rows.length) return;
    tiles.letters.hidden = !document.querySelector('#nav [data-view="letters"]');
    tiles.failed.show(count(all.failed), "kept in Redis", all.failed ? "bad" : "");
    tiles.backlog.show(count(all.backlog), all.delayed ? `${count(all.delayed)} more later` : "in all queues");
    tiles.active.show(count(all.active), "jobs at work");
    tiles.rate.show(count(all.rate), "in the last minute");
    tiles.oldest.show(seconds(all.oldest), all.oldest >= 60 ? "longer than a minute: more workers?" : "before it starts", all.oldest >= 60 ? "warn" : "");
    tiles.letters.show(count(all.letters), all.letters ? "wait for you" : "nothing to repair", all.letters ? "bad" : "");
    const idle = all.backlog === 0 && all.active === 0 && all.rate === 0;
    const alone = queues.rows.filter((row) => row.unattended).map((row) => row.queue);
    replace(
      hint,
      unread(queues.unreadable),
      alone.length ? h("p", { class: "note tone-warn" }, `Nobody is working on ${alone.join(", ")}, and jobs are there. Start a worker. `, h("a", { href: "#/workers" }, "Who is alive")) : null,
      all.memory >= 0.8 ? h("p", { class: "note tone-warn" }, `Redis uses ${percent(all.memory)} of its memory. At 100 % every add is refused.`) : null,
      idle && !alone.length ? h("p", { class: "note" }, "Everything is done: nothing waits and nothing runs.") : null,
    );
    keyed(cards, queues.rows, (row) => row.queue, queueCard, (node, row) => node.show(row));
  };
  queues.addEventListener("sample", draw);
  if (!queues.rows.length) cards.append(h("li", { class: "muted", "data-key": "first" }, "Counting…"));
  draw();
  return { navigate: () => {}, unmount: () => queues.removeEventListener("sample", draw) };
}

export const overview = { id: "overview", title: "Overview", icon: "overview", admin: true, about: "How every queue is doing, now and in the last minutes.", mount };
