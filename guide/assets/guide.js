// Draws the diagrams with the mermaid that is served beside this page, in the colours of the page (without it the
// text of each diagram stays), and makes what scrolls reachable by keyboard.
"use strict";

(function () {
  const root = document.documentElement;
  let loading = null;
  let number = 0;

  function library() {
    if (!loading) {
      loading = new Promise(function (resolve, reject) {
        const script = document.createElement("script");
        script.src = `${root.dataset.qsBase}assets/mermaid.min.js`;
        script.onload = () => resolve(window.mermaid);
        script.onerror = () => reject(new Error("mermaid.min.js is not there"));
        document.head.append(script);
      });
    }
    return loading;
  }

  function dark() {
    const scheme = document.body.dataset.mdColorScheme;
    if (scheme === "slate") return true;
    return !scheme && window.matchMedia("(prefers-color-scheme: dark)").matches;
  }

  async function draw() {
    const figures = document.querySelectorAll("figure.qs-diagram");
    if (!figures.length || root.dataset.qsMermaid !== "yes") return;
    const mermaid = await library();
    mermaid.initialize({ startOnLoad: false, theme: dark() ? "dark" : "default", securityLevel: "strict", fontFamily: "inherit" });
    for (const figure of figures) {
      number += 1;
      const text = figure.querySelector(".qs-text").textContent;
      const { svg } = await mermaid.render(`qs-diagram-${number}`, text);
      const place = figure.querySelector(".qs-drawing");
      place.innerHTML = svg;
      place.hidden = false;
      figure.querySelector("details").open = false;
      figure.dispatchEvent(new Event("qs-drawn", { bubbles: true }));
      figure.dataset.drawn = "yes";
    }
  }

  // What the theme leaves out for a keyboard and a screen reader: a box that scrolls can be reached, and the button
  // next to a block of code is not a landmark.
  function reach() {
    document.querySelectorAll(".md-typeset__scrollwrap, .qs-calculator table").forEach(function (box) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    });
    document.querySelectorAll("nav.md-code__nav").forEach((nav) => nav.setAttribute("role", "presentation"));
  }

  function watch() {
    let asked = 0;
    const soon = () => { cancelAnimationFrame(asked); asked = requestAnimationFrame(reach); };
    new MutationObserver(soon).observe(document.body, { childList: true, subtree: true });
    window.addEventListener("resize", soon);
    document.addEventListener("toggle", soon, true);
    soon();
  }

  function openForPrint() {
    document.querySelectorAll(".qs-tree details").forEach((branch) => { branch.open = true; });
  }

  function start() {
    watch();
    let scheme = dark();
    let turn = draw();
    new MutationObserver(function () {
      if (dark() === scheme) return;
      scheme = dark();
      turn = turn.then(draw);
    }).observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
    window.addEventListener("beforeprint", openForPrint);
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
