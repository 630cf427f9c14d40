// Reading charts: values under the pointer or by arrow keys, lines hidden by their legend, light and dark.
// Charts are complete without this file. All listeners sit on the document, so charts may come and go.
"use strict";
(() => {
  const NUMBER = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });

  function bytes(value) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let i = 0;
    while (Math.abs(value) >= 1000 && i < units.length - 1) { value /= 1000; i += 1; }
    return `${value.toFixed(i ? 1 : 0)} ${units[i]}`;
  }

  function duration(seconds) {
    if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
    const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
    const two = (value) => String(value).padStart(2, "0");
    return hours ? `${hours}:${two(minutes)}:${two(whole % 60)} h` : `${minutes}:${two(whole % 60)} min`;
  }

  const text = (value, unit) => unit === "s" ? duration(value) : unit === "B" ? bytes(value) : `${NUMBER.format(value)}${unit ? " " + unit : ""}`;

  // The lines of a drawing in data coordinates, read back from what is drawn.
  function read(svg) {
    const [x0, x1, y0, y1] = svg.dataset.frame.split(" ").map(Number);
    return [...svg.querySelectorAll("g[data-line]:not(.off)")].map((group) => ({
      label: group.dataset.line,
      colour: group.getAttribute("style"),
      points: group.querySelector("polyline").getAttribute("points").split(" ").map((pair) => {
        const [u, v] = pair.split(",").map(Number);
        const y = y1 - (y1 - y0) * v / 1000;
        return { u, x: x0 + (x1 - x0) * u / 1000, y: svg.dataset.log === undefined ? y : 10 ** y };
      }),
    }));
  }

  const nearest = (points, u) => points.reduce((best, point) => Math.abs(point.u - u) < Math.abs(best.u - u) ? point : best);

  // Show every line's value at the point nearest to u (0 to 1000) that any line has.
  function show(svg, u) {
    const lines = read(svg), all = lines.flatMap((line) => line.points);
    if (!all.length) return;
    const at = nearest(all, u), output = svg.parentElement.querySelector(".reading");
    svg.querySelector(".cursor").setAttribute("d", `M${at.u} 0V1000`);
    const unit = svg.dataset.xUnit, place = (x) => unit ? text(x, unit) : text(Math.round(x), "");
    output.replaceChildren(row(`${svg.dataset.x} ${place(at.x)}`, "", ""));
    for (const line of lines) {
      const point = nearest(line.points, at.u);
      const own = Math.abs(point.u - at.u) < 0.5 ? "" : ` (${svg.dataset.x.toLowerCase()} ${place(point.x)})`;
      output.append(row(line.label + own, text(point.y, svg.dataset.unit), line.colour));
    }
    output.style.left = at.u < 500 ? "auto" : "5rem";
    output.style.right = at.u < 500 ? "0.5rem" : "auto";
    svg.dataset.at = at.u;
  }

  function row(label, value, colour) {
    const line = document.createElement("div"), left = document.createElement("span"), right = document.createElement("b");
    if (colour) {
      const chip = document.createElement("span");
      chip.className = "chip";
      chip.style.setProperty("--c", colour.replace("--c:", ""));
      left.append(chip);
    }
    left.append(label);
    right.textContent = value;
    line.append(left, right);
    return line;
  }

  function hide(svg) {
    svg.querySelector(".cursor").setAttribute("d", "");
    svg.parentElement.querySelector(".reading").replaceChildren();
  }

  // Left and right step from point to point of the line that has the most of them.
  function step(svg, key) {
    const longest = read(svg).reduce((a, b) => b.points.length > a.points.length ? b : a, { points: [] }).points;
    if (!longest.length) return;
    const at = Number(svg.dataset.at ?? -1), us = longest.map((point) => point.u);
    const next = { ArrowRight: us.find((u) => u > at + 0.01) ?? us.at(-1), ArrowLeft: us.findLast((u) => u < at - 0.01) ?? us[0], Home: us[0], End: us.at(-1) };
    show(svg, next[key]);
  }

  const drawing = (event) => event.target.closest?.("svg[data-frame]");

  document.addEventListener("pointermove", (event) => {
    const svg = drawing(event);
    for (const other of document.querySelectorAll("svg[data-hover]")) {
      if (other !== svg) { hide(other); delete other.dataset.hover; }
    }
    if (!svg) return;
    const box = svg.getBoundingClientRect();
    svg.dataset.hover = "";
    show(svg, 1000 * (event.clientX - box.left) / box.width);
  });
  document.addEventListener("focusout", (event) => { if (drawing(event)) hide(drawing(event)); });
  document.addEventListener("keydown", (event) => {
    const svg = drawing(event);
    if (svg && ["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) { event.preventDefault(); step(svg, event.key); }
    if (svg && event.key === "Escape") hide(svg);
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.(".legend button[data-line]");
    if (button) {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      const drawings = button.closest("[data-lines]") ?? button.closest("figure");
      for (const group of drawings.querySelectorAll("g[data-line]")) {
        if (group.dataset.line === button.dataset.line) group.classList.toggle("off", !shown);
      }
    }
    if (event.target.id === "theme") turn();
  });

  // The other theme than the one shown; remembered where the browser lets a page remember.
  function turn() {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    const now = document.documentElement.dataset.theme || system;
    document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
    try { localStorage.setItem("everfed-theme", document.documentElement.dataset.theme); } catch { /* a file may not */ }
  }
  try {
    const kept = localStorage.getItem("everfed-theme");
    if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
  } catch { /* a file may not */ }
})();
