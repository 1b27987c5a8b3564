// Elements from data. Text only ever becomes a text node, so a document named <img onerror=…> is just a name.
import { admin } from "./api.js";
import { count, plural } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

/** h("button", {class: "quiet", onclick: run, "aria-label": "Close"}, "×") */
export function h(tag, props, ...children) {
  const node = document.createElement(tag);
  if (tag === "button") node.type = "button"; // not one that sends a form, unless props say so
  return build(node, props, children);
}

/** The same for SVG. */
export function s(tag, props, ...children) {
  return build(document.createElementNS(SVG, tag), props, children);
}

function build(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) set(node, name, value);
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function set(node, name, value) {
  if (name === "class") node.setAttribute("class", value);
  else if (name.startsWith("on") && typeof value === "function") node.addEventListener(name.slice(2), value);
  else if (name === "value" || name === "checked" || name === "disabled" || name === "hidden") node[name] = value;
  else if (value === false || value === null || value === undefined) node.removeAttribute(name);
  else {
    const wanted = value === true ? "" : String(value);
    if (node.getAttribute(name) !== wanted) node.setAttribute(name, wanted);
  }
}

/** Change text only when it differs: an untouched node keeps selection and is not announced again. */
export function text(node, value) {
  const wanted = String(value ?? "");
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Bring the children of `parent` in line with `items`, reusing nodes by key: focus and selection stay. */
export function keyed(parent, items, keyOf, make, update) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let node = old.get(key);
    if (node) old.delete(key);
    else {
      node = make(item);
      node.dataset.key = key;
    }
    update?.(node, item);
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
  }
  for (const node of old.values()) node.remove();
}

export function replace(parent, ...children) {
  parent.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
}

const ICONS = {
  overview: "M3 13V8m4 5V4m4 9V6",
  documents: "M4 2.5h5l3 3v8H4zM9 2.5v3h3",
  jobs: "M3 4h10M3 8h10M3 12h6",
  letters: "M2.5 4.5h11v7h-11zM2.5 5l5.5 4 5.5-4",
  sagas: "M4 4h5a3 3 0 0 1 0 6H5m2-2-2 2 2 2",
  outbox: "M2.5 9v4h11V9M8 10V2.5M5 5.5l3-3 3 3",
  breakers: "M8 2v5M4.7 4.4a5 5 0 1 0 6.6 0",
  events: "M2 8h3l2-4.5 2.5 9L11.5 8H14",
  workers: "M8 8a2.500 2.500 0 1 0-.01 0M3 13.500a5 5 0 0 1 10 0",
  schedules: "M3 4h10v9H3zM3 7h10M6 2.500v3M10 2.500v3",
  done: "M3 8.5l3.2 3L13 4.5",
  run: "M5 3.500l7.5 4.5-7.5 4.500z",
  wait: "M8 4.500V8l2.5 1.500M8 2a6 6 0 1 0 .01 0",
  fail: "M4 4l8 8M12 4l-8 8",
  warn: "M8 2.500l6 11H2zM8 6.500v3.200M8 11.600v.2",
  back: "M6 4L2.5 7.5 6 11M3 7.500h6.500a3 3 0 0 1 0 6",
  none: "M4 8h8",
  pause: "M6 4v8M10 4v8",
};

export function icon(name) {
  return s(
    "svg",
    { class: "icon", viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true", focusable: "false" },
    s("path", { d: ICONS[name] ?? ICONS.none }),
  );
}

// tone: colour, icon: shape, and the word itself: three signals, so colour is never the only one.
const STATES = {
  completed: ["ok", "done"],
  done: ["ok", "done"],
  closed: ["ok", "done"],
  ready: ["ok", "done"],
  published: ["ok", "done"],
  replayed: ["ok", "done"],
  active: ["run", "run"],
  running: ["run", "run"],
  started: ["run", "run"],
  failed: ["bad", "fail"],
  dead: ["bad", "fail"],
  rejected: ["bad", "fail"],
  needs_repair: ["bad", "warn"],
  open: ["bad", "fail"],
  quarantined: ["bad", "warn"],
  "half-open": ["warn", "warn"],
  delayed: ["warn", "wait"],
  compensating: ["warn", "back"],
  undoing: ["warn", "back"],
  paused: ["warn", "pause"],
  unattended: ["bad", "warn"],
  overdue: ["bad", "warn"],
  idle: ["idle", "none"],
  compensated: ["idle", "back"],
  undone: ["idle", "back"],
  cancelled: ["idle", "none"],
};
const NAMES = { needs_repair: "needs repair", "waiting-children": "waits its turn", wait: "waiting", dead: "dead letter", unattended: "nobody is working", prioritized: "waiting, prioritized" };

export function tone(state) {
  return (STATES[state] ?? ["idle", "wait"])[0];
}

export function stateName(state) {
  return NAMES[state] ?? String(state ?? "unknown");
}

export function pill(state) {
  const node = h("span", { class: "pill" });
  setPill(node, state);
  return node;
}

export function setPill(node, state) {
  if (node.dataset.state === String(state)) return;
  const [colour, shape] = STATES[state] ?? ["idle", "wait"];
  node.dataset.state = String(state);
  node.setAttribute("class", `pill tone-${colour}`);
  replace(node, icon(shape), stateName(state));
}

/** A progress bar with its number beside it. */
export function bar(label) {
  const fill = h("span", { class: "bar-fill" });
  const track = h("span", { class: "bar", role: "progressbar", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100 }, fill);
  const number = h("span", { class: "bar-number" });
  const node = h("span", { class: "bar-line" }, track, number);
  node.show = (percent, state) => {
    const value = Math.max(0, Math.min(100, Number(percent) || 0));
    set(track, "aria-valuenow", Math.round(value));
    set(track, "aria-valuetext", `${Math.round(value)} %, ${stateName(state)}`);
    fill.style.setProperty("inline-size", `${value}%`); // the object model: a style attribute is refused by the policy
    set(fill, "class", `bar-fill tone-${tone(state)}`);
    text(number, `${Math.round(value)} %`);
  };
  return node;
}

/** A table that stays one for assistive technology when the stylesheet lays its rows out as cards on a phone. */
/** Columns whose name ends with * make room when a detail is open beside the table. */
export function table(caption, columns) {
  const body = h("tbody", { role: "rowgroup" });
  const head = h("tr", { role: "row" }, columns.map((name) => h("th", { role: "columnheader", scope: "col", class: name.endsWith("*") ? "extra" : "" }, name.replace("*", ""))));
  const node = h("table", { class: "rows", role: "table" }, h("caption", { class: "hidden-text" }, caption), h("thead", { role: "rowgroup" }, head), body);
  node.body = body;
  return node;
}

export function cell(label, ...children) {
  return h("td", { role: "cell", class: label.endsWith("*") ? "extra" : "", "data-label": label.replace("*", "") }, ...children);
}

/** A list and one detail beside it. On a narrow screen the detail replaces the list, which keeps its place. */
export function split(...list) {
  const side = h("div", { class: "side-detail", hidden: true });
  const node = h("div", { class: "split" }, h("div", null, ...list), side);
  let before = 0;
  node.open = (card) => {
    const narrow = matchMedia("(max-width: 1179px)").matches;
    const was = !side.hidden;
    if (narrow && card && !was) before = scrollY;
    replace(side, card);
    side.hidden = !card;
    node.classList.toggle("with-detail", Boolean(card));
    if (narrow && card) side.scrollIntoView({ block: "start" });
    else if (narrow && was) scrollTo(0, before);
  };
  return node;
}

/** The row that is open beside the list, as the address says. `make(id)`: its card; `where(id)`: its endpoint. */
export function opened(frame, name, make, where, back) {
  let id;
  return {
    get id() {
      return id;
    },
    open(next) {
      if (next === id) return;
      id = next;
      frame.open(id ? make(id) : null);
    },
    async refresh() {
      const asked = id;
      if (!asked) return;
      const found = await admin(where(asked)).catch((error) => { if (error.status === 404) return null; throw error; });
      if (asked !== id) return;
      const card = frame.lastElementChild.firstElementChild;
      if (found) card.show(found);
      else replace(card, empty(`There is no such ${name}`, h("a", { href: back() }, "Close")));
    },
  };
}

/** "51–100 of 5,000 jobs", and links to the pages next to it. */
export function pager(label, size, go, ...more) {
  let now = 0;
  const shown = h("p", { class: "number", role: "status" });
  const [before, after] = [["Previous page", -1], ["Next page", 1]].map(([name, by]) => h("button", { class: "small-button", onclick: () => go(now + by) }, name));
  const node = h("nav", { class: "pager", "aria-label": label }, shown, before, after, more);
  node.show = (page, rows, total, one, instead) => {
    now = page;
    text(shown, instead ?? (rows ? `${count(page * size + 1)}–${count(page * size + rows)} of ${plural(total, one)}` : ""));
    set(before, "hidden", Boolean(instead) || page === 0);
    set(after, "hidden", Boolean(instead) || (page + 1) * size >= total);
  };
  return node;
}

/** Do it, show the result, and refresh. */
export async function attempt(work, refresh) {
  try {
    const said = await work();
    if (said) toast(said);
  } catch (error) {
    toast(error.message, "bad");
  }
  refresh();
}

/** Poll what the server does in the background until it ends. */
export async function follow(href, refresh) {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, 400));
    const now = await admin(href);
    refresh();
    if (now.state !== "running") return now;
  }
}

/** Text as it is, wrapped, with a button that copies it. */
export function block(label, part) {
  const pre = h("pre", { class: "payload", tabindex: 0, role: "region", "aria-label": label, "data-part": part });
  const copy = h("button", { class: "quiet small-button copy" }, "Copy", h("span", { class: "hidden-text" }, ` ${label}`));
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(pre.textContent);
    } catch {
      // Not https and not this machine: the clipboard is closed to scripts, a selection is not.
      getSelection().selectAllChildren(pre);
      if (!document.execCommand("copy")) return toast("Selected: press Ctrl+C.");
    }
    return toast("Copied.");
  });
  const node = h("div", { class: "block" }, pre, copy);
  node.show = (value) => text(pre, value);
  return node;
}

/** Nothing to show: say what to do about it. */
export function empty(title, ...lines) {
  return h("div", { class: "empty" }, h("p", { class: "empty-title" }, title), lines.map((line) => (line instanceof Node ? line : h("p", null, line))));
}

/** A note for each queue that the server could not read. */
export function unread(queues = {}) {
  return Object.entries(queues).map(([queue, why]) => h("p", { class: "note tone-warn" }, `${queue} cannot be read: ${why}.`));
}

export function toast(message, kind = "ok") {
  const node = h("div", { class: `toast tone-${kind}` }, icon(kind === "bad" ? "warn" : "done"), h("span", null, message));
  const toasts = document.getElementById("toasts");
  toasts.append(node);
  while (toasts.children.length > 3) toasts.firstElementChild.remove();
  setTimeout(() => node.remove(), kind === "bad" ? 9000 : 4500);
}

/** A modal that returns focus. `fill(close)` returns the content. Resolves with what `close` was given. */
export function modal(title, fill) {
  return new Promise((resolve) => {
    const before = document.activeElement;
    let answer;
    const close = (value) => {
      answer = value;
      dialog.close();
    };
    const heading = h("h2", { id: "dialog-title" }, title);
    const dialog = h("dialog", { class: "dialog", "aria-labelledby": "dialog-title" });
    dialog.append(heading, ...[fill(close)].flat());
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (before?.isConnected) before.focus();
      resolve(answer);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** A plain question. */
export function confirmAction(title, warning, action, keep = "Cancel") {
  return modal(title, (close) => [
    h("div", { class: "stack" }, h("p", null, warning)),
    h("div", { class: "actions" }, h("button", { autofocus: true, onclick: () => close(false) }, keep), h("button", { class: "danger", onclick: () => close(true) }, action)),
  ]);
}

/** Ask before something that cannot be undone: the word must be typed. */
export function confirmByWord(title, warning, word, action) {
  return modal(title, (close) => {
    const field = h("input", { id: "confirm-word", autocomplete: "off", spellcheck: "false" });
    const go = h("button", { type: "submit", class: "danger", disabled: true }, action);
    field.addEventListener("input", () => set(go, "disabled", field.value.trim() !== word));
    const form = h(
      "form",
      { method: "dialog", onsubmit: (event) => { event.preventDefault(); if (!go.disabled) close(true); } },
      h("p", null, warning),
      h("label", { for: "confirm-word" }, `Type “${word}” to go on`),
      field,
      h("div", { class: "actions" }, h("button", { onclick: () => close(false) }, "Keep them"), go),
    );
    return form;
  });
}
