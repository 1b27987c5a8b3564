import { admin } from "../api.js";
import { bar, cell, confirmAction, empty, h, icon, keyed, pill, replace, set, setPill, stateName, table, text, toast, tone } from "../dom.js";
import { flowGraph } from "../flow.js";
import { ago, clock, full, plural, seconds, short } from "../format.js";
import { queues } from "../queues.js";

// BullMQ's names of the states, the count of each in /admin/queues, and how many rows of it are worth a look.
const STATES = [
  ["active", "active", 50],
  ["wait", "waiting", 50],
  ["prioritized", "prioritized", 25],
  ["delayed", "delayed", 25],
  ["waiting-children", "waiting_children", 25],
  ["failed", "failed", 25],
  ["completed", "completed", 10],
];
const ENDED = new Set(["completed", "failed", "cancelled", "dead", "gone"]);

function address(job) {
  return `#/jobs/${encodeURIComponent(job.queue)}/${encodeURIComponent(job.id)}`;
}

function jobRow(job) {
  const state = pill(job.state);
  const line = bar(`Progress of ${job.name} ${job.id}`);
  const what = h("div", { class: "small muted mono" }, short(job.id));
  const age = h("time");
  const tries = h("span", { class: "number" });
  const node = h("tr", { role: "row" }, cell("Job", h("div", null, h("a", { class: "title", href: address(job) }, job.name || "(no name)"), what)), cell("Queue*", h("span", null, job.queue)), cell("State", state), cell("Progress*", line), cell("Tries*", tries), cell("Added*", age));
  node.show = (one) => {
    setPill(state, one.state);
    line.show(percentOf(one), one.state);
    text(tries, one.attempts_made);
    text(age, ago(one.added_at));
    set(age, "title", full(one.added_at));
  };
  return node;
}

function percentOf(job) {
  return job.state === "completed" ? 100 : (job.progress?.percent ?? 0);
}

const TITLES = { added: "Added", waiting: "In line", "waiting-children": "Waits for the stage before", active: "Started", delayed: "Put off", completed: "Completed", failed: "Failed for good", stalled: "Its worker went silent: taken over" };

/** What the event stream knows, the error of every failed try beside its end, and earlier deaths. */
function moments(job) {
  const errors = job.attempts_failed.map((one) => one.error);
  const rows = job.timeline.map((entry) => ({ at: entry.at, state: entry.event, title: TITLES[entry.event] ?? entry.event, detail: entry.event === "failed" ? entry.detail : "" }));
  let tries = 0;
  rows.forEach((row, index) => {
    if (row.state !== "active") return;
    tries += 1;
    row.title = `Started, try ${tries}`;
    const next = rows[index + 1]?.state;
    if (next && next !== "completed" && next !== "stalled" && errors.length) row.detail = errors.shift();
  });
  for (const error of errors) rows.push({ at: null, state: "failed", title: "A try failed", detail: error });
  for (const death of job.deaths) rows.push({ at: death.at, state: "failed", title: `Dead letter (${death.cause})`, detail: death.reason });
  rows.sort((a, b) => (a.at ?? Infinity) - (b.at ?? Infinity));
  return rows.map((row, index) => ({ ...row, key: `${index}:${row.state}` }));
}

function momentRow(entry) {
  const time = h("time");
  const what = h("strong");
  const more = h("p", { class: "small" });
  const node = h("li", null, icon("wait"), h("div", { class: "timeline-head" }, what, time), more);
  node.show = (now) => {
    const colour = now.state === "waiting-children" ? "idle" : tone(now.state);
    set(node, "class", `tone-${colour}`);
    node.querySelector(".icon").replaceWith(icon({ ok: "done", bad: "fail", run: "run", warn: "wait" }[colour] ?? "none"));
    text(what, now.title);
    text(time, now.at ? clock(now.at) : "");
    text(more, now.detail);
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
  const graph = flowGraph("Flow of this job");
  const flowPart = h("div", { hidden: true }, h("h3", null, "Flow"), h("div", { class: "flow-frame" }, graph));
  const stop = h("button", { type: "button", class: "danger small-button", hidden: true }, "Cancel this job");
  stop.addEventListener("click", async () => {
    if (!(await confirmAction("Cancel this job?", "If it runs it is told to stop; if it waits it never starts. Nothing it did before is taken back.", "Cancel the job", "Leave it"))) return;
    try {
      await admin(`/admin/jobs/${encodeURIComponent(queue)}/${encodeURIComponent(id)}/cancel`, { method: "POST", json: { reason: "cancelled in the console" } });
      toast("Cancelled: if it runs, it stops now.");
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
    flowPart,
    h("h3", null, "Payload, secrets masked"),
    payload,
    h("div", { class: "card-head card-foot" }, h("a", { href: `#/jobs/${encodeURIComponent(queue)}` }, "Close"), stop),
  );
  node.show = (job) => {
    const ended = job.state;
    text(title, job.name || "(no name)");
    setPill(state, ended);
    line.show(percentOf(job), ended);
    text(message, ended === "cancelled" ? `cancelled: ${job.result?.cancelled}` : [job.progress?.stage, job.progress?.message].filter(Boolean).join(": "));
    text(trouble, job.reason ?? "");
    trouble.hidden = !job.reason;
    const rows = [
      ["Id", h("span", { class: "mono" }, job.id)],
      ["Queue", job.queue],
      ["Tries", `${job.attempts_made}${job.options?.attempts ? ` of ${job.options.attempts}` : ""}${job.stalls ? `, taken over ${plural(job.stalls, "time")}` : ""}`],
      ["Added", full(job.added_at)],
      ["Took", job.started_at && job.ended_at ? seconds(job.ended_at - job.started_at) : null],
      ["Trace", job.payload?.meta?.cid ? h("span", { class: "mono" }, job.payload.meta.cid) : null],
    ].filter(([, value]) => value !== null && value !== undefined);
    const shape = JSON.stringify(rows.map(([name, value]) => [name, value.textContent ?? value]));
    if (facts.dataset.shape !== shape) {
      facts.dataset.shape = shape;
      replace(facts, rows.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
    }
    keyed(timeline, moments(job), (entry) => entry.key, momentRow, (one, entry) => one.show(entry));
    text(payload, JSON.stringify(job.payload ?? null, null, 2));
    set(stop, "hidden", ENDED.has(ended));
    if (job.flow) {
      flowPart.hidden = job.flow.nodes.length < 2;
      graph.show(job.flow.nodes.map((one) => ({ ...one, after: job.flow.edges.filter((edge) => edge.to === one.id).map((edge) => edge.from) })));
    }
  };
  return node;
}

/** The API lists one queue and state at a time: ask for those that have any. */
async function search(queue, state) {
  const { queues: rows } = await admin("/admin/queues");
  const asked = rows
    .filter((row) => !queue || row.queue === queue)
    .flatMap((row) => STATES.filter(([name, counted]) => (!state || name === state) && row[counted] > 0).map(([name, , size]) => [name, row.queue, state ? 100 : size]));
  const pages = await Promise.all(asked.map(([name, of, size]) => admin(`/admin/jobs?${new URLSearchParams({ queue: of, state: name, size })}`)));
  const order = [...STATES.map(([name]) => name), "cancelled"]; // those are listed with the completed ones
  return pages.flatMap((page) => page.jobs).sort((a, b) => order.indexOf(a.state) - order.indexOf(b.state) || (b.added_at ?? 0) - (a.added_at ?? 0));
}

async function look(queue, id) {
  const path = `${encodeURIComponent(queue)}/${encodeURIComponent(id)}`;
  const missing = (error) => { if (error.status === 404) return null; throw error; };
  const [job, flow] = await Promise.all([admin(`/admin/jobs/${path}`).catch(missing), admin(`/admin/flows/${path}`).catch(missing)]);
  return job && { ...job, flow };
}

function mount({ body, params, refresh }) {
  let [queue = "", id] = params;
  const queueField = h("select", { id: "job-queue" }, h("option", { value: "" }, "All queues"));
  const stateField = h("select", { id: "job-state" }, h("option", { value: "" }, "Any state"), STATES.map(([state]) => h("option", { value: state }, stateName(state))));
  const nameField = h("input", { id: "job-name", type: "search", "data-search": "", placeholder: "name or id" });
  const list = table("Jobs", ["Job", "Queue*", "State", "Progress*", "Tries*", "Added*"]);
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
  let listed = [];
  const draw = () => {
    const name = nameField.value.trim().toLowerCase();
    const rows = listed.filter((row) => !name || row.name.toLowerCase().includes(name) || row.id.toLowerCase().includes(name));
    const filtered = Boolean(queue || name || stateField.value);
    replace(nothing, rows.length ? null : filtered ? empty("No job matches", "Choose another state or queue, or clear the search.") : empty("No jobs", h("p", null, h("a", { href: "#/documents" }, "Upload a document"), " to make some.")));
    list.hidden = rows.length === 0;
    keyed(list.body, rows, (row) => `${row.queue}/${row.id}`, jobRow, (node, row) => { node.show(row); node.classList.toggle("chosen", row.id === id && row.queue === queue); });
  };
  nameField.addEventListener("input", draw); // at once: the next Tab must find the right row
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
      const [found, job] = await Promise.all([search(inQueue, stateField.value), one ? look(inQueue, one) : null]);
      listed = found;
      draw();
      if (one !== id || inQueue !== queue || !id) return;
      const card = side.firstElementChild;
      card.hidden = false;
      if (job) card.show(job);
      else replace(card, empty("This job is gone", "It was cancelled, or ended long ago. Failed for good? Then it is a dead letter.", h("a", { href: "#/letters" }, "Dead letters")));
    },
  };
}

export const jobs = { id: "jobs", title: "Jobs", icon: "jobs", admin: true, about: "Every job with its progress, its tries and what went wrong.", mount };
