// A click on a heading sorts its table by that column; a second one turns the order round.
for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("th").forEach((heading, column) => {
    heading.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") !== "descending";
      const body = table.tBodies[0];
      const value = (row) => row.cells[column].dataset.value;
      const order = (a, b) => {
        const [x, y] = [value(a), value(b)];
        const [p, q] = [Number(x.replace("inf", "Infinity")), Number(y.replace("inf", "Infinity"))];
        return Number.isNaN(p) || Number.isNaN(q) ? x.localeCompare(y) : p < q ? -1 : Number(p > q);
      };
      const rows = [...body.rows].sort((a, b) => (down ? order(b, a) : order(a, b)));
      body.append(...rows);
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    });
  });
}
