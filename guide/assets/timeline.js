// A slider that moves a kill along the steps of a pattern. The list of all moments, which the page has anyway, stays
// for readers without scripts.
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

  function build(figure, number) {
    const { fault, lanes, moments } = JSON.parse(figure.querySelector("script").textContent);
    const worst = moments.findIndex((moment) => moment.usual[0] === "bad");
    const ident = `qs-timeline-${number}`;
    const slider = element("input", { type: "range", id: ident, min: 0, max: moments.length - 1, step: 1, value: worst });
    const at = element("output", { for: ident });
    const shown = Object.entries(lanes).map(([name, given]) => lane(name, given));
    const play = element("button", { type: "button" }, "Play");
    let timer = null;

    function show() {
      const moment = moments[Number(slider.value)];
      at.textContent = moment.at;
      slider.setAttribute("aria-valuetext", moment.at);
      shown.forEach((one) => one.show(moment));
      said.textContent = Object.entries(lanes).map(([name, given]) => `${given.title}: ${moment[name].slice(1).join(". ")}`).join(" ");
    }
    function stop() {
      clearInterval(timer);
      timer = null;
      play.textContent = "Play";
    }
    function next() {
      if (Number(slider.value) === moments.length - 1) { stop(); return; }
      slider.value = Number(slider.value) + 1;
      show();
    }
    play.addEventListener("click", function () {
      if (timer) { stop(); return; }
      slider.value = 0;
      show();
      play.textContent = "Stop";
      timer = setInterval(next, PACE);
    });
    slider.addEventListener("input", function () { stop(); show(); });

    // The lanes change in many places at once: one sentence is read out instead.
    const said = element("p", { class: "qs-said", "aria-live": "polite" });
    const controls = element("div", { class: "qs-controls" },
      element("label", { for: ident }, `Move the ${fault}`), slider, at);
    if (!STILL.matches) controls.append(play);
    figure.querySelector(".qs-stepped").replaceWith(
      element("div", { class: "qs-live" }, controls, element("div", { class: "qs-lanes" }, ...shown.map((one) => one.whole)), said));
    show();
    figure.dataset.ready = "yes";
  }

  function start() {
    document.querySelectorAll("figure.qs-timeline").forEach(build);
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
