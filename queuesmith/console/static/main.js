// The frame: which view is shown, keys, theme, token, and the line to the server.
import { access, address, admin, forget, get, offer, onAccess, recheck, token } from "./api.js";
import { empty, h, icon, modal, replace, set, text, toast } from "./dom.js";
import { count, zone } from "./format.js";
import { Live } from "./live.js";
import { queues } from "./queues.js";
import { events } from "./views/events.js";
import { jobs } from "./views/jobs.js";
import { letters } from "./views/letters.js";
import { outbox } from "./views/outbox.js";
import { overview } from "./views/overview.js";
import { sagas } from "./views/sagas.js";
import { schedules } from "./views/schedules.js";
import { workers } from "./views/workers.js";

let VIEWS = [overview, jobs, workers, schedules, letters, sagas, outbox, events];
let about = { name: "", token: "" };
const EVERY = { live: 4000, connecting: 2500, polling: 2500, offline: 2500 };
const DARK = matchMedia("(prefers-color-scheme: dark)");
const AT_MOST_EVERY = 600; // however many events arrive

const main = document.getElementById("main");
const live = new Live();
let shown = { view: null, handle: null, route: "" };
let refreshing = false;
let again = false;
let refreshedAt = 0;
let due = null;

// ---- views

function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [id, ...rest] = path.split("/");
  const view = VIEWS.find((one) => one.id === id) ?? VIEWS[0];
  return { view, params: rest.map(decodeURIComponent), query: new URLSearchParams(query) };
}

function show({ focus = true } = {}) {
  const { view, params, query } = route();
  const gated = view.admin && access.state !== "accepted";
  const now = `${view.id}${gated ? ` gate ${access.state} ${access.detail}` : ""}`;
  if (shown.route === now && shown.handle?.navigate) {
    shown.handle.navigate(params, query);
    refresh();
    return;
  }
  shown.handle?.unmount?.();
  const changed = shown.view !== view;
  document.title = `${view.title} · ${about.name} console`;
  for (const link of document.querySelectorAll("#nav a")) set(link, "aria-current", link.dataset.view === view.id ? "page" : null);
  const heading = h("h1", { tabindex: -1 }, view.title);
  const tools = h("div", { class: "view-tools" });
  const body = h("div", { class: "view-body" });
  replace(main, h("div", { class: "view-head" }, h("div", null, heading, h("p", null, view.about)), tools), body);
  shown = { view, route: now, handle: gated ? gate(body) : view.mount({ body, tools, params, query, live, about, refresh: refreshSoon }) };
  if (changed) scrollTo(0, 0);
  document.querySelector("#nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" }); // a phone shows only some
  if (focus && changed) heading.focus({ preventScroll: true });
  refresh();
}

function gate(body) {
  const ask = h("button", { class: "primary", onclick: openToken }, "Enter the admin token");
  const said = {
    none: ["This view needs the admin token", `It is ${about.token}.`],
    refused: ["The token was refused", `It is not ${about.token}. Enter it again.`],
    off: ["The admin part is switched off", `Start it with ${about.token} set to a long random value, then enter it here.`],
    checking: ["Checking the token…", ""],
  }[access.state] ?? ["This view needs the admin token", ""];
  body.append(empty(said[0], said[1], access.state === "checking" ? null : ask));
  // A token that could not be checked, or a server without one, may be fine after its next restart.
  return { refresh: async () => { if (token()) await admin("/admin/session"); } };
}

async function refresh() {
  clearTimeout(due);
  due = null;
  if (refreshing) {
    again = true; // what was asked for meanwhile must not wait for the next turn
    return;
  }
  refreshing = true;
  again = false;
  const { handle } = shown;
  try {
    if (handle?.refresh && !document.hidden) {
      await handle.refresh();
      live.polled(true);
    }
  } catch (error) {
    if (error.status === 0) live.polled(false);
    else if (error.status === undefined) console.error(error);
    else if (![401, 403].includes(error.status)) handle?.failed?.(error);
  } finally {
    refreshing = false;
    refreshedAt = Date.now();
    due ??= setTimeout(refresh, again ? 30 : EVERY[live.state]);
  }
}

function refreshSoon() {
  const wait = Math.max(80, refreshedAt + AT_MOST_EVERY - Date.now());
  clearTimeout(due);
  due = setTimeout(refresh, wait);
}

function drawNav() {
  const links = VIEWS.map((view, index) =>
    h(
      "li",
      null,
      h(
        "a",
        { href: `#/${view.id}`, "data-view": view.id, "aria-keyshortcuts": index + 1 },
        icon(view.icon),
        h("span", null, view.title),
        view.badge ? h("span", { class: "badge", "data-badge": view.badge, hidden: true }) : null,
      ),
    ),
  );
  replace(document.getElementById("nav"), h("ul", null, links));
}

queues.addEventListener("sample", () => {
  for (const badge of document.querySelectorAll("[data-badge]")) {
    const number = queues.totals[badge.dataset.badge] ?? 0;
    set(badge, "hidden", number === 0);
    replace(badge, count(number), h("span", { class: "hidden-text" }, " waiting for you"));
  }
});

// ---- the token

async function openToken() {
  await modal("Admin token", (close) => {
    const field = h("input", { type: "password", id: "token-field", autocomplete: "off", spellcheck: "false", "aria-describedby": "token-note" });
    const note = h("p", { id: "token-note", class: "small muted" }, "Kept in this tab only and sent as a header, never in an address.");
    const result = h("p", { role: "alert", class: "note tone-bad", hidden: true });
    const go = h("button", { type: "submit", class: "primary" }, "Use this token");
    const leave = token() ? h("button", { onclick: () => { forget(); close(); toast("The token is forgotten."); } }, "Forget it") : null;
    const submit = async (event) => {
      event.preventDefault();
      const value = field.value.trim();
      if (!value || go.disabled) return;
      set(go, "disabled", true);
      const taken = await offer(value);
      set(go, "disabled", false);
      if (taken) {
        close();
        toast("Token accepted.");
        live.renew();
        return;
      }
      text(result, `${access.state === "refused" ? "Token refused. " : ""}${access.detail}`);
      set(result, "hidden", false);
      field.select();
    };
    return h(
      "form",
      { onsubmit: submit },
      h("label", { for: "token-field" }, `Token: ${about.token}`),
      field,
      note,
      result,
      h("div", { class: "actions" }, leave, h("button", { onclick: () => close() }, "Cancel"), go),
    );
  });
}

function accessChanged() {
  const words = { none: "Enter admin token", checking: "Checking token…", accepted: "Admin: accepted", refused: "Admin: refused", off: "Admin: off" };
  text(document.getElementById("token-label"), words[access.state]);
  if (access.state === "accepted") queues.start();
  else if (access.state !== "checking") queues.stop();
  if (access.state !== "checking" || !document.querySelector("dialog")) show({ focus: false });
}

// ---- theme

function openTheme() {
  const next = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("queuesmith.theme", next);
  } catch {
    // Storage is switched off: the choice lasts as long as the page.
  }
  themeLabel();
}

function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : DARK.matches;
}

function themeLabel() {
  text(document.getElementById("toggle-theme"), isDark() ? "Light theme" : "Dark theme");
}

// ---- keys. One letter each, so they can be switched off (some people speak to their browser).

const keys = () => [
  ...VIEWS.slice(0, 9).map((view, index) => [String(index + 1), view.title, () => (location.hash = `#/${view.id}`)]),
  ["/", "Search in this view", () => main.querySelector("[data-search]")?.focus()],
  ...VIEWS.flatMap((view) => view.keys ?? []),
  ["r", "Refresh now", () => refresh()],
  ["t", "Light or dark theme", openTheme],
  ["a", "Enter the admin token", openToken],
  ["?", "This list", openHelp],
];

function keysOn() {
  try {
    return localStorage.getItem("queuesmith.keys") !== "off";
  } catch {
    return true;
  }
}

function openHelp() {
  modal("Shortcuts", (close) => {
    const list = h("dl", { class: "keys" }, keys().map(([key, what]) => [h("dt", null, h("kbd", null, key)), h("dd", null, what)]));
    const on = h("input", { type: "checkbox", id: "keys-on", checked: keysOn(), onchange: () => {
      try {
        localStorage.setItem("queuesmith.keys", on.checked ? "on" : "off");
      } catch {
        toast("This browser keeps no settings.", "bad");
      }
    } });
    return h(
      "div",
      { class: "stack" },
      list,
      h("p", { class: "muted small" }, "Tab and Shift+Tab move, Enter follows, Space selects, Esc closes."),
      h("div", { class: "check" }, on, h("label", { for: "keys-on" }, "Single-key shortcuts are on")),
      h("div", { class: "actions" }, h("button", { class: "primary", onclick: () => close() }, "Close")),
    );
  });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]") || !keysOn()) return;
  if (event.target.matches("input:not([type=checkbox]), select, textarea")) return;
  const found = keys().find(([key]) => key === event.key);
  if (!found) return;
  event.preventDefault();
  found[2]();
});

// ---- the line

let wasOffline = false;
function drawLine() {
  const words = {
    connecting: ["warn", "wait", "Connecting…"],
    live: ["ok", "done", "Live"],
    polling: live.stream ? ["warn", "wait", "Polling: no event stream"] : ["ok", "done", "Up to date"],
    offline: ["bad", "warn", "No connection"],
  }[live.state];
  const state = document.getElementById("link-state");
  if (state.dataset.state !== live.state) {
    state.dataset.state = live.state;
    set(state, "class", `link-state tone-${words[0]}`);
    replace(state, icon(words[1]), h("span", null, words[2]));
  }
  const banner = document.getElementById("banner");
  if (live.state === "offline") {
    if (banner.hidden || banner.dataset.trouble) {
      delete banner.dataset.trouble;
      const retry = h("button", { class: "small-button", onclick: () => live.now() }, "Try now");
      replace(banner, icon("warn"), h("span", null, "The server does not answer. What you see may be old. ", h("span", { id: "retry-in", "aria-live": "off" })), retry);
      set(banner, "hidden", false);
    }
    const left = Math.max(0, Math.ceil((live.retryAt - Date.now()) / 1000));
    text(document.getElementById("retry-in"), left ? `Next try in ${left} s.` : "Trying…");
    wasOffline = true;
    return;
  }
  if (queues.trouble) {
    // Redis is down, not the console's own server: the token stays valid, views of the database work.
    if (banner.dataset.trouble !== queues.trouble) replace(banner, icon("warn"), h("span", null, queues.trouble));
    banner.dataset.trouble = queues.trouble;
    set(banner, "hidden", false);
  } else if (live.state !== "connecting") {
    set(banner, "hidden", true);
    delete banner.dataset.trouble;
  }
  if (wasOffline && live.state !== "connecting") {
    wasOffline = false;
    toast("Connected again.");
    refresh();
  }
}
setInterval(drawLine, 500);
live.addEventListener("state", drawLine);
live.addEventListener("event", (event) => {
  events.remember(event.detail);
  shown.handle?.event?.(event.detail);
});

// ---- go: the server says which views it has data for, and may add its own

async function start() {
  const order = ["overview", "documents", "jobs", "workers", "schedules", "letters", "sagas", "outbox", "breakers", "events"];
  for (let pause = 500; ; pause = Math.min(5000, 2 * pause)) {
    try {
      about = await get("/console.json");
      break;
    } catch {
      live.polled(false);
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }
  const own = await Promise.all(about.extra.map(async (path) => (await import(address(path))).view));
  const known = VIEWS.filter((view) => about.views.includes(view.id) || (view === events && about.live));
  VIEWS = [...known, ...own].sort((a, b) => order.indexOf(a.id) - order.indexOf(b.id));
  text(document.getElementById("brand"), about.name);
  drawNav();
  addEventListener("hashchange", () => show());
  onAccess(accessChanged);
  if (token()) recheck();
  show({ focus: false });
  live.run(about.live);
}

themeLabel();
text(document.getElementById("token-label"), "Enter admin token");
text(document.getElementById("zone"), zone());
document.getElementById("open-token").addEventListener("click", openToken);
document.getElementById("toggle-theme").addEventListener("click", openTheme);
document.getElementById("open-help").addEventListener("click", openHelp);
DARK.addEventListener("change", themeLabel);
addEventListener("online", () => live.now());
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
start();
