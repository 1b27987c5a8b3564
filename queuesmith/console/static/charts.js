// Small live charts, drawn as SVG by hand: an area for levels, bars for rates.
import { h, icon, replace, s, set, text } from "./dom.js";

const WIDTH = 160;
const HEIGHT = 36;

/** One figure: label, present value and its last minutes. `kind`: "area" or "bars". */
export function figure(label, kind = "area") {
  const value = h("span", { class: "figure-value" });
  const shape = s("path", { class: kind === "bars" ? "chart-bars" : "chart-area" });
  const line = s("path", { class: "chart-line" });
  const tip = s("path", { class: "chart-tip" }); // a stroke of no length with round ends: a dot that never stretches
  const base = s("path", { class: "chart-base", d: `M0 ${HEIGHT - 0.5}H${WIDTH}` });
  const drawing = s(
    "svg",
    { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    base,
    shape,
    kind === "bars" ? null : [line, tip],
  );
  const node = h("div", { class: "figure" }, h("div", { class: "figure-head" }, h("span", { class: "figure-label" }, label), value), drawing);
  /** `history`: numbers, oldest first; `fit`: how many at most; `name`: a number in words. */
  node.show = (history, fit, name, alarm = false) => {
    const slots = Math.min(fit, Math.max(30, history.length));
    const now = history.at(-1) ?? 0;
    const most = Math.max(...history, 0);
    if (node.classList.toggle("alarm", alarm)) replace(value, icon("warn"), name(now));
    else text(value, name(now));
    set(drawing, "aria-label", `${label}: ${name(now)} now, ${name(most)} at most in the last ${history.length} samples`);
    const top = most > 0 ? most * 1.12 : 1;
    const step = WIDTH / Math.max(1, slots - 1);
    const points = history.map((point, index) => [
      WIDTH - (history.length - 1 - index) * step,
      HEIGHT - 1 - (point / top) * (HEIGHT - 4),
    ]);
    if (kind === "bars") {
      const wide = Math.max(1, step * 0.66);
      set(shape, "d", points.map(([x, y]) => `M${f(x - wide)} ${HEIGHT}V${f(Math.min(y, HEIGHT))}h${f(wide)}V${HEIGHT}z`).join(""));
      return;
    }
    const drawn = points.map(([x, y], index) => `${index ? "L" : "M"}${f(x)} ${f(y)}`).join("");
    set(line, "d", drawn || "M0 0");
    set(shape, "d", points.length ? `${drawn}V${HEIGHT}H${f(points[0][0])}z` : "M0 0");
    const [x, y] = points.at(-1) ?? [WIDTH, HEIGHT];
    set(tip, "d", `M${f(Math.min(x, WIDTH - 1.5))} ${f(y)}h.01`);
  };
  return node;
}

function f(number) {
  return Math.round(number * 10) / 10;
}
