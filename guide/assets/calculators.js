// Forms and drawings of the calculators page. The numbers come from calculate.js.
"use strict";

(function () {
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 640;
  const HEIGHT = 200;
  const LEFT = 44;
  const BOTTOM = 24;

  const forms = {
    backoff: {
      fields: [["base", "base, seconds", 1, 0.001], ["cap", "cap, seconds", 30, 0.001], ["attempts", "attempts", 8, 1], ["seed", "seed", 7, 0]],
      compute: function (given) {
        const rows = Queuesmith.backoff(given.base, given.cap, given.attempts, Queuesmith.seeded(given.seed));
        const last = rows.length ? rows[rows.length - 1].total : 0;
        return {
          text: `${rows.length} retries; without jitter the last one comes after ${show(last)} s, with full jitter after ${show(last / 2)} s on average.`,
          head: ["retry", "without jitter, s", "full jitter, mean s", "one draw, s"],
          rows: rows.map((row) => [row.retry, row.ceiling, row.mean, row.drawn]),
          series: [
            ["qs-plain", "without jitter", rows.map((row) => [row.retry, row.ceiling])],
            ["qs-jitter", "one draw of full jitter", rows.map((row) => [row.retry, row.drawn])],
          ],
          axis: "retry",
        };
      },
    },
    "littles-law": {
      fields: [["perSecond", "jobs per second", 20, 0], ["seconds", "seconds per job", 3, 0], ["slots", "slots per process", 20, 1], ["utilisation", "utilisation, 0 to 1", 0.7, 0.01]],
      compute: function (given) {
        const got = Queuesmith.littlesLaw(given.perSecond, given.seconds, given.slots, Math.min(given.utilisation, 1));
        return {
          text: `${show(got.inWork)} jobs are in work at any time: ${got.processes} processes, each loaded to ${show(got.load * 100)} %.`,
          head: [], rows: [], series: [], axis: "",
        };
      },
    },
    storm: {
      fields: [["clients", "clients", 1000, 1], ["capacity", "answers per 100 ms", 20, 0], ["attempts", "attempts", 5, 1], ["base", "base, seconds", 1, 0.001], ["cap", "cap, seconds", 30, 0.001], ["seed", "seed", 7, 0]],
      compute: function (given) {
        const clients = Math.min(given.clients, 20000);
        const attempts = Math.min(given.attempts, 12);
        const random = Queuesmith.seeded(given.seed);
        const plain = Queuesmith.storm(clients, attempts, given.capacity, (n) => Queuesmith.ceiling(given.base, given.cap, n));
        const jitter = Queuesmith.storm(clients, attempts, given.capacity, (n) => Queuesmith.fullJitter(given.base, given.cap, n, random));
        const points = (run) => run.calls.map(([at, count]) => [at / 10, count]);
        return {
          text: `Without jitter ${plain.succeeded} of ${clients} get through and the herd returns with ${plain.peak} calls in 100 ms; with full jitter ${jitter.succeeded} get through and the peak is ${jitter.peak}.`,
          head: ["", "got through", "peak of retries per 100 ms"],
          rows: [["without jitter", plain.succeeded, plain.peak], ["full jitter", jitter.succeeded, jitter.peak]],
          series: [["qs-plain", "without jitter", points(plain)], ["qs-jitter", "full jitter", points(jitter)]],
          axis: "seconds",
        };
      },
    },
  };

  function show(value) {
    return typeof value === "number" ? String(Number(value.toPrecision(4))) : value;
  }

  function element(name, text, attributes) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    return made;
  }

  function drawn(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function chart(result) {
    const all = result.series.flatMap(([, , points]) => points);
    const right = Math.max(...all.map(([x]) => x), 1);
    const top = Math.max(...all.map(([, y]) => y), 1e-9);
    const x = (value) => LEFT + (value / right) * (WIDTH - LEFT - 10);
    const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - BOTTOM - 24);
    const label = result.series.map(([, name]) => name).join(" and ");
    const svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${label}, by ${result.axis}` });
    svg.append(
      drawn("line", { class: "qs-axis", x1: LEFT, y1: y(0), x2: WIDTH, y2: y(0) }),
      drawn("line", { class: "qs-axis", x1: LEFT, y1: y(0), x2: LEFT, y2: 16 }),
      drawn("text", { x: 0, y: 26 }, show(top)),
      drawn("text", { x: WIDTH - 90, y: HEIGHT - 6 }, `${show(right)} ${result.axis}`),
    );
    result.series.forEach(([kind, name, points], index) => {
      const width = Math.max(1.5, Math.min(14, (WIDTH - LEFT) / Math.max(points.length, 1) / 3));
      const shift = (index - 0.5) * width;
      for (const [at, value] of points) {
        const height = Math.max(y(0) - y(value), 0.5);
        svg.append(drawn("rect", { class: kind, x: Math.max(LEFT, x(at) + shift - width / 2), y: y(value), width: width, height: height, "stroke-width": 0 }));
      }
      svg.append(drawn("rect", { class: kind, x: LEFT + 10 + index * 180, y: 2, width: 10, height: 10 }), drawn("text", { x: LEFT + 26 + index * 180, y: 11 }, name));
    });
    return svg;
  }

  function table(result) {
    const made = element("table");
    const head = element("tr");
    for (const name of result.head) head.append(name ? element("th", name, { scope: "col" }) : element("td", ""));
    made.append(element("thead"), element("tbody"));
    made.tHead.append(head);
    for (const row of result.rows) {
      const line = element("tr");
      for (const cell of row) line.append(element("td", show(cell)));
      made.tBodies[0].append(line);
    }
    return made;
  }

  function start(form) {
    const kind = form.dataset.calculator;
    if (form.dataset.ready) return;
    form.dataset.ready = "yes";
    const inputs = {};
    for (const [key, label, value, least] of forms[kind].fields) {
      const wrapped = element("label", label);
      inputs[key] = element("input", undefined, { type: "number", name: key, value: value, min: least, step: "any" });
      wrapped.append(inputs[key]);
      form.append(wrapped);
    }
    const output = element("output", undefined, { "aria-live": "polite" });
    const drawing = element("div");
    form.append(output, drawing);
    function update() {
      const given = {};
      for (const [key, , , least] of forms[kind].fields) {
        given[key] = Number(inputs[key].value);
        if (inputs[key].value === "" || !Number.isFinite(given[key]) || given[key] < least) {
          output.textContent = `${key} must be a number of at least ${least}.`;
          drawing.replaceChildren();
          return;
        }
      }
      for (const whole of ["attempts", "clients", "capacity"]) {
        if (whole in given) given[whole] = Math.floor(given[whole]);
      }
      if ("attempts" in given) given.attempts = Math.min(given.attempts, 60);
      const result = forms[kind].compute(given);
      output.textContent = result.text;
      drawing.replaceChildren(...(result.series.length ? [chart(result), table(result)] : []));
    }
    form.addEventListener("input", update);
    form.addEventListener("submit", (event) => event.preventDefault());
    update();
  }

  function startAll() {
    document.querySelectorAll("form.qs-calculator").forEach(start);
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", startAll);
  else startAll();
})();
