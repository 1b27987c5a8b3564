import { admin } from "../api.js";
import { bar, cell, confirmAction, empty, h, icon, keyed, pill, replace, set, setPill, table, text, toast, tone } from "../dom.js";
import { ago, clock, full, plural, seconds, short } from "../format.js";
import { queues } from "../queues.js";

const STATES = ["active", "waiting", "prioritized", "delayed", "waiting-children", "completed", "failed"];
const ENDED = new Set(["completed", "failed", "cancelled", "gone"]);

function address(job) {
  return `#/jobs/${encodeURIComponent(job.queue)}/${encodeURIComponent(job.id)}`;
}

function jobRow(job) {
  const state = pill(job.state);
  const line = bar(`Progress of ${job.name} ${job.id}`);
  const what = h("div", { class: "small muted mono" }, short(job.id));
  const age = h("time");
  const tries = h("span", { class: "number" });
  const node = h("tr", { role: "row" }, cell("Job", h("div", null, h("a", { class: "title", href: address(job) }, job.name || "(no name)"), what)), cell("Queue", h("span", null, job.queue)), cell("State", state), cell("Progress", line), cell("Tries", tries), cell("Added", age));
  node.show = (one) => {
    setPill(state, one.state);
    line.show(one.percent, one.state);
    text(tries, one.attempts ?? 0);
    text(age, ago(one.added));
    set(age, "title", full(one.added));
  };
  return node;
}

function moments(job) {
  return (job.timeline ?? []).map((entry, index) => ({ ...entry, key: `${index}:${entry.event}` }));
}

function momentRow(entry) {
  const time = h("time");
  const what = h("strong");
  const more = h("p", { class: "small" });
  const node = h("li", null, icon("wait"), h("div", { class: "timeline-head" }, what, time), more);
  node.show = (now) => {
    const colour = tone(now.state ?? now.event);
    set(node, "class", `tone-${colour}`);
    node.querySelector(".icon").replaceWith(icon({ ok: "done", bad: "fail", run: "run", warn: "wait" }[colour] ?? "none"));
    text(what, now.title ?? now.event);
    text(time, now.at ? `${clock(now.at)}${now.after ? `, after ${seconds(now.after)}` : ""}` : "");
    text(more, now.detail ?? "");
    more.hidden = !now.detail;
  };
  return node;
}

function detail(queue, id, refresh) {
  const title = h("h2");
  const state = pill("waiting");
  const line = bar("Progress");
  const message = h("p", { class: "small muted" });
  const trouble = h("p", { class: "note tone-bad", hidden: true });
  const facts = h("dl", { class: "facts" });
  const timeline = h("ol", { class: "timeline", "aria-label": "Timeline" });
  const payload = h("pre", { class: "payload", tabindex: 0, role: "region", "aria-label": "Payload, secrets masked" });
  const stop = h("button", { type: "button", class: "danger small-button", hidden: true }, "Cancel this job");
  stop.addEventListener("click", async () => {
    if (!(await confirmAction("Cancel this job?", "If it runs it is told to stop; if it waits it never starts. Nothing it did before is taken back.", "Cancel the job", "Leave it"))) return;
    try {
      await admin(`/admin/jobs/${encodeURIComponent(queue)}/${encodeURIComponent(id)}/cancel`, { method: "POST", json: {} });
      toast("Cancelled.");
    } catch (error) {
      toast(error.message, "bad");
    }
    refresh();
  });
  const node = h(
    "section",
    { class: "card detail", "aria-label": "Job" },
    h("div", { class: "card-head" }, title, state),
    line,
    message,
    trouble,
    facts,
    h("h3", null, "Timeline"),
    timeline,
    h("h3", null, "Payload, secrets masked"),
    payload,
    h("div", { class: "card-head card-foot" }, h("a", { href: `#/jobs/${encodeURIComponent(queue)}` }, "Close"), stop),
  );
  node.show = (job) => {
    text(title, job.name);
    setPill(state, job.state);
    line.show(job.percent, job.state);
    text(message, job.message ?? "");
    text(trouble, job.reason ?? "");
    trouble.hidden = !job.reason;
    const rows = [
      ["Id", h("span", { class: "mono" }, job.id)],
      ["Queue", job.queue],
      ["Tries", `${job.attempts ?? 0}${job.max_attempts ? ` of ${job.max_attempts}` : ""}`],
      ["Added", job.added ? `${full(job.added)} (${ago(job.added)})` : null],
      ["Trace", job.correlation_id ? h("span", { class: "mono" }, job.correlation_id) : null],
      ["Waits for", job.waits_for?.length ? plural(job.waits_for.length, "job") : null],
    ].filter(([, value]) => value !== null && value !== undefined);
    const shape = JSON.stringify(rows.map(([name, value]) => [name, value.textContent ?? value]));
    if (facts.dataset.shape !== shape) {
      facts.dataset.shape = shape;
      replace(facts, rows.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
    }
    keyed(timeline, moments(job), (entry) => entry.key, momentRow, (one, entry) => one.show(entry));
    text(payload, JSON.stringify(job.payload ?? null, null, 2));
    set(stop, "hidden", ENDED.has(job.state));
  };
  return node;
}

function mount({ body, params, refresh }) {
  let [queue = "", id] = params;
  const queueField = h("select", { id: "job-queue" }, h("option", { value: "" }, "All queues"));
  const stateField = h("select", { id: "job-state" }, h("option", { value: "" }, "Any state"), STATES.map((state) => h("option", { value: state }, state)));
  const nameField = h("input", { id: "job-name", type: "search", "data-search": "", placeholder: "name or id" });
  const list = table("Jobs", ["Job", "Queue", "State", "Progress", "Tries", "Added"]);
  const nothing = h("div", null, h("p", { class: "muted" }, "Looking…"));
  const side = h("div", { hidden: true });
  const split = h("div", { class: "split" }, h("div", null, nothing, list), side);
  list.hidden = true;
  replace(
    body,
    h("form", { class: "filters", role: "search", "aria-label": "Filter jobs", onsubmit: (event) => event.preventDefault() },
      h("div", null, h("label", { for: "job-queue" }, "Queue"), queueField),
      h("div", null, h("label", { for: "job-state" }, "State"), stateField),
      h("div", null, h("label", { for: "job-name" }, "Name or id"), nameField)),
    split,
  );
  const fill = () => {
    const names = queues.rows.map((row) => row.queue);
    if (queue && !names.includes(queue)) names.push(queue);
    if (queueField.options.length !== names.length + 1) replace(queueField, h("option", { value: "" }, "All queues"), names.map((name) => h("option", { value: name }, name)));
    if (document.activeElement !== queueField) queueField.value = queue;
  };
  const open = () => {
    replace(side, id ? detail(queue, id, refresh) : null);
    side.hidden = !id;
    split.classList.toggle("with-detail", Boolean(id));
    if (id) side.firstElementChild.hidden = true;
  };
  queueField.addEventListener("change", () => { location.hash = queueField.value ? `#/jobs/${encodeURIComponent(queueField.value)}` : "#/jobs"; });
  stateField.addEventListener("change", refresh);
  nameField.addEventListener("input", refresh);
  fill();
  queueField.value = queue;
  open();
  return {
    navigate: (next) => {
      const [nextQueue = "", nextId] = next;
      if (nextQueue === queue && nextId === id) return;
      [queue, id] = [nextQueue, nextId];
      queueField.value = queue;
      open();
    },
    event: refresh,
    failed: (error) => replace(nothing, h("p", { class: "note tone-bad", role: "alert" }, error.message)),
    refresh: async () => {
      fill();
      const [inQueue, one] = [queue, id];
      const wanted = new URLSearchParams({ limit: "100" });
      if (inQueue && !one) wanted.set("queue", inQueue);
      if (stateField.value) wanted.set("state", stateField.value);
      const [answer, job] = await Promise.all([
        admin(`/admin/jobs?${wanted}`),
        one ? admin(`/admin/jobs/${encodeURIComponent(inQueue)}/${encodeURIComponent(one)}`).catch((error) => { if (error.status === 404) return null; throw error; }) : null,
      ]);
      const name = nameField.value.trim().toLowerCase();
      const jobs = answer.jobs.filter((row) => !name || row.name.toLowerCase().includes(name) || row.id.toLowerCase().includes(name));
      const filtered = Boolean(inQueue || name || stateField.value);
      replace(nothing, jobs.length ? null : filtered ? empty("No job matches", "Choose another state or queue, or clear the search.") : empty("No jobs", h("p", null, h("a", { href: "#/documents" }, "Upload a document"), " to make some.")));
      list.hidden = jobs.length === 0;
      keyed(list.body, jobs, (row) => `${row.queue}/${row.id}`, jobRow, (node, row) => { node.show(row); node.classList.toggle("chosen", row.id === id && row.queue === queue); });
      if (one !== id || inQueue !== queue || !id) return;
      const card = side.firstElementChild;
      card.hidden = false;
      if (job) card.show(job);
      else replace(card, empty("This job is gone", "It was cancelled, or ended long ago. Failed for good? Then it is a dead letter.", h("a", { href: "#/letters" }, "Dead letters")));
    },
  };
}

export const jobs = { id: "jobs", title: "Jobs", icon: "jobs", admin: true, about: "Every job with its progress, its tries and what went wrong.", mount };
