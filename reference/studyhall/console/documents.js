import { ApiError, get, post } from "../api.js";
import { attempt, bar, cell, confirmAction, empty, h, keyed, pill, replace, set, setPill, table, text, toast } from "../dom.js";
import { flowGraph } from "../flow.js";
import { ago, bytes, full, plural } from "../format.js";

const OPEN = new Set(["completed", "failed", "gone", "cancelled"]);

/** One word and one number for a whole document. */
export function summary(document) {
  const stages = document.stages ?? [];
  const percent = stages.length ? stages.reduce((sum, stage) => sum + (Number(stage.percent) || 0), 0) / stages.length : 0;
  const has = (state) => stages.some((stage) => stage.state === state);
  if (document.status === "rejected" || has("failed")) return { state: "failed", percent };
  if (has("cancelled")) return { state: "cancelled", percent };
  if (stages.length && stages.every((stage) => stage.state === "completed")) return { state: "completed", percent: 100 };
  if (has("active")) return { state: "active", percent };
  if (has("delayed")) return { state: "delayed", percent };
  if (has("unknown")) return { state: "unknown", percent };
  return { state: stages.every((stage) => stage.state === "gone") ? (document.status === "ready" ? "completed" : document.status) : "waiting", percent };
}

function now(document) {
  const stages = document.stages ?? [];
  const stage = stages.find((entry) => ["active", "failed", "delayed"].includes(entry.state)) ?? stages.find((entry) => !OPEN.has(entry.state));
  return stage ? `${stage.name}${stage.message ? `: ${stage.message}` : ""}` : "";
}

function uploader(refresh) {
  const input = h("input", { type: "file", id: "upload", multiple: true, class: "hidden-text", accept: ".pdf,.docx,.md,.txt,application/pdf,text/plain,text/markdown" });
  const button = h("button", { id: "choose-files", class: "primary", onclick: () => input.click() }, "Choose files");
  const zone = h("div", { class: "drop" }, button, input, h("label", { for: "upload", class: "hidden-text" }, "Documents to upload"), h("p", null, "or drop them here: PDF, DOCX, Markdown or text. Text, graph, quiz and explanations follow by themselves."));
  input.tabIndex = -1;
  const send = async (files) => {
    set(button, "disabled", true);
    for (const file of files) {
      const form = new FormData();
      form.append("file", file);
      try {
        const made = await post("/documents", undefined, { form, signal: AbortSignal.timeout(60000) });
        toast(`${file.name} is on its way.`);
        refresh();
        if (files.length === 1 && made?.id) location.hash = `#/documents/${made.id}`;
      } catch (error) {
        toast(`${file.name}: ${error instanceof ApiError ? error.message : "could not be sent"}`, "bad");
      }
    }
    set(button, "disabled", false);
    input.value = "";
  };
  input.addEventListener("change", () => send([...input.files]));
  for (const name of ["dragover", "dragleave", "drop"]) {
    zone.addEventListener(name, (event) => {
      event.preventDefault();
      zone.classList.toggle("over", name === "dragover");
      if (name === "drop") send([...event.dataTransfer.files]);
    });
  }
  return zone;
}

function row(document) {
  const state = pill("waiting");
  const line = bar(`Progress of ${document.name}`);
  const what = h("div", { class: "small muted" });
  const age = h("time");
  const node = h(
    "tr",
    { role: "row" },
    cell("Document", h("div", null, h("a", { class: "title", href: `#/documents/${encodeURIComponent(document.id)}` }, document.name), what)),
    cell("State", state),
    cell("Progress", line),
    cell("Uploaded", age),
  );
  node.show = (latest) => {
    const all = summary(latest);
    setPill(state, all.state);
    line.show(all.percent, all.state);
    text(what, latest.error || now(latest));
    text(age, ago(latest.created_at));
    set(age, "title", full(latest.created_at));
  };
  return node;
}

function detail(id, refresh) {
  const title = h("h2", { tabindex: -1 }, "Looking…");
  const state = pill("waiting");
  const graph = flowGraph("Flow");
  const stages = h("ul", { class: "stages" });
  const facts = h("p", { class: "small muted" });
  const trouble = h("p", { class: "note tone-bad", role: "alert", hidden: true });
  const stop = h("button", { class: "danger small-button", hidden: true }, "Cancel this document");
  stop.addEventListener("click", async () => {
    if (!(await confirmAction("Cancel this document?", "Stages that run are told to stop, those that wait never start. Upload it again to begin again.", "Cancel it", "Go on"))) return;
    await attempt(async () => {
      await post(`/documents/${encodeURIComponent(id)}/cancel`, { reason: "cancelled in the console" });
      return "Cancelled: running stages stop now.";
    }, refresh);
  });
  const made = h("div", { class: "stack" });
  const node = h("section", { class: "card detail", "aria-label": "Document" }, h("div", { class: "card-head" }, title, state), facts, trouble, h("div", { class: "flow-frame" }, graph), stages, made, h("div", { class: "card-head card-foot" }, h("a", { href: "#/documents" }, "Close"), stop));
  node.show = (document) => {
    const all = summary(document);
    text(title, document.name);
    setPill(state, all.state);
    text(facts, [document.title && document.title !== document.name ? `“${document.title}”` : null, document.kind, document.pages ? plural(document.pages, "page") : null, bytes(document.size), `uploaded ${ago(document.created_at)}`].filter(Boolean).join(" · "));
    text(trouble, document.error ?? "");
    set(trouble, "hidden", !document.error);
    set(stop, "hidden", !["waiting", "active", "delayed"].includes(all.state));
    const nodes = (document.stages ?? []).map((stage, index, list) => ({ ...stage, id: stage.name, after: index ? [list[index - 1].name] : [] }));
    graph.show(nodes);
    const shape = JSON.stringify([document.graph, document.quiz, document.explanations]);
    if (made.dataset.shape !== shape) replace(made, results(document));
    made.dataset.shape = shape;
    keyed(stages, document.stages ?? [], (stage) => stage.name, stageRow, (item, stage) => item.show(stage));
  };
  return node;
}

/** The results so far, each under its heading. */
function results({ graph, quiz, explanations }) {
  const part = (title, rows) => h("details", null, h("summary", null, title), h("ul", { class: "small stack" }, rows.map((row) => h("li", null, row))));
  return [
    graph && part(plural(graph.concepts.length, "concept"), graph.links.map((link) => `${link.source} – ${link.label || "belongs to"} – ${link.target}`)),
    quiz && part(plural(quiz.questions.length, "question"), quiz.questions.map((question) => `${question.prompt} (${question.choices.join(", ")}) ${question.answer}`)),
    explanations && part(plural(explanations.length, "explanation"), explanations.map((pair) => `${pair.source}, ${pair.target}: ${pair.text}`)),
  ];
}

function stageRow(stage) {
  const state = pill(stage.state);
  const line = bar(stage.name);
  const message = h("span", { class: "stage-message" });
  const node = h("li", null, h("span", null, stage.name), state, line, message);
  node.show = (latest) => {
    setPill(state, latest.state);
    line.show(latest.percent, latest.state);
    text(message, latest.message ?? "");
    message.hidden = !latest.message;
  };
  return node;
}

function mount({ body, params, refresh }) {
  let id = params[0];
  const list = table("Documents", ["Document", "State", "Progress", "Uploaded"]);
  const nothing = h("div", null, h("p", { class: "muted" }, "Looking…"));
  const side = h("div", { hidden: true });
  const split = h("div", { class: "split" }, side, h("div", null, nothing, list));
  list.hidden = true;
  replace(body, uploader(refresh), split);
  const open = () => {
    replace(side, id ? detail(id, refresh) : null);
    side.hidden = !id;
    if (id) side.firstElementChild.hidden = true;
  };
  open();
  return {
    navigate: (next) => {
      if (next[0] === id) return;
      id = next[0];
      open();
    },
    event: refresh,
    failed: (error) => replace(nothing, h("p", { class: "note tone-bad", role: "alert" }, error.message)),
    refresh: async () => {
      const wanted = id;
      const [answer, detail] = await Promise.all([
        get("/documents?limit=50"),
        wanted ? get(`/documents/${encodeURIComponent(wanted)}`).catch((error) => { if (error.status === 404) return null; throw error; }) : null,
      ]);
      const documents = answer;
      replace(nothing, documents.length ? null : empty("No document yet", "Choose a file above, or from a terminal:", h("code", null, "studyhall submit reference/samples/water-cycle.md")));
      list.hidden = documents.length === 0;
      keyed(list.body, documents, (document) => document.id, row, (node, document) => { node.show(document); node.classList.toggle("chosen", document.id === id); });
      if (wanted !== id || !id) return;
      const card = side.firstElementChild;
      card.hidden = false;
      if (detail) card.show(detail);
      else replace(card, empty("There is no such document", h("a", { href: "#/documents" }, "Close")));
    },
  };
}

export const view = { id: "documents", title: "Documents", icon: "documents", admin: false, about: "Upload a document and watch it become text, a graph, a quiz and explanations.", mount, keys: [["u", "Upload a document", () => { location.hash = "#/documents"; setTimeout(() => document.querySelector("#choose-files")?.focus(), 50); }]] };
