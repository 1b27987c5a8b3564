// A classic script in the head: the chosen theme is there before the first paint.
(() => {
  try {
    const chosen = localStorage.getItem("queuesmith.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Storage is switched off: the system's preference decides.
  }
})();
