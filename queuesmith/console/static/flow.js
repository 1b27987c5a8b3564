// A flow of jobs as a graph: boxes by depth from left to right, on a narrow screen from top to bottom.
import { icon, s, set, stateName, text, tone } from "./dom.js";

const BOX = { width: 232, height: 74 };
const GAP = { along: 44, upright: 26, across: 18 };
const READABLE = 0.75; // below this scale words are too small: draw it upright
const SHAPES = { ok: "done", run: "run", bad: "fail", warn: "wait", idle: "wait" };

/** Depth of every node: one more than the deepest of those it waits for. */
function layers(nodes) {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const depth = new Map();
  const visit = (node, seen) => {
    if (depth.has(node.id)) return depth.get(node.id);
    if (seen.has(node.id)) return 0; // the data may contain a loop
    seen.add(node.id);
    const before = (node.after ?? []).map((id) => byId.get(id)).filter(Boolean);
    const found = before.length ? 1 + Math.max(...before.map((one) => visit(one, seen))) : 0;
    depth.set(node.id, found);
    return found;
  };
  const rows = [];
  for (const node of nodes) (rows[visit(node, new Set())] ??= []).push(node);
  return rows.filter(Boolean);
}

function places(nodes, upright) {
  const rows = layers(nodes);
  const most = Math.max(1, ...rows.map((row) => row.length));
  const [along, across] = upright ? [BOX.height, BOX.width] : [BOX.width, BOX.height];
  const gap = upright ? GAP.upright : GAP.along;
  const pad = 4;
  const extent = most * across + (most - 1) * GAP.across;
  const at = new Map();
  rows.forEach((row, layer) => {
    const used = row.length * across + (row.length - 1) * GAP.across;
    row.forEach((node, index) => {
      const a = pad + layer * (along + gap);
      const b = pad + (extent - used) / 2 + index * (across + GAP.across);
      at.set(node.id, upright ? { x: b, y: a } : { x: a, y: b });
    });
  });
  const length = rows.length * along + (rows.length - 1) * gap;
  return { at, width: (upright ? extent : length) + 2 * pad, height: (upright ? length : extent) + 2 * pad };
}

/** `nodes`: [{id, name, state, percent, after: [ids]}]. Call `.show(nodes)` again with changes. */
export function flowGraph(label) {
  const drawing = s("svg", { class: "flow", role: "img", "aria-label": label });
  let shape = "";
  let boxes = new Map();
  let edges = [];
  drawing.show = (nodes) => {
    const room = drawing.parentElement?.clientWidth || 900;
    const upright = room < READABLE * places(nodes, false).width;
    const wanted = JSON.stringify([upright, nodes.map((node) => [node.id, node.after])]);
    if (wanted !== shape) {
      shape = wanted;
      ({ boxes, edges } = draw(drawing, nodes, upright));
    }
    const states = new Map(nodes.map((node) => [node.id, node.state]));
    for (const node of nodes) boxes.get(node.id)(node);
    for (const edge of edges) {
      const passed = states.get(edge.from) === "completed";
      set(edge.line, "class", passed ? "flow-edge passed" : "flow-edge");
      set(edge.arrow, "class", passed ? "flow-arrow passed" : "flow-arrow");
    }
    const words = nodes.map((node) => `${node.name} ${stateName(node.state)} ${Math.round(node.percent ?? 0)} %`);
    set(drawing, "aria-label", `${label}: ${words.join(", then ")}`);
  };
  return drawing;
}

const cut = (words, most) => (words.length > most ? `${words.slice(0, most - 1)}…` : words);

function draw(drawing, nodes, upright) {
  const { at, width, height } = places(nodes, upright);
  set(drawing, "viewBox", `0 0 ${width} ${height}`);
  drawing.style.setProperty("max-inline-size", `${width}px`);
  const boxes = new Map();
  const edges = [];
  const lines = s("g");
  const cards = s("g");
  for (const node of nodes) {
    const to = at.get(node.id);
    for (const id of node.after ?? []) {
      const from = at.get(id);
      if (!from) continue;
      const [x1, y1, x2, y2] = upright
        ? [from.x + BOX.width / 2, from.y + BOX.height, to.x + BOX.width / 2, to.y - 7]
        : [from.x + BOX.width, from.y + BOX.height / 2, to.x - 7, to.y + BOX.height / 2];
      const middle = upright ? `${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2}` : `${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2}`;
      const line = s("path", { class: "flow-edge", d: `M${x1} ${y1}C${middle} ${x2} ${y2}` });
      const tip = upright ? `M${x2 - 5} ${y2}h10l-5 7z` : `M${x2} ${y2 - 5}v10l7-5z`;
      const arrow = s("path", { class: "flow-arrow", d: tip });
      lines.append(line, arrow);
      edges.push({ from: id, line, arrow });
    }
    const title = s("text", { class: "flow-title", x: 36, y: 27 });
    const state = s("text", { class: "flow-state", x: 36, y: 46 });
    const glyph = s("g", { class: "flow-glyph", transform: "translate(12 15)" });
    const fill = s("rect", { class: "flow-fill", x: 12, y: 58, height: 5, rx: 2.5, width: 0 });
    const group = s(
      "g",
      { class: "flow-node", transform: `translate(${to.x} ${to.y})` },
      s("rect", { class: "flow-box", width: BOX.width, height: BOX.height, rx: 10 }),
      glyph,
      title,
      state,
      s("rect", { class: "flow-track", x: 12, y: 58, height: 5, rx: 2.5, width: BOX.width - 24 }),
      fill,
    );
    cards.append(group);
    let shown = "";
    boxes.set(node.id, (now) => {
      const colour = tone(now.state);
      const percent = Math.max(0, Math.min(100, now.percent ?? 0));
      text(title, cut(now.name, 24));
      const words = now.state === "active" ? `${stateName(now.state)}, ${Math.round(percent)} %` : stateName(now.state);
      text(state, cut(words, 24));
      set(group, "class", `flow-node tone-${colour}`);
      set(fill, "width", ((BOX.width - 24) * percent) / 100);
      if (shown !== colour) {
        shown = colour;
        glyph.replaceChildren(...icon(SHAPES[colour]).children);
      }
    });
  }
  drawing.replaceChildren(lines, cards);
  return { boxes, edges };
}
