// A slider that moves a kill along the steps of a pattern, and one that goes through a sequence diagram step by step.
// The list of all moments and the text of the diagram, which the page has anyway, stay for readers without scripts.
"use strict";

(function () {
  const STILL = window.matchMedia("(prefers-reduced-motion: reduce)");
  const PACE = 1600;
  const KICKER = { usual: "The usual way", ours: "This pattern" };

  function element(tag, attributes, ...inner) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...inner);
    return made;
  }

  function lane(name, given) {
    const steps = given.steps.map((text) => element("li", {}, text));
    const word = element("b", {});
    const told = element("span", {});
    const whole = element("div", { class: "qs-lane", "data-lane": name },
      element("p", { class: "qs-lane-title" }, element("small", {}, KICKER[name]), given.title),
      element("ol", {}, ...steps),
      element("p", { class: "qs-outcome" }, word, " ", told));
    function show(moment) {
      const [kind, verdict, text] = moment[name];
      steps.forEach((step, place) => { step.dataset.state = place < moment.after ? "done" : "not"; });
      steps.forEach((step, place) => { step.toggleAttribute("data-hit", moment.hit !== false && place === moment.after - 1); });
      whole.toggleAttribute("data-hit", moment.after === 0);
      word.className = `qs-${kind}`;
      word.textContent = verdict;
      told.textContent = text;
    }
    return { whole, show };
  }

  // By hand, by keyboard, or by itself where motion is welcome.
  function moved(slider, show, controls) {
    const play = element("button", { type: "button" }, "Play");
    let timer = null;
    function stop() {
      clearInterval(timer);
      timer = null;
      play.textContent = "Play";
    }
    function next() {
      if (slider.value === slider.max) { stop(); return; }
      slider.value = Number(slider.value) + 1;
      show();
    }
    play.addEventListener("click", function () {
      if (timer) { stop(); return; }
      slider.value = slider.min;
      show();
      play.textContent = "Stop";
      timer = setInterval(next, PACE);
    });
    slider.addEventListener("input", function () { stop(); show(); });
    if (!STILL.matches) controls.append(play);
  }

  // The steps of a sequence diagram, from its text: "Worker to Queue: done", or a note.
  function stepsOf(text) {
    const names = {};
    const steps = [];
    for (const line of text.split("\n")) {
      const who = line.match(/^\s*(?:participant|actor) (\w+)(?: as (.+))?$/);
      const sent = line.match(/^\s*(\w+)\s*--?(?:>>|x|\))\s*(\w+): *(.+)$/);
      const note = line.match(/^\s*Note [^:]+: *(.+)$/);
      if (who) names[who[1]] = who[2] || who[1];
      else if (sent) steps.push(`${names[sent[1]]} to ${names[sent[2]]}: ${sent[3]}`);
      else if (note) steps.push(note[1]);
    }
    return steps;
  }

  // A slider over those steps: what has not happened yet is faint. All of it is shown at first.
  let walks = 0;
  function walk(figure) {
    figure.querySelector(".qs-controls")?.remove();
    const steps = stepsOf(figure.querySelector(".qs-text").textContent);
    const drawn = [...figure.querySelectorAll(".qs-drawing [class^=message], .qs-drawing .note, .qs-drawing .noteText")];
    const bottom = (part) => { const box = part.getBBox(); return box.y + box.height; };
    const ends = drawn.filter((part) => part.matches("[class^=messageLine], .note")).map(bottom).sort((a, b) => a - b);
    if (!steps.length || ends.length !== steps.length) return;
    const places = drawn.map((part) => ends.findIndex((end) => bottom(part) - part.getBBox().height / 2 <= end));
    walks += 1;
    const ident = `qs-step-${walks}`;
    const slider = element("input", { type: "range", id: ident, min: 0, max: steps.length - 1, step: 1, value: steps.length - 1 });
    const at = element("output", { for: ident });
    const controls = element("div", { class: "qs-controls" }, element("label", { for: ident }, "Step by step"), slider);
    function show() {
      const now = Number(slider.value);
      drawn.forEach((part, place) => part.toggleAttribute("data-later", places[place] > now));
      at.textContent = `${now + 1} of ${steps.length}: ${steps[now]}`;
      slider.setAttribute("aria-valuetext", at.textContent);
    }
    moved(slider, show, controls);
    controls.append(at);
    figure.querySelector(".qs-drawing").before(controls);
    show();
  }

  function build(figure, number) {
    const { fault, lanes, moments } = JSON.parse(figure.querySelector("script").textContent);
    const worst = moments.findIndex((moment) => moment.usual[0] === "bad");
    const ident = `qs-timeline-${number}`;
    const slider = element("input", { type: "range", id: ident, min: 0, max: moments.length - 1, step: 1, value: worst });
    const at = element("output", { for: ident });
    const shown = Object.entries(lanes).map(([name, given]) => lane(name, given));
    function show() {
      const moment = moments[Number(slider.value)];
      at.textContent = moment.at;
      slider.setAttribute("aria-valuetext", moment.at);
      shown.forEach((drawn) => drawn.show(moment));
      spoken.textContent = Object.entries(lanes).map(([name, given]) => `${given.title}: ${moment[name].slice(1).join(". ")}`).join(" ");
    }

    // The lanes change in many places at once: one sentence is read out instead.
    const spoken = element("p", { class: "qs-spoken", "aria-live": "polite" });
    const controls = element("div", { class: "qs-controls" },
      element("label", { for: ident }, `Move the ${fault}`), slider, at);
    moved(slider, show, controls);
    figure.querySelector(".qs-stepped").replaceWith(
      element("div", { class: "qs-live" }, controls, element("div", { class: "qs-lanes" }, ...shown.map((drawn) => drawn.whole)), spoken));
    show();
    figure.dataset.ready = "yes";
  }

  function start() {
    document.querySelectorAll("figure.qs-timeline").forEach(build);
    document.addEventListener("qs-drawn", (event) => walk(event.target));
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
