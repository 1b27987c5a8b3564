import { figure } from "../charts.js";
import { admin } from "../api.js";
import { attempt, cell, confirmAction, empty, h, keyed, pill, replace, table } from "../dom.js";
import { count, seconds } from "../format.js";

const SLOTS = 60;
const history = { waiting: [], oldest: [], quarantined: [] };

async function release(event, action, refresh) {
  const json = { ids: [event.event_id], action, why: action === "discard" ? "given up in the console" : "" };
  if (action === "discard" && !(await confirmAction("Give this event up?", "It will never be published; the events behind it go on.", "Give it up", "Keep it"))) return;
  await attempt(async () => {
    await admin("/admin/outbox/quarantine", { method: "POST", json });
    return action === "requeue" ? "The event worker tries it again." : "Given up; the events behind it go on.";
  }, refresh);
}

function rowOf(event, refresh) {
  const again = h("button", { class: "small-button", onclick: () => release(event, "requeue", refresh) }, "Try again");
  const drop = h("button", { class: "small-button danger", onclick: () => release(event, "discard", refresh) }, "Give up");
  const node = h("tr", { role: "row" }, cell("Event", h("div", null, h("span", { class: "title" }, event.type), h("div", { class: "small muted mono" }, event.subject))), cell("State", pill("quarantined")), cell("Why", h("span", { class: "small" }, event.reason ?? "–")), cell("Tries", h("span", { class: "number" }, event.attempts)), cell("Held back", h("span", { class: "number" }, count(event.held))), cell("Action", h("div", { class: "actions" }, again, drop)));
  return node;
}

function mount({ body, refresh }) {
  const figures = { waiting: figure("Waiting to be published"), oldest: figure("Oldest waits"), quarantined: figure("Given up on", "bars") };
  const words = { waiting: count, oldest: seconds, quarantined: count };
  const hint = h("div");
  const list = table("Quarantined events", ["Event", "State", "Why", "Tries", "Held back", "Action"]);
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
        const alarm = name === "oldest" ? answer.oldest >= 30 : name === "quarantined" && answer.quarantined > 0;
        figures[name].show(history[name], SLOTS, words[name], alarm);
      }
      replace(hint, answer.oldest >= 30 ? h("p", { class: "note tone-warn" }, "Events wait and nobody publishes them. Is an event worker running? Start one.") : null);
      const rows = answer.events;
      replace(nothing, rows.length ? null : empty("Nothing is in quarantine", "An event that cannot be published after all its tries is set aside here, with those behind it."));
      list.hidden = rows.length === 0;
      keyed(list.body, rows, (row) => row.event_id, (row) => rowOf(row, refresh));
    },
  };
}

export const outbox = { id: "outbox", title: "Outbox", icon: "outbox", admin: true, about: "How far the published events are behind the database.", mount };
