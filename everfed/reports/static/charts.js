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
      const drawings = drawingsOf(button);
      for (const group of drawings.querySelectorAll("g[data-line]")) {
        if (group.dataset.line === button.dataset.line) group.classList.toggle("off", !shown);
      }
    }
    const bands = event.target.closest?.("[data-bands]"), save = event.target.closest?.("[data-save]");
    if (bands) {
      const shown = bands.getAttribute("aria-pressed") !== "true";
      bands.setAttribute("aria-pressed", String(shown));
      drawingsOf(bands).classList.toggle("without-bands", !shown);
    }
    if (save) store(save.closest("figure"), save.dataset.save);
    if (event.target.id === "theme") turn();
  });

  const drawingsOf = (button) => button.closest("[data-lines]") ?? button.closest("figure");

  // A legend's entry under the pointer or in focus leaves its line alone in colour, and only its band.
  function single(event) {
    for (const other of document.querySelectorAll(".one-line")) other.classList.remove("one-line");
    const button = event.type !== "focusout" && event.target.closest?.(".legend button[data-line]");
    if (!button || button.getAttribute("aria-pressed") === "false") return;
    const drawings = drawingsOf(button);
    drawings.classList.add("one-line");
    for (const group of drawings.querySelectorAll("g[data-line]")) group.classList.toggle("lit", group.dataset.line === button.dataset.line);
  }
  for (const kind of ["pointerover", "focusin", "focusout"]) document.addEventListener(kind, single);

  // A figure as one SVG: what the browser has laid out, with every style written out.
  const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "opacity", "vector-effect"];
  const MARGIN = 12; // pixels around a figure
  const paper = document.createElement("canvas").getContext("2d", { willReadFrequently: true });

  // Any colour of CSS as programs that draw know it, and how opaque it is.
  function plain(colour) {
    paper.clearRect(0, 0, 1, 1);
    paper.fillStyle = colour;
    paper.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = paper.getImageData(0, 0, 1, 1).data;
    return [`rgb(${red},${green},${blue})`, alpha / 255];
  }

  const SPACE = new DOMParser().parseFromString("<svg>", "text/html").querySelector("svg").namespaceURI;

  function made(name, attributes, text) {
    const node = document.createElementNS(SPACE, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function drawn(figure) {
    const inner = figure.getBoundingClientRect(), [ground] = plain(getComputedStyle(document.body).backgroundColor);
    const frame = new DOMRect(inner.x - MARGIN, inner.y - MARGIN, inner.width + 2 * MARGIN, inner.height + 2 * MARGIN);
    const whole = made("svg", { width: frame.width, height: frame.height, viewBox: `0 0 ${frame.width} ${frame.height}` });
    whole.append(made("rect", { width: "100%", height: "100%", fill: ground }));
    const place = (box) => ({ x: box.left - frame.left, y: box.top - frame.top, width: box.width, height: box.height });
    const walk = (node) => {
      if (node.nodeType === Node.TEXT_NODE) return whole.append(...lettering(node, place));
      if (node.nodeType !== Node.ELEMENT_NODE || node.matches(".save, .reading, [data-bands]") || !node.getClientRects().length) return;
      const style = getComputedStyle(node), box = place(node.getBoundingClientRect());
      if (node.localName === "svg") return whole.append(...picture(node, style, box));
      const [fill, alpha] = plain(style.backgroundColor);
      if (alpha && node !== figure) whole.append(made("rect", { ...box, fill, "fill-opacity": alpha }));
      node.childNodes.forEach(walk);
    };
    walk(figure);
    return new XMLSerializer().serializeToString(whole);
  }

  function picture(svg, style, box) {
    const copy = svg.cloneNode(true), [line] = plain(style.borderBottomColor);
    for (const [key, value] of Object.entries({ ...box, overflow: "visible" })) copy.setAttribute(key, value);
    for (const name of ["style", "class", "tabindex"]) copy.removeAttribute(name);
    const originals = [...svg.querySelectorAll("*")];
    [...copy.querySelectorAll("*")].forEach((node, i) => {
      const own = getComputedStyle(originals[i]);
      if (own.display === "none") node.setAttribute("display", "none");
      for (const name of STYLES) {
        const value = own.getPropertyValue(name);
        node.setAttribute(name, /^(fill|stroke)$/.test(name) && value !== "none" ? plain(value)[0] : value);
      }
      for (const name of ["style", "class"]) node.removeAttribute(name);
    });
    const { x, y, width, height } = box, axes = style.borderBottomWidth !== "0px";
    return axes ? [made("path", { d: `M${x} ${y}v${height}h${width}`, fill: "none", stroke: line }), copy] : [copy];
  }

  // A text line by line, as the browser broke it.
  function lettering(node, place) {
    const style = getComputedStyle(node.parentElement), lines = [], range = document.createRange(), [fill] = plain(style.color);
    const kind = { fill, "font-family": style.fontFamily, "font-size": style.fontSize, "font-weight": style.fontWeight, "dominant-baseline": "central" };
    if (style.writingMode.startsWith("vertical")) {
      range.selectNodeContents(node);
      const box = place(range.getBoundingClientRect()), [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
      return [made("text", { ...kind, x, y, "text-anchor": "middle", transform: `rotate(-90 ${x} ${y})` }, node.data)];
    }
    for (const { 0: sign, index } of node.data.matchAll(/\S/gu)) {
      range.setStart(node, index);
      range.setEnd(node, index + sign.length);
      const box = place(range.getBoundingClientRect());
      if (!lines.length || Math.abs(lines.at(-1).y - box.y) > 2) lines.push({ ...box, start: index });
      lines.at(-1).end = index + sign.length;
    }
    return lines.map(({ x, y, height, start, end }) => made("text", { ...kind, x, y: y + height / 2 }, node.data.slice(start, end)));
  }

  async function store(figure, kind) {
    const source = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(drawn(figure))}`;
    const link = document.createElement("a"), title = figure.querySelector("h3").textContent;
    link.download = `${title.replace(/[^\p{L}\p{N}+.=-]+/gu, "_")}.${kind.toLowerCase()}`;
    link.href = kind === "SVG" ? source : await raster(source);
    link.click();
  }

  async function raster(source) {
    const image = new Image(), canvas = document.createElement("canvas");
    image.src = source;
    await image.decode();
    [canvas.width, canvas.height] = [2 * image.width, 2 * image.height];
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return canvas.toDataURL("image/png");
  }

  // A link to a run opens it.
  function unfold() {
    const target = location.hash.startsWith("#run-") && document.getElementById(location.hash.slice(1));
    if (target) target.open = true;
  }
  addEventListener("hashchange", unfold);
  document.addEventListener("DOMContentLoaded", unfold);
  document.documentElement.classList.add("scripted");

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
