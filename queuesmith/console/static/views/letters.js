import { admin, path } from "../api.js";
import { attempt, block, cell, confirmByWord, empty, follow, h, icon, keyed, modal, opened, pager, pill, replace, set, split, table, text, toast } from "../dom.js";
import { ago, count, full, plural, short } from "../format.js";

const SIZE = 50;

function letterRow(letter, chosen, changed, address) {
  const box = h("input", { type: "checkbox", "aria-label": `Select ${letter.name} ${letter.job_id}` });
  box.addEventListener("change", () => {
    if (box.checked) chosen.add(letter.id);
    else chosen.delete(letter.id);
    changed();
  });
  const age = h("time");
  const link = h("a", { class: "title" }, letter.name || "(no name)");
  const node = h(
    "tr",
    { role: "row" },
    cell("Select", box),
    cell("Job", h("div", null, link, h("div", { class: "small muted mono" }, `${letter.queue} / ${short(letter.job_id)}`))),
    cell("Why*", h("div", null, h("span", { class: "pill tone-bad" }, icon("warn"), letter.cause), h("div", { class: "small" }, letter.reason))),
    cell("Tries*", h("span", { class: "number" }, letter.attempts_made)),
    cell("Failed", age),
  );
  node.show = (one) => {
    box.checked = chosen.has(one.id);
    set(link, "href", address({ id: one.id }));
    text(age, ago(one.failed_at));
    set(age, "title", full(one.failed_at));
  };
  return node;
}

async function replayOne(id, refresh) {
  await attempt(async () => {
    await admin(path("/admin/dead-letters", id, "replay"), { method: "POST", json: {} });
    return "Replayed: the job is back in its queue, under its own id.";
  }, refresh);
}

async function replaySome(ids, queue, total, refresh) {
  const rate = h("input", { id: "replay-rate", type: "number", min: 0.1, max: 100, step: 0.1, value: 5, required: true });
  const what = ids.length ? plural(ids.length, "dead letter") : `all ${plural(total, "dead letter")}${queue ? ` of ${queue}` : ""}`;
  const perSecond = await modal(`Replay ${what}`, (close) =>
    h(
      "form",
      { onsubmit: (event) => { event.preventDefault(); close(Number(rate.value)); } },
      h("p", null, "Each job goes back to its queue under its own id; what it already did is not done again. The limit keeps a burst from hurting what made them fail."),
      h("label", { for: "replay-rate" }, "At most this many per second"),
      rate,
      h("div", { class: "actions" }, h("button", { onclick: () => close(null) }, "Not now"), h("button", { type: "submit", class: "primary" }, "Replay")),
    ),
  );
  if (!perSecond) return;
  attempt(async () => {
    const json = { ids, every: ids.length === 0, queue: queue || null, per_second: perSecond };
    const { href } = await admin("/admin/dead-letters/replay", { method: "POST", json });
    toast(`Replaying, at most ${perSecond} per second.`);
    const now = await follow(href, refresh);
    const refused = Object.values(now.refused);
    if (refused.length) toast(`${plural(refused.length, "dead letter")} could not be replayed: ${refused[0]}`, "bad");
    if (now.state !== "done") toast(now.state, "bad");
    return now.replayed.length && `${plural(now.replayed.length, "dead letter")} replayed.`;
  }, refresh);
}

async function purge(refresh) {
  const days = h("input", { id: "purge-days", type: "number", min: 0, max: 3650, value: 30, required: true });
  const chosen = await modal("Purge old dead letters", (close) =>
    h(
      "form",
      { onsubmit: (event) => { event.preventDefault(); close(Number(days.value)); } },
      h("label", { for: "purge-days" }, "Older than so many days (0: all of them)"),
      days,
      h("div", { class: "actions" }, h("button", { onclick: () => close(null) }, "Not now"), h("button", { type: "submit", class: "danger" }, "Go on")),
    ),
  );
  if (chosen === null || chosen === undefined) return;
  const warning = `Letters archived more than ${plural(chosen, "day")} ago are deleted, replayed or not. They cannot be replayed afterwards.`;
  if (!(await confirmByWord("Delete them for good?", warning, "purge", "Purge"))) return;
  await attempt(async () => {
    const done = await admin("/admin/dead-letters/purge", { method: "POST", json: { older_than_days: chosen, confirm: "purge" } });
    return `${plural(done.purged ?? 0, "dead letter")} purged.`;
  }, refresh);
}

function detail(id, refresh, back) {
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
      h("div", { class: "card-head card-foot" }, h("a", { href: back() }, "Close"), letter.replayed_at ? null : h("button", { class: "primary small-button", onclick: () => replayOne(id, refresh) }, "Replay this one")),
    );
  };
  return node;
}

function mount({ body, tools, params, query, refresh }) {
  const chosen = new Set();
  let wanted = {};
  let shown = [];
  let total = 0;
  const all = h("input", { type: "checkbox", id: "letters-all" });
  const replayChosen = h("button", { class: "primary", disabled: true }, "Replay selected");
  const replayAll = h("button", null, "Replay all…");
  const purgeOld = h("button", { class: "danger" }, "Purge…");
  const queueField = h("select", { id: "letter-queue" });
  const kind = h("select", { id: "letter-kind" }, h("option", { value: "" }, "Not replayed"), h("option", { value: "1" }, "Replayed"));
  const search = h("input", { id: "letter-search", type: "search", "data-search": "", placeholder: "name, id or reason" });
  const list = table("Dead letters", ["Select", "Job", "Why*", "Tries*", "Failed"]);
  const nothing = h("div", null, h("p", { class: "muted" }, "Looking…"));
  const address = (changes) => {
    const { id, ...rest } = { ...wanted, id: one.id, ...changes };
    const asked = new URLSearchParams(Object.entries(rest).filter(([, value]) => value));
    return `${["#/letters", ...(id ? [encodeURIComponent(id)] : [])].join("/")}${asked.size ? `?${asked}` : ""}`;
  };
  const go = (changes) => { location.hash = address({ page: 0, id: "", ...changes }); };
  const pages = pager("Pages of dead letters", SIZE, (page) => go({ page }));
  const frame = split(nothing, list, pages);
  const back = () => address({ id: "" });
  const one = opened(frame, "dead letter", (id) => detail(id, refresh, back), (id) => path("/admin/dead-letters", id), back);
  list.hidden = true;
  const changed = () => {
    text(replayChosen, chosen.size ? `Replay ${plural(chosen.size, "selected dead letter")}…` : "Replay selected");
    set(replayChosen, "disabled", chosen.size === 0);
    all.checked = shown.length > 0 && shown.every((letter) => chosen.has(letter.id));
    all.indeterminate = chosen.size > 0 && !all.checked;
  };
  const draw = () => keyed(list.body, shown, (letter) => letter.id, (letter) => letterRow(letter, chosen, changed, address), (node, letter) => { node.show(letter); node.classList.toggle("chosen", letter.id === one.id); });
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
  replayAll.addEventListener("click", () => replaySome([], wanted.queue, total, refresh));
  purgeOld.addEventListener("click", () => purge(refresh));
  queueField.addEventListener("change", () => go({ queue: queueField.value }));
  kind.addEventListener("change", () => go({ replayed: kind.value }));
  let typing = null;
  search.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      wanted = { ...wanted, q: search.value.trim(), page: 0 };
      history.replaceState(null, "", address({})); // no history entry for every letter
      refresh();
    }, 300);
  });
  const fill = (names) => {
    if (wanted.queue && !names.includes(wanted.queue)) names.push(wanted.queue);
    if ([...queueField.options].slice(1).map((option) => option.value).join() !== names.join() || !queueField.options.length) replace(queueField, h("option", { value: "" }, "All queues"), names.map((name) => h("option", { value: name }, name)));
    if (document.activeElement !== queueField) queueField.value = wanted.queue;
  };
  const navigate = ([id], asked) => {
    wanted = { queue: asked.get("queue") ?? "", replayed: asked.get("replayed") ?? "", q: asked.get("q") ?? "", page: Math.max(0, Number(asked.get("page")) || 0) };
    kind.value = wanted.replayed;
    if (document.activeElement !== search) search.value = wanted.q;
    one.open(id);
  };
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
  navigate(params, query);
  fill([]);
  return {
    navigate,
    unmount: () => clearTimeout(typing),
    event: ({ name }) => { if (name === "failed" || name === "gap") refresh(); },
    failed: (error) => replace(nothing, h("p", { class: "note tone-bad", role: "alert" }, error.message)),
    refresh: async () => {
      const now = wanted;
      const asked = new URLSearchParams(Object.entries({ ...now, size: SIZE }).filter(([, value]) => value));
      const [answer] = await Promise.all([admin(`/admin/dead-letters?${asked}`), one.refresh()]);
      if (now !== wanted) return;
      shown = answer.dead_letters;
      total = answer.total;
      fill(answer.queues);
      for (const gone of [...chosen].filter((key) => !shown.some((row) => row.id === key))) chosen.delete(gone);
      const filtered = now.queue || now.q;
      replace(nothing, shown.length ? null : now.page ? empty("This page is empty", "Dead letters were replayed or purged since.") : filtered ? empty("No dead letter matches", "Clear the search, or choose another queue.") : now.replayed ? empty("Nothing was replayed yet") : empty("No dead letters", "Jobs that fail for good are kept here with their reason, until somebody replays or purges them. Nothing to do."));
      list.hidden = shown.length === 0;
      pages.show(now.page, shown.length, total, "dead letter");
      text(replayAll, total && !now.q ? `Replay all ${count(total)}…` : "Replay all…");
      set(replayAll, "disabled", Boolean(now.replayed || now.q) || total === 0);
      draw();
      changed();
    },
  };
}

export const letters = { id: "letters", title: "Dead letters", icon: "letters", admin: true, badge: "letters", about: "Jobs that failed for good. Repair the cause, then replay them.", mount };
