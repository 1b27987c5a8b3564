import { empty, h, keyed, pill, replace, text } from "../dom.js";
import { clock, count } from "../format.js";

const KEPT = 200;
const seen = []; // newest first
let number = 0;

function remember(event) {
  number += 1;
  seen.unshift({ ...event, number });
  if (seen.length > KEPT) seen.pop();
}

function words({ data }) {
  if (data === null || typeof data !== "object") return String(data);
  const { queue, job_id: job, at: _, until, ...rest } = data; // the line begins with its time
  if (until) rest.until = clock(Number(until) / 1000);
  const said = Object.entries(rest)
    .filter(([, value]) => value !== null && value !== "" && value !== undefined)
    .map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`);
  return [queue && `${queue}${job ? ` / ${job}` : ""}`, ...said].filter(Boolean).join(" · ").slice(0, 400);
}

function mount({ body, tools }) {
  let paused = false;
  const feed = h("ol", { class: "feed", "aria-label": "Events, newest first", tabindex: 0 });
  const search = h("input", { id: "event-search", type: "search", "data-search": "", placeholder: "queue, job, event…" });
  const status = h("p", { class: "muted small status-line" });
  const hold = h("button", { "aria-pressed": "false" }, "Hold still");
  const nothing = h("div");
  const draw = () => {
    const wanted = search.value.trim().toLowerCase();
    const rows = seen.filter((event) => !wanted || `${event.name} ${words(event)}`.toLowerCase().includes(wanted)).slice(0, 100);
    text(status, `${count(number)} since this page was opened, the last ${KEPT} are kept${paused ? "; held still" : ""}.`);
    replace(
      nothing,
      rows.length
        ? null
        : wanted && seen.length
          ? empty("No event matches", "Clear the search to see all of them.")
          : empty("Nothing has happened yet", "Every step of every job shows up here as it happens."),
    );
    feed.hidden = rows.length === 0;
    keyed(feed, rows, (event) => event.number, (event) => h("li", null, h("time", null, clock(event.at)), h("span", null, eventPill(event.name)), h("span", { class: "mono" }, words(event))));
  };
  hold.addEventListener("click", () => {
    paused = !paused;
    hold.setAttribute("aria-pressed", String(paused));
    text(hold, paused ? "Go on" : "Hold still");
    draw();
  });
  search.addEventListener("input", draw);
  replace(tools, hold);
  replace(body, h("div", { class: "filters" }, h("div", null, h("label", { for: "event-search" }, "Search"), search)), status, nothing, feed);
  draw();
  let waiting = null;
  return {
    navigate: () => {},
    event: () => {
      if (!paused) waiting ??= setTimeout(() => { waiting = null; if (!paused) draw(); }, 150);
    },
    unmount: () => clearTimeout(waiting),
  };
}

const AS = { progress: "active", added: "waiting", "waiting-children": "waiting-children" };
function eventPill(name) {
  const node = pill(AS[name] ?? name);
  node.lastChild.textContent = name;
  return node;
}

export const events = { id: "events", title: "Events", icon: "events", admin: false, about: "What happens, as it happens.", mount, remember };
