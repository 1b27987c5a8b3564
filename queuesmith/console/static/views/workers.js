import { admin } from "../api.js";
import { cell, empty, h, keyed, pill, replace, set, setPill, table, text, unread } from "../dom.js";
import { count, full, plural, seconds, short } from "../format.js";

function workerRow(one) {
  const since = h("span", { class: "number" });
  const node = h("tr", { role: "row" }, cell("Worker", h("div", null, h("span", { class: "title" }, one.name || "(no name)"), h("div", { class: "small muted mono" }, one.address))), cell("Queue", h("a", { href: `#/jobs/${encodeURIComponent(one.queue)}` }, one.queue)), cell("Library", h("span", null, one.library || "not told")), cell("Connected for", since));
  node.show = (now) => text(since, seconds(now.connected));
  return node;
}

function jobRow(one) {
  const state = pill("active");
  const since = h("time");
  const node = h("tr", { role: "row" }, cell("Job", h("div", null, h("a", { class: "title", href: `#/jobs/${encodeURIComponent(one.queue)}/${encodeURIComponent(one.id)}` }, one.name || "(no name)"), h("div", { class: "small muted mono" }, short(one.id)))), cell("Queue", h("span", null, one.queue)), cell("On", h("span", null, one.worker || "a worker without a name")), cell("For", since), cell("State", state));
  node.show = (now) => {
    text(since, now.started_at ? seconds(Date.now() / 1000 - now.started_at) : "–");
    set(since, "title", full(now.started_at));
    setPill(state, now.held ? "active" : "stalled");
  };
  return node;
}

function mount({ body }) {
  const hint = h("div");
  const people = table("Workers", ["Worker", "Queue", "Library", "Connected for"]);
  const running = table("Running jobs", ["Job", "Queue", "On", "For", "State"]);
  const [noWorker, noJob] = [h("div", null, h("p", { class: "muted" }, "Looking…")), h("div")];
  const [whoHead, whatHead] = [h("h2", { class: "section" }, "Workers"), h("h2", { class: "section" }, "What runs")];
  people.hidden = running.hidden = true;
  replace(body, hint, whoHead, noWorker, people, whatHead, noJob, running);
  return {
    navigate: () => {},
    failed: (error) => replace(noWorker, h("p", { class: "note tone-bad", role: "alert" }, error.message)),
    refresh: async () => {
      const answer = await admin("/admin/workers");
      const workers = answer.workers ?? [];
      const idle = answer.workers ? answer.queues.filter((queue) => !workers.some((one) => one.queue === queue)) : [];
      text(whoHead, answer.workers ? `Workers (${count(workers.length)})` : "Workers");
      text(whatHead, `What runs (${count(answer.running)})`);
      replace(hint, unread(answer.unreadable), idle.length ? h("p", { class: "note tone-warn" }, `Nobody is working on ${idle.slice(0, 8).join(", ")}${idle.length > 8 ? ` and ${plural(idle.length - 8, "other queue")}` : ""}.`) : null);
      replace(noWorker, workers.length ? null : answer.workers === null ? empty("This Redis user may not list connections", "Allow it CLIENT LIST (ACL: +client|list) to see who is alive.") : empty("No worker is connected", "Jobs wait until one is. Start a worker, and look for it here."));
      replace(noJob, answer.active.length ? null : empty("Nothing runs right now"));
      people.hidden = workers.length === 0;
      running.hidden = answer.active.length === 0;
      keyed(people.body, workers, (one) => `${one.queue} ${one.address}`, workerRow, (node, one) => node.show(one));
      const longest = [...answer.active].sort((a, b) => (a.started_at ?? 0) - (b.started_at ?? 0));
      keyed(running.body, longest, (one) => `${one.queue}/${one.id}`, jobRow, (node, one) => node.show(one));
    },
  };
}

export const workers = { id: "workers", title: "Workers", icon: "workers", admin: true, about: "Who is alive, what runs where and since when. BullMQ workers are known by the name of their connection.", mount };
