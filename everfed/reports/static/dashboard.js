// The dashboard's page: a table of runs that follows server-sent events, a comparison, and one run in full.
// Drawings come from the server as HTML; what is chosen is kept in the address, so that it can be shared.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const runs = new Map(), rows = new Map(), ticked = new Set();
  let opened = "", sortBy = "started", ascending = false;
  let notes = {}, known = {}; // {run: {name, tags, hidden}}; {option: {run: value}}
  const columns = new Set(); // options that have a column
  const PANELS = ["acc", "forgetting", "loss", "bytes", "time"];
  const CHOICES = ["what", "by", "x", "together", "smooth", "first", "last"]; // of the comparison
  const narrow = matchMedia("(max-width: 48rem)").matches;
  const AT_FIRST = 12; // runs that are compared while none is ticked
  const MOST = 100; // runs in a report

  // text ---------------------------------------------------------------------------------------------------------
  const dash = "–";
  const plain = (value) => value == null ? dash : Number(value.toPrecision(4)).toString();
  const scored = (run, value) => value == null ? dash : run.percent ? `${(100 * value).toFixed(2).replace(/^-0\.00$/, "0.00")} %` : plain(value);
  const size = (value) => {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let i = 0;
    while (value >= 999.95 && i < units.length - 1) { value /= 1000; i += 1; }
    return `${value.toFixed(i ? 1 : 0)} ${units[i]}`;
  };
  const moment = (seconds) => seconds == null ? dash : new Date(1000 * seconds).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });

  const duration = (seconds) => {
    if (seconds == null) return dash;
    if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
    const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
    const two = (value) => String(value).padStart(2, "0");
    return hours ? `${hours}:${two(minutes)} h` : `${minutes}:${two(whole % 60)} min`;
  };

  // sparse: shown only where a run has a value
  const COLUMNS = [
    { key: "id", name: "Run" },
    { key: "acc", name: "Score", text: (run) => run.status === "diverged" ? "diverged" : scored(run, run.acc), title: (run) => run.heading, number: true },
    { key: "method", name: "Method", text: (run) => run.method },
    { key: "dataset", name: "Data", text: (run) => run.dataset || run.recipe, title: (run) => run.scenario },
    { key: "seed", name: "Seed", text: (run) => String(run.seed), number: true },
    { key: "status", name: "Status", text: (run) => run.status, style: (run) => `status-${run.status}` },
    { key: "done", name: "Progress" },
    { key: "forgetting", name: "Forgetting", text: (run) => scored(run, run.forgetting), number: true },
    { key: "loss", name: "Loss", text: (run) => plain(run.loss), number: true },
    { key: "faults", name: "Faults", text: (run) => String(run.faults), style: (run) => run.faults ? "bad" : "", number: true, sparse: true },
    { key: "skipped", name: "Skipped", text: (run) => run.skipped.toLocaleString("en"), style: (run) => run.skipped ? "bad" : "", number: true, sparse: true },
    { key: "sent", name: "Sent", text: (run) => size(run.sent), number: true },
    { key: "duration", name: "Duration", text: (run) => duration(run.duration), number: true },
    { key: "left", name: "Left", text: (run) => duration(run.left), number: true, sparse: true },
    { key: "started", name: "Started", text: (run) => moment(run.started) },
  ];

  function element(name, props = {}, ...children) {
    const made = Object.assign(document.createElement(name), props);
    made.append(...children);
    return made;
  }

  // the table ----------------------------------------------------------------------------------------------------
  function makeHead() {
    const head = $("table").tHead.rows[0];
    head.append(element("th", { scope: "col" }, element("span", { textContent: "Compare", className: "note" })));
    for (const column of COLUMNS) {
      const button = element("button", { type: "button", textContent: column.name });
      button.addEventListener("click", () => sort(column.key, sortBy === column.key ? !ascending : column.key === "id"));
      const cell = element("th", { scope: "col", className: column.number ? "number" : "" }, button);
      cell.dataset.key = column.key;
      head.append(cell);
      for (const up of [false, true]) {
        $("sort").append(element("option", { value: `${column.key} ${up}`, textContent: `${column.name} ${up ? "↑" : "↓"}` }));
      }
    }
    $("sort").addEventListener("change", () => { const [key, up] = $("sort").value.split(" "); sort(key, up === "true"); });
  }

  function sort(key, up) {
    [sortBy, ascending] = [key, up];
    arrange();
    remember();
  }

  const cellOf = (row, key) => row.querySelector(`td[data-key="${key}"]`);

  function makeRow(run) {
    const row = element("tr", { tabIndex: -1 });
    const tick = element("input", { type: "checkbox", checked: ticked.has(run.id), ariaLabel: `compare ${run.id}` });
    tick.addEventListener("change", () => choose(run.id, tick.checked));
    row.append(element("td", { className: "tick" }, tick));
    row.dataset.id = run.id;
    for (const column of COLUMNS) {
      const cell = element("td", { className: column.number ? "number" : "" });
      [cell.dataset.name, cell.dataset.key] = [column.name, column.key];
      row.append(cell);
    }
    const open = element("button", { type: "button", textContent: run.id });
    open.addEventListener("click", () => openRun(run.id));
    cellOf(row, "id").className = "name";
    cellOf(row, "id").append(open, element("span", { className: "tags" }));
    cellOf(row, "done").append(element("span", { className: "progress" }, element("i")), element("span"));
    return row;
  }

  function fillRow(row, run) {
    for (const column of COLUMNS) {
      const cell = cellOf(row, column.key);
      if (column.text && cell.textContent !== column.text(run)) cell.textContent = column.text(run);
      if (column.title) cell.title = column.title(run);
      if (column.style) cell.className = `${column.number ? "number" : ""} ${column.style(run)}`;
    }
    const share = run.rounds ? 100 * run.done / run.rounds : 0, done = cellOf(row, "done");
    done.querySelector("i").style.width = `${share}%`;
    done.lastChild.textContent = `${run.done.toLocaleString("en")}/${run.rounds ? run.rounds.toLocaleString("en") : "?"}`;
    cellOf(row, "status").title = run.problem;
    nameRow(row, run.id);
    fillOptions(row, run.id);
    if (run.id === opened) headline();
  }

  // The opened run's score, above all that is known of it.
  function headline() {
    const run = runs.get(opened), parts = run ? [`${run.heading || "Score"} ${run.status === "diverged" ? "–, diverged" : scored(run, run.acc)}`] : [];
    if (run?.forgetting != null) parts.push(`forgetting ${scored(run, run.forgetting)}`);
    if (run && run.status !== "finished") parts.push(`${run.status}, round ${run.done} of ${run.rounds || "?"}`);
    $("detail-score").textContent = parts.join(" · ");
  }

  const noteOf = (id) => ({ name: "", tags: [], hidden: false, ...notes[id] });

  function nameRow(row, id) {
    const { name, tags } = noteOf(id), cell = cellOf(row, "id");
    cell.querySelector("button").textContent = name || id;
    cell.title = name ? id : "";
    cell.querySelector(".tags").replaceChildren(...tags.map((tag) => element("span", { className: "tag", textContent: tag })));
  }

  // options of the recipe as columns -------------------------------------------------------------------------------
  const shownValue = (value) => value == null ? dash : typeof value === "string" ? value : JSON.stringify(value);

  function fillOptions(row, id) {
    for (const cell of row.querySelectorAll("td.option")) cell.remove();
    for (const key of columns) {
      const cell = element("td", { className: "option", textContent: shownValue(known[key]?.[id]) });
      cell.dataset.name = key;
      row.append(cell);
    }
  }

  function arrangeColumns() {
    const head = $("table").tHead.rows[0];
    for (const cell of head.querySelectorAll("th.option")) cell.remove();
    for (const key of columns) head.append(element("th", { scope: "col", className: "option", textContent: key }));
    for (const [id, row] of rows) fillOptions(row, id);
    const box = $("columns").lastElementChild, wanted = Object.keys(known).join("\n");
    if (box.dataset.keys === wanted) return;
    box.dataset.keys = wanted;
    box.replaceChildren(...Object.keys(known).map((key) => {
      const tick = element("input", { type: "checkbox", checked: columns.has(key) });
      tick.addEventListener("change", () => { if (tick.checked) columns.add(key); else columns.delete(key); arrangeColumns(); remember(); });
      return element("label", { className: "check" }, tick, ` ${key}`);
    }));
    if (!wanted) box.textContent = "The runs do not differ in any option.";
  }

  const loadOptions = throttled(async () => {
    try { known = await (await fetched("/api/options")).json(); arrangeColumns(); } catch { /* the next run that comes asks again */ }
  }, 2000);

  // notes ----------------------------------------------------------------------------------------------------------
  function fillNote() {
    const note = noteOf(opened);
    if (document.activeElement?.closest?.("#note")) return; // do not overwrite what is being typed
    $("note-name").value = note.name;
    $("note-tags").value = note.tags.join(", ");
    $("note-hidden").checked = note.hidden;
  }

  async function saveNote() {
    const tags = [...new Set($("note-tags").value.split(",").map((tag) => tag.trim()).filter(Boolean))];
    const note = { name: $("note-name").value.trim(), tags, hidden: $("note-hidden").checked };
    const body = JSON.stringify(note), headers = { "Content-Type": "application/json" };
    try {
      await fetched(`/api/note?${new URLSearchParams({ id: opened })}`, { method: "POST", body, headers });
      takeNotes({ ...notes, [opened]: note });
      $("note-problem").textContent = "";
    } catch (error) {
      $("note-problem").textContent = `Not kept: ${error.message}`;
    }
  }

  function takeNotes(fresh) {
    if (JSON.stringify(fresh) === JSON.stringify(notes)) return;
    notes = fresh;
    for (const [id, row] of rows) nameRow(row, id);
    if (opened) { $("detail-title").textContent = noteOf(opened).name || opened; fillNote(); }
    arrange();
  }

  const words = () => $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);

  function matching() {
    const wanted = words(), status = $("status").value, method = $("method").value;
    return [...runs.values()].filter((run) => {
      const text = `${run.id} ${run.method} ${run.recipe} ${run.dataset} ${run.scenario} seed ${run.seed} ${run.status} ${noteOf(run.id).name} ${noteOf(run.id).tags.join(" ")}`.toLowerCase();
      if (noteOf(run.id).hidden && !$("hidden").checked) return false;
      return (!status || run.status === status) && (!method || run.method === method) && wanted.every((word) => text.includes(word));
    });
  }

  function compareBy(a, b) {
    const [x, y] = [a[sortBy], b[sortBy]];
    if (x == null || y == null) return (x == null) - (y == null) || a.id.localeCompare(b.id);
    const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return (ascending ? order : -order) || a.id.localeCompare(b.id, "en", { numeric: true });
  }

  let shown = [];
  const heads = new Map(); // group -> its row

  // Rows in order, with a heading before each group.
  function inGroups(found) {
    const by = $("group").value;
    if (!by) return found.map((run) => rows.get(run.id));
    const groups = Map.groupBy(found, (run) => run[by] || dash);
    return [...groups].flatMap(([name, own]) => [groupHead(name, own), ...own.map((run) => rows.get(run.id))]);
  }

  function groupHead(name, own) {
    if (!heads.has(name)) {
      const tick = element("input", { type: "checkbox", ariaLabel: `compare all of ${name}` });
      tick.addEventListener("change", () => { for (const id of heads.get(name).ids) choose(id, tick.checked); });
      const cells = [element("td", { className: "tick" }, tick), element("th", { colSpan: 99, scope: "rowgroup" })];
      heads.set(name, element("tr", { className: "group" }, ...cells));
    }
    const row = heads.get(name);
    row.ids = own.map((run) => run.id);
    row.querySelector("input").checked = row.ids.every((id) => ticked.has(id));
    row.cells[1].textContent = `${name} (${own.length})`;
    return row;
  }

  // Filter and sort; rows are moved only where the order changed, so that focus and selection stay.
  function arrange() {
    const body = $("table").tBodies[0], wanted = inGroups(matching().sort(compareBy));
    shown = wanted.filter((row) => row.dataset.id).map((row) => row.dataset.id);
    wanted.forEach((row, i) => { if (body.rows[i] !== row) body.insertBefore(row, body.rows[i] ?? null); });
    while (body.rows.length > wanted.length) body.lastElementChild.remove();
    for (const { key, sparse } of COLUMNS) {
      if (sparse) $("table").classList.toggle(`without-${key}`, ![...runs.values()].some((run) => run[key]));
    }
    for (const cell of $("table").tHead.rows[0].cells) {
      cell.ariaSort = cell.dataset.key === sortBy ? (ascending ? "ascending" : "descending") : null;
    }
    $("sort").value = `${sortBy} ${ascending}`;
    $("count").textContent = shown.length === runs.size ? `${runs.size} runs` : `${shown.length} of ${runs.size} runs`;
    $("empty").hidden = shown.length > 0;
    $("empty").classList.remove("loading");
    $("empty").textContent = runs.size ? "No run matches." : "No run here yet; one appears as soon as it starts.";
    scheduleCompare();
  }

  function options(select, values) {
    const now = select.value, known = [...select.options].slice(1).map((option) => option.value);
    const wanted = [...new Set(values)].sort();
    if (known.join("\n") === wanted.join("\n")) return;
    select.replaceChildren(select.options[0], ...wanted.map((value) => element("option", { value, textContent: value })));
    select.value = wanted.includes(now) ? now : "";
  }

  function take({ runs: fresh, gone, problems, notes: said }) {
    takeNotes(said ?? notes);
    if (gone.length || fresh.some((run) => !runs.has(run.id))) loadOptions();
    for (const run of fresh) {
      runs.set(run.id, run);
      if (!rows.has(run.id)) rows.set(run.id, makeRow(run));
      fillRow(rows.get(run.id), run);
    }
    for (const id of gone) {
      runs.delete(id);
      rows.get(id)?.remove();
      rows.delete(id);
      ticked.delete(id);
    }
    options($("status"), [...runs.values()].map((run) => run.status));
    options($("method"), [...runs.values()].map((run) => run.method));
    $("problems").replaceChildren(...problems.map((text) => element("p", { className: "warning", textContent: text })));
    arrange();
    const moved = new Set(fresh.map((run) => run.id));
    if (compared().some((id) => moved.has(id)) || gone.length) scheduleCompare(true);
    if (opened && (moved.has(opened) || gone.includes(opened))) scheduleDetail();
  }

  // drawings -----------------------------------------------------------------------------------------------------
  // Put HTML from the server in place; lines that were hidden stay hidden.
  function swap(box, html) {
    if (box.lastHtml === html) return;
    const hidden = new Set([...box.querySelectorAll(".legend button[aria-pressed=false]")].map((button) => button.textContent));
    const folded = [...box.querySelectorAll("details")].map((part) => part.open);
    box.innerHTML = html;
    box.lastHtml = html;
    for (const button of box.querySelectorAll(".legend button")) if (hidden.has(button.textContent)) button.click();
    box.querySelectorAll("details").forEach((part, i) => { part.open = folded[i] ?? part.open; });
  }

  // Call `work` at most once per interval, and never twice at a time.
  function throttled(work, rest) {
    let waiting = false, busy = false, again = false;
    async function go() {
      waiting = false;
      busy = true;
      try { await work(); } finally { busy = false; }
      waiting = true;
      setTimeout(() => { waiting = false; if (again) { again = false; go(); } }, rest);
    }
    return () => { if (waiting || busy) again = true; else go(); };
  }

  async function fetched(address, options) {
    const answer = await fetch(address, options);
    if (answer.ok) return answer;
    const failure = await answer.json().catch(() => ({ detail: answer.statusText }));
    throw new Error(typeof failure.detail === "string" ? failure.detail : JSON.stringify(failure.detail));
  }

  const compared = () => ticked.size ? [...ticked].filter((id) => runs.has(id)) : shown.slice(0, AT_FIRST);

  function selectionText(ids) {
    if (ticked.size) return `${ids.length} ticked ${ids.length === 1 ? "run" : "runs"}.`;
    return shown.length > ids.length ? `The first ${ids.length} of ${shown.length} runs below; tick runs to choose.` : "All runs below; tick runs to choose.";
  }

  // The address of the comparison that is chosen.
  function comparison(ids) {
    const what = $("what").value === "panels" ? PANELS : [$("what").value];
    const query = new URLSearchParams([...ids.map((id) => ["run", id]), ...what.map((kind) => ["what", kind])]);
    for (const name of CHOICES.slice(1)) if ($(name).value) query.set(name, $(name).value);
    if ($("log").checked) query.set("log", "true");
    return query.toString();
  }

  let last = "";
  async function drawCompare() {
    const ids = compared();
    $("chosen").textContent = ids.length ? selectionText(ids) : "";
    $("report").disabled = !ids.length;
    if (!ids.length) return swap($("chart"), "");
    const query = comparison(ids);
    last = query;
    $("chart").classList.add("busy");
    try {
      swap($("chart"), await (await fetched(`/api/compare?${query}`)).text());
    } catch (error) {
      $("chosen").textContent = `Cannot draw: ${error.message}`;
    } finally {
      $("chart").classList.remove("busy");
    }
  }
  const redraw = throttled(drawCompare, 900);
  function scheduleCompare(moved = false) {
    if (moved || comparison(compared()) !== last) redraw();
  }

  async function drawDetail() {
    if (!opened) return;
    const id = opened;
    try {
      const { sections } = await (await fetched(`/api/run?${new URLSearchParams({ id })}`)).json();
      if (opened === id) place(sections);
    } catch (error) {
      const text = element("p", { className: "warning", textContent: error.message }).outerHTML;
      if (opened === id) place({ problem: text });
    }
  }
  const scheduleDetail = throttled(drawDetail, 900);

  function place(sections) {
    $("sections").querySelector(":scope > .loading")?.remove();
    const boxes = new Map([...$("sections").children].map((box) => [box.dataset.section, box]));
    for (const [name, box] of boxes) if (!(name in sections)) box.remove();
    for (const [name, html] of Object.entries(sections)) {
      let box = boxes.get(name);
      if (!box) { box = element("div"); box.dataset.section = name; $("sections").append(box); }
      swap(box, html);
    }
  }

  function openRun(id, focus = true) {
    rows.get(opened)?.classList.remove("open");
    opened = id;
    rows.get(id)?.classList.add("open");
    $("detail").hidden = !id;
    $("detail-title").textContent = noteOf(id).name || id;
    document.body.classList.toggle("reading-run", Boolean(id));
    headline();
    if (id) {
      fillNote();
      $("sections").replaceChildren(element("p", { className: "note loading", textContent: "Loading …" }));
      scheduleDetail();
      if (focus) { $("detail-title").focus(); $("detail").scrollIntoView({ block: "nearest" }); }
    }
    remember();
  }

  function closeRun() {
    const id = opened;
    openRun("");
    rows.get(id)?.querySelector(".name button").focus();
  }

  function choose(id, on) {
    if (on) ticked.add(id); else ticked.delete(id);
    rows.get(id).querySelector("input").checked = on;
    scheduleCompare();
    remember();
  }

  // the address --------------------------------------------------------------------------------------------------
  function remember() {
    const kept = new URLSearchParams([...ticked].map((id) => ["run", id]));
    for (const name of [...CHOICES, "filter", "status", "method", "group"]) if ($(name).value) kept.set(name, $(name).value);
    for (const name of ["log", "hidden"]) if ($(name).checked) kept.set(name, "true");
    for (const key of columns) kept.append("column", key);
    kept.set("sort", `${sortBy} ${ascending}`);
    if (opened) kept.set("open", opened);
    history.replaceState(null, "", `#${kept}`);
  }

  function recall() {
    const kept = new URLSearchParams(location.hash.slice(1));
    for (const id of kept.getAll("run")) ticked.add(id);
    if (narrow) $("what").value = "acc"; // a phone begins with one plot
    for (const name of [...CHOICES, "filter", "group"]) if (kept.has(name)) $(name).value = kept.get(name);
    for (const name of ["log", "hidden"]) $(name).checked = kept.get(name) === "true";
    for (const key of kept.getAll("column")) columns.add(key);
    for (const name of ["status", "method"]) {
      if (kept.get(name)) $(name).append(element("option", { value: kept.get(name), textContent: kept.get(name), selected: true }));
    }
    if (kept.has("sort")) { const [key, up] = kept.get("sort").split(" "); [sortBy, ascending] = [key, up === "true"]; }
    if (kept.get("open")) openRun(kept.get("open"), false);
  }

  // keys and events ----------------------------------------------------------------------------------------------
  function move(step) {
    const body = $("table").tBodies[0], now = document.activeElement.closest?.("#table tbody tr");
    let next = now ? body.rows[now.sectionRowIndex + step] : body.rows[step > 0 ? 0 : body.rows.length - 1];
    while (next && !next.dataset.id) next = body.rows[next.sectionRowIndex + step];
    next?.focus();
    next?.scrollIntoView({ block: "nearest" });
  }

  document.addEventListener("keydown", (event) => {
    const row = event.target.closest?.("#table tr[data-id]"), typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && !["checkbox", "range"].includes(event.target.type);
    const onDrawing = event.target.closest?.("svg");
    if (event.key === "Escape" && !onDrawing) { if (typing) event.target.blur(); else if (opened) closeRun(); return; }
    if (typing || onDrawing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/") { event.preventDefault(); $("filter").focus(); }
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") { if (row || event.target === document.body) { event.preventDefault(); move(event.key === "ArrowDown" ? 1 : -1); } }
    else if (event.key === " " && row && event.target === row) { event.preventDefault(); choose(row.dataset.id, !ticked.has(row.dataset.id)); }
    else if (event.key === "Enter" && row && event.target === row) openRun(row.dataset.id);
  });
  for (const name of ["filter", "status", "method", "group", "hidden"]) $(name).addEventListener("input", () => { arrange(); remember(); });
  for (const name of [...CHOICES, "log"]) $(name).addEventListener("input", () => { scheduleCompare(); remember(); });
  $("clear").addEventListener("click", () => { for (const id of [...ticked]) { ticked.delete(id); const row = rows.get(id); if (row) row.querySelector("input").checked = false; } scheduleCompare(); remember(); });
  $("close").addEventListener("click", closeRun);
  $("note").addEventListener("change", saveNote);
  $("note").addEventListener("submit", (event) => event.preventDefault());
  $("report").addEventListener("click", () => {
    const ids = compared().slice(0, MOST);
    if (compared().length > MOST) $("chosen").textContent = `A report holds at most ${MOST} runs: the first ${MOST} are in it.`;
    element("a", { href: `/api/report?${new URLSearchParams(ids.map((id) => ["run", id]))}`, download: "everfed-report.html" }).click();
  });

  makeHead();
  recall();
  fetched("/api/runs").then((answer) => answer.json()).then((found) => { $("root").textContent = found.root; }).catch(() => {});
  const source = new EventSource("/api/live");
  // after an interruption the server sends all runs again; runs that are not among them are removed
  let fresh = true;
  source.addEventListener("open", () => { $("live").textContent = "live"; $("live").className = "live on"; fresh = true; });
  source.addEventListener("error", () => { $("live").textContent = "not connected; trying again"; $("live").className = "live off"; });
  source.addEventListener("runs", (event) => {
    const news = JSON.parse(event.data);
    if (fresh) { const named = new Set(news.runs.map((run) => run.id)); news.gone = [...runs.keys()].filter((id) => !named.has(id)); fresh = false; }
    take(news);
  });
})();
