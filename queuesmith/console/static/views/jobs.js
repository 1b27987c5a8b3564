import { admin, download, path, save } from "../api.js";
import { attempt, bar, block, cell, confirmAction, confirmByWord, empty, follow, h, icon, keyed, modal, pager, pill, replace, set, setPill, split, stateName, table, text, toast, tone, unread } from "../dom.js";
import { flowGraph } from "../flow.js";
import { ago, ahead, clock, count, full, plural, seconds, short } from "../format.js";
import { queues } from "../queues.js";

const STATES = ["active", "wait", "paused", "prioritized", "delayed", "waiting-children", "failed", "completed"];
const ENDED = new Set(["completed", "failed", "cancelled", "dead", "gone"]);
const SIZE = 50;
// Which actions fit a state; the words for one job and for many.
const ACTIONS = {
  retry: { states: ["failed", "completed"], word: "Retry", done: "retried" },
  promote: { states: ["delayed"], word: "Run now", done: "put in line" },
  remove: { states: ["wait", "paused", "prioritized", "delayed", "waiting-children", "failed", "completed"], word: "Remove", done: "removed", danger: "They are deleted with their payloads and logs. This cannot be undone." },
  cancel: { states: ["active", "wait", "paused", "prioritized", "delayed", "waiting-children"], word: "Cancel", done: "cancelled", danger: "Each stops if it runs, and never starts if it waits; so does the rest of its flow. What it did before is not undone." },
};
const MOST = 500; // ids the server takes at once

/** The view's own address: queue and job in the path, filters after it, so that it can be shared. */
function address({ queue = "", id = "", state = "", q = "", page = 0 }) {
  const path = ["#/jobs", queue, queue && id].filter(Boolean).map((part, index) => (index ? encodeURIComponent(part) : part)).join("/");
  const query = new URLSearchParams(Object.entries({ state, q, page: page || "" }).filter(([, value]) => value));
  return query.size ? `${path}?${query}` : path;
}

/** The time that matters, by state. */
function moment(job) {
  if (job.state === "delayed") return ahead(job.due);
  if (job.state === "active") return `for ${seconds(Date.now() / 1000 - job.started_at)}`;
  if (job.ended_at) return `ended ${ago(job.ended_at)}`;
  return `added ${ago(job.added_at)}`;
}

function jobRow(job, wanted, chosen, selecting, changed) {
  const box = h("input", { type: "checkbox", "aria-label": `Select ${job.name} ${job.id}` });
  box.addEventListener("change", () => {
    if (box.checked) chosen.add(job.id);
    else chosen.delete(job.id);
    changed();
  });
  const state = pill(job.state);
  const line = bar(`Progress of ${job.name} ${job.id}`);
  const link = h("a", { class: "title" }, job.name || "(no name)");
  const age = h("time");
  const tries = h("span", { class: "number" });
  const node = h("tr", { role: "row" }, cell("Select", box), cell("Job", h("div", null, link, h("div", { class: "small muted mono" }, short(job.id), job.unreadable && ` (${job.unreadable})`))), cell("Queue*", h("span", null, job.queue)), cell("State", state), cell("Progress*", line), cell("Tries*", tries), cell("When", age));
  node.show = (one) => {
    setPill(state, one.state);
    line.show(percentOf(one), one.state);
    text(tries, one.attempts_made);
    text(age, moment(one));
    set(age, "title", full(one.due ?? one.ended_at ?? one.started_at ?? one.added_at));
    const now = wanted();
    set(link, "href", address({ ...now, queue: one.queue, id: one.id }));
    box.checked = chosen.has(one.id);
    node.firstElementChild.hidden = !selecting();
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
  const more = h("pre", { class: "trace" });
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

async function act(action, queue, id, refresh) {
  const { word, done, danger } = ACTIONS[action];
  if (danger && !(await confirmAction("Remove this job?", "It is deleted with its payload, its logs and the jobs of its flow that it waits for. This cannot be undone.", "Remove it", "Keep it"))) return;
  await attempt(async () => {
    await admin(path("/admin/jobs", queue, id, action), { method: "POST" });
    return `${word}: the job was ${done}.`;
  }, refresh);
}

function detail(queue, id, refresh, back) {
  const title = h("h2", { tabindex: -1 }, "Looking…");
  const state = pill("waiting");
  const line = bar("Progress");
  const message = h("p", { class: "small muted" });
  const trouble = h("p", { class: "note tone-bad", hidden: true });
  const facts = h("dl", { class: "facts" });
  const timeline = h("ol", { class: "timeline", "aria-label": "Timeline" });
  const parts = {};
  const sections = {};
  for (const [name, heading] of Object.entries({ result: "Result, secrets masked", trace: "Stack trace of the last try", logs: "Logs", payload: "Payload, secrets masked", options: "Options" })) {
    parts[name] = block(heading, name);
    sections[name] = h("div", { hidden: true, "data-section": name }, h("h3", null, heading), parts[name]);
  }
  const graph = flowGraph("Flow of this job");
  const flowPart = h("div", { hidden: true }, h("h3", null, "Flow"), h("div", { class: "flow-frame" }, graph));
  const stop = h("button", { class: "danger small-button", hidden: true }, "Cancel this job");
  const buttons = Object.entries(ACTIONS).filter(([name]) => name !== "cancel").map(([name, { word, danger }]) => [name, h("button", { class: `small-button ${danger ? "danger" : "primary"}`, hidden: true, onclick: () => act(name, queue, id, refresh) }, word)]);
  const close = h("a", { href: back() }, "Close");
  let whole = null;
  const keep = h("button", { class: "small-button", onclick: () => save(new Blob([JSON.stringify(whole, null, 2)], { type: "application/json" }), `${queue}-${id}.json`) }, "Save as JSON");
  stop.addEventListener("click", async () => {
    if (!(await confirmAction("Cancel this job?", "If it runs it is told to stop; if it waits it never starts. What it did before is not undone.", "Cancel the job", "Leave it"))) return;
    await attempt(async () => {
      await admin(path("/admin/jobs", queue, id, "cancel"), { method: "POST", json: { reason: "cancelled in the console" } });
      return "Cancelled: if it runs, it stops now.";
    }, refresh);
  });
  const node = h(
    "section",
    { class: "card detail", "aria-label": "Job" },
    h("div", { class: "card-head" }, title, state),
    line,
    message,
    trouble,
    facts,
    sections.result,
    h("h3", null, "Timeline"),
    timeline,
    sections.trace,
    sections.logs,
    flowPart,
    sections.payload,
    sections.options,
    h("div", { class: "card-head card-foot" }, close, h("div", { class: "actions" }, keep, buttons.map(([, button]) => button), stop)),
  );
  const put = (name, value) => {
    sections[name].hidden = !value;
    if (value) parts[name].show(value);
  };
  const json = (value) => (value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value, null, 2));
  node.show = (job) => {
    whole = job;
    const ended = job.state;
    set(close, "href", back());
    text(title, job.name || "(no name)");
    setPill(state, ended);
    line.show(percentOf(job), ended);
    text(message, ended === "cancelled" ? `cancelled: ${job.result?.cancelled}` : [job.progress?.stage, job.progress?.message].filter(Boolean).join(": "));
    text(trouble, [job.unreadable, job.reason].filter(Boolean).join("; "));
    trouble.hidden = !trouble.textContent;
    const rows = [
      ["Id", h("span", { class: "mono" }, job.id)],
      ["Queue", job.queue],
      ["Due", job.due ? `${full(job.due)}, ${ahead(job.due)}` : null],
      ["In line", job.position ? `number ${count(job.position)}` : null],
      ["Tries", `${job.attempts_made}${job.options?.attempts ? ` of ${job.options.attempts}` : ""}${job.stalls ? `, taken over ${plural(job.stalls, "time")}` : ""}`],
      ["Added", full(job.added_at)],
      ["Started", job.started_at ? full(job.started_at) : null],
      ["Ended", job.ended_at ? full(job.ended_at) : null],
      ["Took", job.started_at && job.ended_at ? seconds(job.ended_at - job.started_at) : null],
      ["Worker", job.worker],
      ["Trace", job.payload?.meta?.cid ? h("span", { class: "mono" }, job.payload.meta.cid) : null],
    ].filter(([, value]) => value !== null && value !== undefined);
    const shape = JSON.stringify(rows.map(([name, value]) => [name, value.textContent ?? value]));
    if (facts.dataset.shape !== shape) {
      facts.dataset.shape = shape;
      replace(facts, rows.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
    }
    keyed(timeline, moments(job), (entry) => entry.key, momentRow, (one, entry) => one.show(entry));
    put("result", ended === "cancelled" ? "" : json(job.result));
    put("trace", job.attempts_failed.at(-1)?.error ?? "");
    const more = job.logged - job.logs.length;
    put("logs", [more > 0 ? `(${count(more)} earlier lines)` : null, ...job.logs].filter(Boolean).join("\n"));
    put("payload", json(job.payload ?? "null"));
    put("options", job.options && Object.keys(job.options).length ? json(job.options) : "");
    for (const [name, button] of buttons) set(button, "hidden", !ACTIONS[name].states.includes(ended));
    set(stop, "hidden", ENDED.has(ended) || !job.cancellable);
    if (job.flow) {
      flowPart.hidden = job.flow.nodes.length < 2;
      graph.show(job.flow.nodes.map((one) => ({ ...one, after: job.flow.edges.filter((edge) => edge.to === one.id).map((edge) => edge.from) })));
    }
  };
  return node;
}

async function look(queue, id) {
  const missing = (error) => { if (error.status === 404) return null; throw error; };
  const [job, flow] = await Promise.all([admin(path("/admin/jobs", queue, id)).catch(missing), admin(path("/admin/flows", queue, id)).catch(() => null)]);
  return job && { ...job, flow };
}

/** Many at once: first shows how many, and afterwards what was done. */
async function actOnMany(action, queue, state, ids, total, refresh) {
  const { word, done, danger } = ACTIONS[action];
  const number = ids.length || total;
  const what = `${ids.length ? "" : "all "}${plural(number, `${stateName(state)} job`)} of ${queue}`;
  const sure = danger
    ? await confirmByWord(`${word} ${what}?`, danger, action, `${word} ${count(number)}`)
    : await confirmAction(`${word}: ${what}?`, state === "completed" ? "They were done. Each runs again." : "All of them go in line at once.", `${word} ${count(number)}`, "Not now");
  if (!sure) return;
  await attempt(async () => {
    const { href } = await admin("/admin/actions", { method: "POST", json: { action, queue, state, ...(ids.length ? { ids } : { count: total }) } });
    const now = await follow(href, refresh);
    const refused = Object.values(now.refused);
    if (refused.length) toast(`${plural(refused.length, "job")} refused: ${refused[0]}`, "bad");
    if (now.state !== "done") toast(now.state, "bad");
    return `${plural(now.done, "job")} ${done}.`;
  }, refresh);
}

async function addJob(queue, refresh) {
  const field = (id, label, props = {}) => [h("label", { for: id }, label), h("input", { id, autocomplete: "off", ...props })];
  const data = h("textarea", { id: "new-data", rows: 6, class: "mono", spellcheck: "false" });
  data.value = "{}";
  const wrong = h("p", { class: "note tone-bad", role: "alert", hidden: true });
  const parts = { queue: field("new-queue", "Queue", { value: queue, required: true, list: "new-queues" }), name: field("new-name", "Name of the job", { required: true, maxlength: 200 }), id: field("new-id", "Id (optional; a second job with it is refused)"), delay: field("new-delay", "Delay in seconds", { type: "number", min: 0, value: 0 }), attempts: field("new-attempts", "Tries at most", { type: "number", min: 1, max: 100, value: 1 }), priority: field("new-priority", "Priority (0: none, 1: first)", { type: "number", min: 0, max: 2097151, value: 0 }) };
  const value = (name) => parts[name][1].value.trim();
  const made = await modal("Add a job", (close) => {
    const submit = async (event) => {
      event.preventDefault();
      try {
        const json = { queue: value("queue"), name: value("name"), data: JSON.parse(data.value || "null"), job_id: value("id") || null, delay: Number(value("delay")), attempts: Number(value("attempts")), priority: Number(value("priority")) };
        close(await admin("/admin/jobs", { method: "POST", json }));
      } catch (error) {
        text(wrong, error instanceof SyntaxError ? `The payload is not JSON: ${error.message}` : error.message);
        set(wrong, "hidden", false);
      }
    };
    return h(
      "form",
      { onsubmit: submit },
      h("p", { class: "small muted" }, "Added by BullMQ's own script: workers in Node and Python take it. Workers that check signatures refuse it."),
      h("datalist", { id: "new-queues" }, queues.rows.map((row) => h("option", { value: row.queue }))),
      parts.queue, parts.name, h("label", { for: "new-data" }, "Payload, as JSON"), data, parts.id, parts.delay, parts.attempts, parts.priority, wrong,
      h("div", { class: "actions" }, h("button", { onclick: () => close(null) }, "Cancel"), h("button", { type: "submit", class: "primary" }, "Add it")),
    );
  });
  if (!made) return;
  toast(`Added as ${made.id}.`);
  location.hash = address({ queue: made.queue, id: made.id });
  refresh();
}

function mount({ body, tools, params, query, about, refresh }) {
  let wanted = {};
  let rows = [];
  let answer = { jobs: [], total: 0, next: null, looked: 0, unreadable: {} };
  let further = [];
  let adds = false;
  const chosen = new Set();
  const read = ([queue = "", id = ""], asked) => ({ queue, id, state: asked.get("state") ?? "", q: asked.get("q") ?? "", page: Math.max(0, Number(asked.get("page")) || 0) });
  const go = (changes) => { location.hash = address({ ...wanted, id: "", page: 0, ...changes }); };
  const queueField = h("select", { id: "job-queue" }, h("option", { value: "" }, "All queues"));
  const stateField = h("select", { id: "job-state" }, h("option", { value: "" }, "Any state"), STATES.map((state) => h("option", { value: state }, stateName(state))));
  const nameField = h("input", { id: "job-name", type: "search", "data-search": "", placeholder: "id, or part of a name" });
  const list = table("Jobs", ["Select", "Job", "Queue*", "State", "Progress*", "Tries*", "When"]);
  const nothing = h("div", null, h("p", { class: "muted" }, "Looking…"));
  const onward = h("button", { class: "small-button", hidden: true }, "Look further");
  const pages = pager("Pages of jobs", SIZE, (page) => go({ page }), onward);
  const frame = split(nothing, list, pages);
  const many = Object.entries(ACTIONS).map(([name, { danger }]) => [name, h("button", { hidden: true, class: danger ? "danger" : "", onclick: async () => {
    await actOnMany(name, wanted.queue, wanted.state, [...chosen], answer.total, refresh);
    chosen.clear();
    draw();
  } })]);
  const selecting = () => Boolean(wanted.queue && wanted.state && (wanted.state !== "active" || about.cancels));
  const all = h("input", { type: "checkbox", id: "jobs-all", onchange: () => {
    for (const row of rows.slice(0, MOST)) chosen[all.checked ? "add" : "delete"](row.id);
    draw();
  } });
  const shown = h("div", { class: "check", hidden: true }, all, h("label", { for: "jobs-all" }, "Select all shown"));
  const add = h("button", { hidden: true, onclick: () => addJob(wanted.queue, refresh) }, "Add a job…");
  const keep = h("button", { onclick: () => {
    const asked = new URLSearchParams(Object.entries({ queue: wanted.queue, state: wanted.state, q: wanted.q }).filter(([, value]) => value));
    download(`/admin/jobs/export?${asked}`, `${[wanted.queue, wanted.state, "jobs"].filter(Boolean).join("-")}.json`).catch((error) => toast(error.message, "bad"));
  } }, "Export as JSON");
  list.hidden = true;
  replace(tools, many.map(([, button]) => button), add, keep);
  replace(
    body,
    h("form", { class: "filters", role: "search", "aria-label": "Filter jobs", onsubmit: (event) => { event.preventDefault(); search(); } },
      h("div", null, h("label", { for: "job-queue" }, "Queue"), queueField),
      h("div", null, h("label", { for: "job-state" }, "State"), stateField),
      h("div", null, h("label", { for: "job-name" }, "Id or name"), nameField),
      shown),
    frame,
  );
  const fill = () => {
    const names = queues.rows.map((row) => row.queue);
    if (wanted.queue && !names.includes(wanted.queue)) names.push(wanted.queue);
    if (queueField.options.length !== names.length + 1) replace(queueField, h("option", { value: "" }, "All queues"), names.map((name) => h("option", { value: name }, name)));
    if (document.activeElement !== queueField) queueField.value = wanted.queue;
    if (document.activeElement !== stateField) stateField.value = wanted.state;
  };
  const open = () => frame.open(wanted.id ? detail(wanted.queue, wanted.id, refresh, () => address({ ...wanted, id: "" })) : null);
  let typing = null;
  const search = () => {
    clearTimeout(typing);
    if (nameField.value.trim() === wanted.q) return;
    wanted = { ...wanted, q: nameField.value.trim(), page: 0 };
    history.replaceState(null, "", address(wanted)); // no history entry for every letter
    further = [];
    refresh();
  };
  queueField.addEventListener("change", () => go({ queue: queueField.value }));
  stateField.addEventListener("change", () => go({ state: stateField.value }));
  const draw = () => {
    const word = nameField.value.trim().toLowerCase();
    rows = [...answer.jobs, ...further].filter((row) => !word || row.name.toLowerCase().includes(word) || row.id.toLowerCase().includes(word));
    const filtered = Boolean(wanted.queue || wanted.q || wanted.state);
    const rest = answer.next !== null && `Looked through ${count(answer.looked)} of ${plural(answer.total, "job")} so far.`;
    replace(nothing, unread(answer.unreadable), rows.length ? null : rest ? empty("Nothing found yet", rest) : wanted.page ? empty("This page is empty", "Jobs have moved on since.") : filtered ? empty("No job matches", "Choose another state or queue, or clear the search.") : empty("No jobs", "There is nothing in the queues."));
    list.hidden = rows.length === 0;
    list.querySelector("th").hidden = shown.hidden = !selecting();
    all.checked = rows.length > 0 && rows.slice(0, MOST).every((row) => chosen.has(row.id));
    all.indeterminate = chosen.size > 0 && !all.checked;
    keyed(list.body, rows, (row) => `${row.queue}/${row.id}`, (row) => jobRow(row, () => wanted, chosen, selecting, draw), (node, row) => { node.show(row); node.classList.toggle("chosen", row.id === wanted.id && row.queue === wanted.queue); });
    pages.show(wanted.page, answer.jobs.length, answer.total, "job", wanted.q ? `${plural(rows.length, "job")} found${rest ? `. ${rest}` : ` among ${count(answer.total)}.`}` : undefined);
    set(onward, "hidden", !wanted.q || answer.next === null);
    for (const [name, button] of many) {
      const { states, word: verb } = ACTIONS[name];
      const number = chosen.size || (wanted.q ? 0 : answer.total);
      set(button, "hidden", !selecting() || !states.includes(wanted.state) || !number || (name === "cancel" && !about.cancels));
      text(button, chosen.size ? `${verb} ${count(number)} selected…` : `${verb} all ${count(number)}…`);
    }
    set(add, "hidden", !adds);
  };
  const ask = (more = {}) => admin(`/admin/jobs?${new URLSearchParams(Object.entries({ queue: wanted.queue, state: wanted.state, q: wanted.q, page: wanted.q ? 0 : wanted.page, size: SIZE, ...more }).filter(([, value]) => value !== ""))}`);
  onward.addEventListener("click", async () => {
    const next = await ask({ offset: answer.next }).catch((error) => toast(error.message, "bad"));
    if (!next) return;
    further.push(...next.jobs);
    answer = { ...answer, next: next.next, looked: next.looked };
    draw();
  });
  nameField.addEventListener("input", () => {
    draw(); // at once: the next Tab must find the right row
    clearTimeout(typing);
    typing = setTimeout(search, 300);
  });
  admin("/admin/session").then((session) => { adds = session.adds; draw(); }).catch(() => {});
  wanted = read(params, query);
  nameField.value = wanted.q;
  fill();
  open();
  return {
    navigate: (next, asked) => {
      const now = read(next, asked);
      const moved = now.queue !== wanted.queue || now.id !== wanted.id;
      if (now.queue !== wanted.queue || now.state !== wanted.state || now.q !== wanted.q) {
        chosen.clear();
        further = [];
      }
      wanted = now;
      if (document.activeElement !== nameField) nameField.value = wanted.q;
      fill();
      if (moved) open();
    },
    unmount: () => clearTimeout(typing),
    event: refresh,
    failed: (error) => replace(nothing, h("p", { class: "note tone-bad", role: "alert" }, error.message)),
    refresh: async () => {
      fill();
      const now = wanted;
      // After looking further the results stay: the list is not loaded again from its start.
      const [found, job] = await Promise.all([further.length ? answer : ask(), now.id ? look(now.queue, now.id) : null]);
      if (now.queue !== wanted.queue || now.id !== wanted.id || now.state !== wanted.state || now.q !== wanted.q || now.page !== wanted.page) return;
      answer = found;
      draw();
      if (!now.id) return;
      const card = frame.lastElementChild.firstElementChild;
      if (job) card.show(job);
      else replace(card, empty("This job is gone", "It was removed, or ended long ago. Failed for good? Then it may be a dead letter.", h("a", { href: address({ ...wanted, id: "" }) }, "Close")));
    },
  };
}

export const jobs = { id: "jobs", title: "Jobs", icon: "jobs", admin: true, about: "Every job with its progress, its tries, its result and what went wrong.", mount };
