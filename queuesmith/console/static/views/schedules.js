import { admin, path } from "../api.js";
import { attempt, cell, confirmAction, empty, h, keyed, pill, replace, set, setPill, table, text, unread } from "../dom.js";
import { ago, ahead, count, full, plural, seconds } from "../format.js";

async function run(one, refresh) {
  if (!(await confirmAction(`Run ${one.id} now?`, "One extra run. If its payload is signed, the next regular run is brought forward instead.", "Run it now", "Not now"))) return;
  await attempt(async () => {
    const made = await admin(path("/admin/schedules", one.queue, one.id, "run"), { method: "POST" });
    return `${made.done === "added" ? "Added" : "Brought forward"}: ${made.job_id}`;
  }, refresh);
}

function rowOf(one, refresh) {
  const [next, last] = [h("time"), h("time")];
  const [late, ended] = [pill("overdue"), h("a")];
  const [sum, slots, ran] = [h("summary"), h("ul"), h("span", { class: "number" })];
  const lost = h("details", { class: "small" }, sum, slots);
  const go = h("button", { class: "small-button", onclick: () => run(one, refresh) }, "Run now", h("span", { class: "hidden-text" }, ` ${one.id}`));
  const rule = one.pattern ?? `every ${seconds(one.every / 1000)}`;
  const node = h("tr", { role: "row" }, cell("Schedule", h("div", null, h("span", { class: "title" }, one.id), h("div", { class: "small muted" }, `${one.queue}: ${one.unreadable ?? one.name}`))), cell("When", h("div", null, h("span", { class: "mono" }, rule), one.pattern && h("div", { class: "small muted" }, one.tz || "UTC"))), cell("Next", h("div", null, next, " ", late)), cell("Last", h("div", null, last, " ", ended)), cell("Runs", h("div", null, ran, lost)), cell("Action", go));
  node.show = (now) => {
    text(next, ahead(now.next));
    set(next, "title", full(now.next));
    late.hidden = !now.overdue;
    text(ran, count(now.ran));
    lost.hidden = !now.missed;
    text(sum, `${count(now.missed)} missed`);
    keyed(slots, now.missed_at, String, (slot) => h("li", null, full(slot)));
    text(last, now.last ? ago(now.last) : "not yet");
    set(last, "title", full(now.last));
    ended.hidden = !now.last_state;
    if (now.last_state) {
      set(ended, "href", `#/jobs/${encodeURIComponent(now.queue)}/${encodeURIComponent(now.last_job)}`);
      setPill(ended, now.last_state);
    }
  };
  return node;
}

function mount({ body, refresh }) {
  const list = table("Schedules", ["Schedule", "When", "Next", "Last", "Runs", "Action"]);
  const hint = h("div");
  const nothing = h("div", null, h("p", { class: "muted" }, "Looking…"));
  const shown = h("p", { class: "muted small status-line" });
  list.hidden = true;
  replace(body, hint, nothing, shown, list);
  return {
    navigate: () => {},
    failed: (error) => replace(nothing, h("p", { class: "note tone-bad", role: "alert" }, error.message)),
    refresh: async () => {
      const { schedules, total, unreadable } = await admin("/admin/schedules");
      const late = schedules.filter((one) => one.overdue);
      replace(hint, unread(unreadable), late.length ? h("p", { class: "note tone-warn" }, `${plural(late.length, "schedule")} overdue: a tick is due and no worker took it. Is one alive?`) : null);
      replace(nothing, schedules.length ? null : empty("No schedules", "Job schedulers that a service has declared (upsertJobScheduler) appear here, with their next run."));
      text(shown, schedules.length < total ? `The next ${count(schedules.length)} of ${count(total)}.` : "");
      list.hidden = schedules.length === 0;
      keyed(list.body, schedules, (one) => `${one.queue}/${one.id}`, (one) => rowOf(one, refresh), (node, one) => node.show(one));
    },
  };
}

export const schedules = { id: "schedules", title: "Schedules", icon: "schedules", admin: true, about: "What runs by the clock: next, last, what is overdue and what was missed.", mount };
