import { admin, path } from "../api.js";
import { attempt, cell, empty, h, icon, keyed, modal, opened, pill, replace, set, setPill, split, stateName, table, text, tone } from "../dom.js";
import { ago, clock, full } from "../format.js";

const STATES = ["needs_repair", "running", "compensating", "completed", "compensated"];

function sagaRow(saga) {
  const state = pill(saga.state);
  const why = h("div", { class: "small muted" });
  const age = h("time");
  const node = h("tr", { role: "row" }, cell("Saga", h("div", null, h("a", { class: "title", href: `#/sagas/${encodeURIComponent(saga.id)}` }, saga.name), h("div", { class: "small muted mono" }, saga.id))), cell("State", state), cell("Why*", why), cell("Changed*", age));
  node.show = (one) => {
    setPill(state, one.state);
    text(why, one.error || "–");
    text(age, ago(one.updated_at));
    set(age, "title", full(one.updated_at));
  };
  return node;
}

async function repair(saga, refresh) {
  const backward = saga.backward;
  const open = saga.steps.filter((step) => (backward ? step.state !== "undone" && step.state !== "pending" : step.state !== "done"));
  const what = h(
    "select",
    { id: "repair-what" },
    h("option", { value: "retry" }, "Try the stuck step again"),
    open.map((step) => h("option", { value: `mark:${step.name}` }, `“${step.name}” was ${backward ? "undone" : "done"} by hand`)),
    backward ? null : h("option", { value: "compensate" }, "Stop, and take back what was done"),
  );
  const note = h("textarea", { id: "repair-note", rows: 3, required: true, maxlength: 1000 });
  const by = h("input", { id: "repair-by", autocomplete: "name", required: true, maxlength: 100 });
  const wanted = await modal("Repair this saga", (close) =>
    h(
      "form",
      { onsubmit: (event) => { event.preventDefault(); close({ what: what.value, note: note.value.trim(), by: by.value.trim() }); } },
      h("p", { class: "small muted" }, "Recorded in its timeline with your name. Nobody checks what you say here: the note is the evidence."),
      h("label", { for: "repair-what" }, "What should happen"),
      what,
      h("label", { for: "repair-by" }, "Your name"),
      by,
      h("label", { for: "repair-note" }, "What you found, and what you did about it"),
      note,
      h("div", { class: "actions" }, h("button", { onclick: () => close(null) }, "Not now"), h("button", { type: "submit", class: "primary" }, "Repair")),
    ),
  );
  if (!wanted) return;
  const [action, step] = wanted.what.split(/:(.*)/s);
  const json = { action, note: wanted.note, by: wanted.by };
  if (action === "mark") Object.assign(json, { step, outcome: backward ? "undone" : "done" });
  await attempt(async () => {
    await admin(path("/admin/sagas", saga.id, "repair"), { method: "POST", json });
    return "Noted: the next runner goes on from here.";
  }, refresh);
}

function stepItem(step) {
  const state = pill(step.state);
  const name = h("span", null, step.name);
  const tries = h("span", { class: "small muted number" });
  const node = h("li", null, name, state, tries);
  node.show = (one) => {
    setPill(state, one.state);
    const all = (one.attempts ?? 0) + (one.undo_attempts ?? 0);
    text(tries, all > 1 ? `${all} tries` : "");
  };
  return node;
}

function historyItem(entry) {
  const words = entry.event.replace("repair: ", "");
  const colour = entry.event.startsWith("repair") ? "warn" : tone(words);
  return h(
    "li",
    { class: `tone-${colour}` },
    icon({ ok: "done", bad: "fail", run: "run", warn: "back" }[colour] ?? "none"),
    h("div", { class: "timeline-head" }, h("strong", null, [entry.step, entry.event].filter(Boolean).join(": ")), h("time", null, `${clock(entry.at)} by ${entry.actor}`)),
    entry.detail ? h("p", { class: "small" }, entry.detail) : null,
  );
}

function detail(id, refresh) {
  const title = h("h2", null, "Looking…");
  const state = pill("running");
  const trouble = h("p", { class: "note tone-bad", hidden: true });
  const facts = h("p", { class: "small muted mono" });
  const steps = h("ol", { class: "steps", "aria-label": "Steps" });
  const timeline = h("ol", { class: "timeline", "aria-label": "Timeline" });
  const fix = h("button", { class: "primary small-button", hidden: true }, "Repair…");
  let now = null;
  fix.addEventListener("click", () => repair(now, refresh));
  const node = h("section", { class: "card detail", "aria-label": "Saga" }, h("div", { class: "card-head" }, title, state), facts, trouble, h("h3", null, "Steps"), steps, h("h3", null, "Timeline"), timeline, h("div", { class: "card-head card-foot" }, h("a", { href: "#/sagas" }, "Close"), fix));
  node.show = (saga) => {
    now = saga;
    text(title, saga.name);
    setPill(state, saga.state);
    text(facts, `${saga.id} · ${saga.backward ? "taking back" : "going forward"} · ${stateName(saga.state)}`);
    text(trouble, saga.error ?? "");
    trouble.hidden = !saga.error;
    fix.hidden = saga.state === "completed" || saga.state === "compensated";
    keyed(steps, saga.steps ?? [], (step) => step.name, stepItem, (one, step) => one.show(step));
    keyed(timeline, (saga.history ?? []).map((entry, index) => ({ ...entry, index })), (entry) => entry.index, historyItem);
  };
  return node;
}

function mount({ body, params, query, refresh }) {
  const stateField = h("select", { id: "saga-state", "data-search": "" }, h("option", { value: "" }, "All states"), STATES.map((state) => h("option", { value: state }, stateName(state))));
  const list = table("Sagas", ["Saga", "State", "Why*", "Changed*"]);
  const nothing = h("div", null, h("p", { class: "muted" }, "Looking…"));
  const frame = split(nothing, list);
  list.hidden = true;
  stateField.value = query.get("state") ?? "";
  stateField.addEventListener("change", () => {
    history.replaceState(null, "", `${location.hash.split("?")[0]}${stateField.value && `?state=${stateField.value}`}`);
    refresh();
  });
  replace(body, h("form", { class: "filters", onsubmit: (event) => event.preventDefault() }, h("div", null, h("label", { for: "saga-state" }, "State"), stateField)), frame);
  const one = opened(frame, "saga", (id) => detail(id, refresh), (id) => path("/admin/sagas", id), () => "#/sagas");
  one.open(params[0]);
  return {
    navigate: ([id]) => one.open(id),
    failed: (error) => replace(nothing, h("p", { class: "note tone-bad", role: "alert" }, error.message)),
    refresh: async () => {
      const wanted = new URLSearchParams({ limit: "100" });
      if (stateField.value) wanted.set("state", stateField.value);
      const [sagas] = await Promise.all([admin(`/admin/sagas?${wanted}`), one.refresh()]);
      replace(nothing, sagas.length ? null : stateField.value ? empty(`No saga is ${stateName(stateField.value)}`, "Choose another state to see the others.") : empty("No sagas yet", "Work across several systems appears here step by step, with what was taken back."));
      list.hidden = sagas.length === 0;
      keyed(list.body, sagas, (row) => row.id, sagaRow, (node, row) => { node.show(row); node.classList.toggle("chosen", row.id === one.id); });
    },
  };
}

export const sagas = { id: "sagas", title: "Sagas", icon: "sagas", admin: true, about: "Orders across several systems: each step, what was taken back, and what waits for a person.", mount };
