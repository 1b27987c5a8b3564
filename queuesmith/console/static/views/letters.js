import { admin } from "../api.js";
import { cell, confirmByWord, block, empty, h, icon, keyed, modal, pill, replace, set, split, table, text, toast } from "../dom.js";
import { ago, count, full, plural, short } from "../format.js";

function letterRow(letter, chosen, changed) {
  const box = h("input", { type: "checkbox", "aria-label": `Select ${letter.name} ${letter.job_id}` });
  box.addEventListener("change", () => {
    if (box.checked) chosen.add(letter.id);
    else chosen.delete(letter.id);
    changed();
  });
  const age = h("time");
  const node = h(
    "tr",
    { role: "row" },
    cell("Select", box),
    cell("Job", h("div", null, h("a", { class: "title", href: `#/letters/${encodeURIComponent(letter.id)}` }, letter.name || "(no name)"), h("div", { class: "small muted mono" }, `${letter.queue} / ${short(letter.job_id)}`))),
    cell("Why*", h("div", null, h("span", { class: "pill tone-bad" }, icon("warn"), letter.cause), h("div", { class: "small" }, letter.reason))),
    cell("Tries*", h("span", { class: "number" }, letter.attempts_made)),
    cell("Failed", age),
  );
  node.show = (one) => {
    box.checked = chosen.has(one.id);
    text(age, ago(one.failed_at));
    set(age, "title", full(one.failed_at));
  };
  return node;
}

async function replayOne(id, refresh) {
  try {
    await admin(`/admin/dead-letters/${encodeURIComponent(id)}/replay`, { method: "POST", json: {} });
    toast("Replayed: the job is back in its queue, under its own id.");
  } catch (error) {
    toast(error.message, "bad");
  }
  refresh();
}

async function replaySome(ids, queue, total, refresh) {
  const rate = h("input", { id: "replay-rate", type: "number", min: 0.1, max: 100, step: 0.1, value: 5, required: true });
  const what = ids.length ? plural(ids.length, "dead letter") : `all ${plural(total, "dead letter")}${queue ? ` of ${queue}` : ""}`;
  const perSecond = await modal(`Replay ${what}`, (close) =>
    h(
      "form",
      { onsubmit: (event) => { event.preventDefault(); close(Number(rate.value)); } },
      h("p", null, "Each job goes back to its queue under its own id; what it already did is not done again. The cap keeps a burst from hurting what made them fail."),
      h("label", { for: "replay-rate" }, "At most this many per second"),
      rate,
      h("div", { class: "actions" }, h("button", { type: "button", onclick: () => close(null) }, "Not now"), h("button", { type: "submit", class: "primary" }, "Replay")),
    ),
  );
  if (!perSecond) return;
  try {
    const json = { ids, every: ids.length === 0, queue: queue || null, per_second: perSecond };
    const started = await admin("/admin/dead-letters/replay", { method: "POST", json });
    toast(`Replaying, at most ${perSecond} per second.`);
    follow(started.href, refresh);
  } catch (error) {
    toast(error.message, "bad");
  }
  refresh();
}

/** Tell how a replay of many went, when it is through. */
async function follow(href, refresh) {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, 700));
    const now = await admin(href).catch(() => null);
    refresh();
    if (now === null) return toast("The server was restarted: dead letters that were not replayed are still here.", "bad");
    if (now.state === "running") continue;
    const refused = Object.values(now.refused);
    if (refused.length) toast(`${plural(refused.length, "dead letter")} could not be replayed: ${refused[0]}`, "bad");
    if (now.replayed.length) toast(`${plural(now.replayed.length, "dead letter")} replayed.`);
    return undefined;
  }
}

async function purge(refresh) {
  const days = h("input", { id: "purge-days", type: "number", min: 0, max: 3650, value: 30, required: true });
  const chosen = await modal("Purge old dead letters", (close) =>
    h(
      "form",
      { onsubmit: (event) => { event.preventDefault(); close(Number(days.value)); } },
      h("label", { for: "purge-days" }, "Older than so many days (0: all of them)"),
      days,
      h("div", { class: "actions" }, h("button", { type: "button", onclick: () => close(null) }, "Not now"), h("button", { type: "submit", class: "danger" }, "Go on")),
    ),
  );
  if (chosen === null || chosen === undefined) return;
  const warning = `Letters archived more than ${plural(chosen, "day")} ago are deleted, replayed or not. They cannot be replayed afterwards.`;
  if (!(await confirmByWord("Delete them for good?", warning, "purge", "Purge"))) return;
  try {
    const done = await admin("/admin/dead-letters/purge", { method: "POST", json: { older_than_days: chosen, confirm: "purge" } });
    toast(`${plural(done.purged ?? 0, "dead letter")} purged.`);
  } catch (error) {
    toast(error.message, "bad");
  }
  refresh();
}

function detail(id, refresh) {
  const node = h("section", { class: "card detail", "aria-label": "Dead letter" });
  let shape = "";
  node.show = (letter) => {
    const now = JSON.stringify(letter);
    if (now === shape) return;
    shape = now;
    const earlier = letter.earlier ?? [];
    const payload = block("Payload, secrets masked", "payload");
    payload.show(JSON.stringify(letter.payload ?? null, null, 2));
    replace(
      node,
      h("div", { class: "card-head" }, h("h2", null, letter.name || "(no name)"), pill(letter.replayed_at ? "replayed" : "failed")),
      h("p", { class: "note tone-bad" }, letter.reason),
      h(
        "dl",
        { class: "facts" },
        [
          ["Cause", letter.cause],
          ["Queue", letter.queue],
          ["Job", h("span", { class: "mono" }, letter.job_id)],
          ["Tries", String(letter.attempts_made)],
          ["Failed", `${full(letter.failed_at)} (${ago(letter.failed_at)})`],
          ["Trace", letter.correlation_id ? h("span", { class: "mono" }, letter.correlation_id) : "none"],
          ["Replayed", letter.replayed_at ? full(letter.replayed_at) : "not yet"],
        ].map(([name, value]) => [h("dt", null, name), h("dd", null, value)]),
      ),
      earlier.length ? [h("h3", null, "Earlier deaths of this job"), h("ul", null, earlier.map((one) => h("li", { class: "small" }, `${full(one.failed_at)}: ${one.reason}`)))] : null,
      letter.attempts_failed.length
        ? [h("h3", null, "Failed tries"), h("ol", { class: "timeline" }, letter.attempts_failed.map((one) => h("li", { class: "tone-bad" }, icon("fail"), h("div", { class: "timeline-head" }, h("strong", null, `Try ${one.attempt}`)), h("pre", { class: "trace" }, one.error))))]
        : null,
      h("h3", null, "Payload, secrets masked"),
      payload,
      h("div", { class: "card-head card-foot" }, h("a", { href: "#/letters" }, "Close"), letter.replayed_at ? null : h("button", { type: "button", class: "primary small-button", onclick: () => replayOne(id, refresh) }, "Replay this one")),
    );
  };
  return node;
}

function mount({ body, tools, params, query, refresh }) {
  let id = params[0];
  const chosen = new Set();
  let letters = [];
  let shown = [];
  let total = 0;
  const all = h("input", { type: "checkbox", id: "letters-all" });
  const replayChosen = h("button", { type: "button", class: "primary", disabled: true }, "Replay selected");
  const replayAll = h("button", { type: "button" }, "Replay all…");
  const purgeOld = h("button", { type: "button", class: "danger" }, "Purge…");
  const queueField = h("select", { id: "letter-queue" }, h("option", { value: "" }, "All queues"));
  const kind = h("select", { id: "letter-kind" }, h("option", { value: "" }, "Not replayed"), h("option", { value: "1" }, "Replayed"));
  const search = h("input", { id: "letter-search", type: "search", "data-search": "", placeholder: "name, id or reason" });
  const list = table("Dead letters", ["Select", "Job", "Why*", "Tries*", "Failed"]);
  const nothing = h("div", null, h("p", { class: "muted" }, "Looking…"));
  const sum = h("p", { class: "muted small status-line", role: "status" });
  const frame = split(nothing, sum, list);
  list.hidden = true;
  const changed = () => {
    text(replayChosen, chosen.size ? `Replay ${plural(chosen.size, "selected dead letter")}…` : "Replay selected");
    set(replayChosen, "disabled", chosen.size === 0);
    all.checked = shown.length > 0 && shown.every((letter) => chosen.has(letter.id));
    all.indeterminate = chosen.size > 0 && !all.checked;
  };
  all.addEventListener("change", () => {
    for (const letter of shown) {
      if (all.checked) chosen.add(letter.id);
      else chosen.delete(letter.id);
    }
    changed();
    draw();
  });
  replayChosen.addEventListener("click", async () => {
    await replaySome([...chosen], "", 0, refresh);
    chosen.clear();
    changed();
  });
  replayAll.addEventListener("click", () => replaySome([], queueField.value, total, refresh));
  purgeOld.addEventListener("click", () => purge(refresh));
  const asked = () => {
    const now = new URLSearchParams(Object.entries({ queue: queueField.value, replayed: kind.value, q: search.value.trim() }).filter(([, value]) => value));
    return now.size ? `?${now}` : "";
  };
  const filtered = () => history.replaceState(null, "", `#/letters${id ? `/${encodeURIComponent(id)}` : ""}${asked()}`);
  for (const field of [queueField, kind]) field.addEventListener("change", () => { filtered(); refresh(); });
  search.addEventListener("input", () => { filtered(); pick(); changed(); });
  kind.value = query.get("replayed") ?? "";
  search.value = query.get("q") ?? "";
  if (query.get("queue")) replace(queueField, h("option", { value: "" }, "All queues"), h("option", { value: query.get("queue") }, query.get("queue")));
  queueField.value = query.get("queue") ?? "";
  replace(tools, replayChosen, replayAll, purgeOld);
  replace(
    body,
    h("form", { class: "filters", role: "search", "aria-label": "Filter dead letters", onsubmit: (event) => event.preventDefault() },
      h("div", null, h("label", { for: "letter-queue" }, "Queue"), queueField),
      h("div", null, h("label", { for: "letter-kind" }, "Which"), kind),
      h("div", null, h("label", { for: "letter-search" }, "Search"), search),
      h("div", { class: "check" }, all, h("label", { for: "letters-all" }, "Select all shown"))),
    frame,
  );
  const draw = () => {
    keyed(list.body, shown, (letter) => letter.id, (letter) => letterRow(letter, chosen, changed), (node, letter) => { node.show(letter); node.classList.toggle("chosen", letter.id === id); });
  };
  const pick = () => {
    const word = search.value.trim().toLowerCase();
    shown = letters.filter((row) => (!queueField.value || row.queue === queueField.value) && (!word || `${row.name} ${row.job_id} ${row.reason}`.toLowerCase().includes(word)));
    replace(nothing, shown.length ? null : letters.length ? empty("No dead letter matches", "Clear the search, or choose another queue.") : kind.value ? empty("Nothing was replayed yet") : empty("No dead letters", "Jobs that fail for good are kept here with their reason, until somebody replays or purges them. Nothing to do."));
    list.hidden = shown.length === 0;
    draw();
  };
  const open = () => frame.open(id ? detail(id, refresh) : null);
  open();
  return {
    navigate: (next) => {
      if (next[0] === id) return;
      id = next[0];
      open();
    },
    event: ({ name }) => { if (name === "failed" || name === "gap") refresh(); },
    failed: (error) => replace(nothing, h("p", { class: "note tone-bad", role: "alert" }, error.message)),
    refresh: async () => {
      const wanted = new URLSearchParams({ limit: "200" });
      if (kind.value) wanted.set("replayed", "true");
      if (queueField.value) wanted.set("queue", queueField.value);
      const one = id;
      const [answer, letter] = await Promise.all([
        admin(`/admin/dead-letters?${wanted}`),
        one ? admin(`/admin/dead-letters/${encodeURIComponent(one)}`).catch((error) => { if (error.status === 404) return null; throw error; }) : null,
      ]);
      letters = answer.dead_letters;
      total = answer.total;
      text(replayAll, total ? `Replay all ${count(total)}…` : "Replay all…");
      text(sum, letters.length < total ? `The newest ${count(letters.length)} of ${plural(total, "dead letter")}. Choose a queue to see others.` : letters.length ? plural(total, "dead letter") : "");
      const names = [...new Set(letters.map((row) => row.queue))].sort();
      if (queueField.value && !names.includes(queueField.value)) names.push(queueField.value);
      if ([...queueField.options].slice(1).map((option) => option.value).join() !== names.join()) {
        const before = queueField.value;
        replace(queueField, h("option", { value: "" }, "All queues"), names.map((name) => h("option", { value: name }, name)));
        queueField.value = before;
      }
      for (const gone of [...chosen].filter((key) => !letters.some((row) => row.id === key))) chosen.delete(gone);
      pick();
      set(replayAll, "disabled", Boolean(kind.value) || letters.length === 0);
      changed();
      if (one && one === id) {
        const card = frame.lastElementChild.firstElementChild;
        if (letter) card.show(letter);
        else replace(card, empty("There is no such dead letter", h("a", { href: "#/letters" }, "Close")));
      }
    },
  };
}

export const letters = { id: "letters", title: "Dead letters", icon: "letters", admin: true, badge: "letters", about: "Jobs that failed for good. Repair the cause, then replay them.", mount };
