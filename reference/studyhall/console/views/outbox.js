import { figure } from "../charts.js";
import { admin } from "../api.js";
import { cell, empty, h, keyed, pill, replace, table } from "../dom.js";
import { count, seconds } from "../format.js";

const SLOTS = 60;
const history = { waiting: [], oldest: [], quarantined: [] };

function rowOf(event) {
  const node = h("tr", { role: "row" }, cell("Event", h("div", null, h("span", { class: "title" }, event.type), h("div", { class: "small muted mono" }, event.subject))), cell("State", pill("quarantined")), cell("Why", h("span", { class: "small" }, event.reason ?? "–")), cell("Tries", h("span", { class: "number" }, event.attempts)), cell("Held back", h("span", { class: "number" }, count(event.held))));
  return node;
}

function mount({ body }) {
  const figures = { waiting: figure("Waiting to be published"), oldest: figure("Oldest waits"), quarantined: figure("Given up on", "bars") };
  const words = { waiting: count, oldest: seconds, quarantined: count };
  const hint = h("div");
  const list = table("Quarantined events", ["Event", "State", "Why", "Tries", "Held back"]);
  const nothing = h("div");
  list.hidden = true;
  replace(body, h("div", { class: "tiles" }, Object.values(figures).map((one) => h("div", { class: "tile" }, one))), hint, h("h2", { class: "section" }, "Quarantine"), nothing, list);
  return {
    navigate: () => {},
    failed: (error) => replace(nothing, h("p", { class: "note tone-bad", role: "alert" }, error.message)),
    refresh: async () => {
      const answer = await admin("/admin/outbox");
      for (const name of Object.keys(figures)) {
        history[name].push(Number(answer[name]) || 0);
        if (history[name].length > SLOTS) history[name].shift();
        figures[name].show(history[name], SLOTS, words[name]);
        figures[name].classList.toggle("alarm", name === "oldest" ? answer.oldest >= 30 : name === "quarantined" && answer.quarantined > 0);
      }
      replace(hint, answer.oldest >= 30 ? h("p", { class: "note tone-warn" }, "Events wait and nobody publishes them. Is the relay up? Start one: studyhall relay") : null);
      const rows = answer.rows ?? [];
      replace(nothing, rows.length ? null : empty("Nothing is in quarantine", "An event that cannot be published after all its tries is set aside here, with those behind it."));
      list.hidden = rows.length === 0;
      keyed(list.body, rows, (row) => row.event_id, rowOf);
    },
  };
}

export const outbox = { id: "outbox", title: "Outbox", icon: "outbox", admin: true, about: "How far the published events are behind the database.", mount };
