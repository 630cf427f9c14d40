"""Cells in rows and columns: scores by task, clients by rounds, clients by classes. HTML and SVG, as in `charts`."""

from __future__ import annotations

from collections.abc import Sequence

from everfed.reports.charts import chip, tick
from everfed.reports.colours import on_heat
from everfed.reports.formats import plain, whole_ticks
from everfed.reports.markup import Html, join, tag
from everfed.reports.series import ClassMix, ClientGrid

NUMBERED_UP_TO = 20  # tasks whose numbers fit into the cells
CELLS_WITH_NUMBERS = 800  # of all divisions of the data together
SHADES = 12


def matrix(entries: Sequence[Sequence[tuple[float, float] | None]], unit: str) -> Html:
    """Row t, column i: the score on task i after task t, shaded. entries: (mean, deviation)."""
    known = [entry[0] for row in entries for entry in row if entry is not None]
    low, high = (0.0, 1.0) if unit == "%" else (min(known, default=0.0), max(known, default=1.0))
    shares = [[None if e is None else (e[0] - low) / ((high - low) or 1.0) for e in row] for row in entries]
    if max((len(row) for row in entries), default=0) > NUMBERED_UP_TO:
        return _shaded(shares, low, high, unit)
    head = tag("tr", tag("td", "after ↓ on →"), *(tag("th", f"{i + 1}", scope="col") for i in range(len(entries[0]))))
    rows = [
        tag("tr", tag("th", f"{t + 1}", scope="row"), *(_cell(e, s, unit) for e, s in zip(row, share, strict=True)))
        for t, (row, share) in enumerate(zip(entries, shares, strict=True))
    ]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_="matrix"), class_="scroll")


def _cell(entry: tuple[float, float] | None, share: float | None, unit: str) -> Html:
    if entry is None or share is None:
        return tag("td", "", class_="empty")
    mean, deviation = (value * (100 if unit == "%" else 1) for value in entry)
    text = f"{mean:.1f}" if unit == "%" else plain(mean)
    title = f"{mean:.2f} ± {deviation:.2f}{' %' if unit else ''}"
    return tag("td", text, style=_heat(share), title=title)


def _heat(share: float) -> str:
    """A shaded cell, and for each theme the colour of text that can be read on it."""
    percent = round(100 * min(max(share, 0.0), 1.0))
    light, dark = on_heat(percent)
    return f"--v:{percent}%;--on-light:{light};--on-dark:{dark}"


def _shaded(shares: Sequence[Sequence[float | None]], low: float, high: float, unit: str) -> Html:
    levels = [[None if s is None else min(int(s * SHADES), SHADES - 1) for s in row] for row in shares]
    styles = [f"--v:{100 * (i + 0.5) / SHADES:.0f}%" for i in range(SHADES)]
    scale = 100 if unit == "%" else 1
    ends = f"from {low * scale:.4g} (light) to {high * scale:.4g}{' %' if unit else ''} (strong)"
    drawing = _cells(levels, styles, "shades", f"Scores by task, shaded {ends}.")
    names = (f"after task ↓ ({len(shares)})", f"on task → ({max(map(len, shares))})")
    return tag("div", tag("p", f"{names[0]}, {names[1]}, {ends}", class_="note"), drawing, class_="square")


def _cells(levels: Sequence[Sequence[int | None]], styles: Sequence[str], kind: str, about: str) -> Html:
    """A picture of equal cells, one path per level; neighbours of the same level in a row are drawn as one."""
    paths: dict[int, list[str]] = {}
    for row, found in enumerate(levels):
        for level, first, last in _stretches(found):
            paths.setdefault(level, []).append(f"M{first} {row}h{last - first}v1H{first}z")
    drawn = [tag("path", d="".join(paths[level]), style=styles[level]) for level in sorted(paths)]
    width, height = max(map(len, levels), default=1), len(levels)
    box = f"0 0 {width} {height}"
    return tag("svg", *drawn, viewBox=box, preserveAspectRatio="none", role="img", aria_label=about, class_=kind)


def _stretches(row: Sequence[int | None]) -> list[tuple[int, int, int]]:
    """(level, first, end) of each stretch of equal levels."""
    found: list[tuple[int, int, int]] = []
    for i, level in enumerate(row):
        if level is None:
            continue
        if found and found[-1][0] == level and found[-1][2] == i:
            found[-1] = (level, found[-1][1], i + 1)
        else:
            found.append((level, i, i + 1))
    return found


def task_colour(task: int, tasks: int) -> str:
    """Tasks run through the hues in order, all equally light."""
    hue = 275 - 245 * (task - 1) / max(1, tasks - 1)
    return f"--c:oklch(var(--task-light) var(--task-strong) {hue:.0f})"


def participation(grid: ClientGrid, tasks: int) -> Html:
    """Clients by rounds, coloured by task."""
    about = f"Which of {grid.clients} clients trained in which of {grid.rounds} rounds, coloured by task."
    legend = _legend([f"task {task}" for task in range(1, tasks + 1)])
    return join(legend, _by_client(grid, tasks, about))


def suspicions(grid: ClientGrid, names: Sequence[str]) -> Html:
    """Clients by rounds, coloured by the signal of a suspected shift."""
    about = f"In which of {grid.rounds} rounds the data of which of {grid.clients} clients seemed to have changed."
    return join(_legend(names), _by_client(grid, len(names), about))


def _by_client(grid: ClientGrid, count: int, about: str) -> Html:
    """A grid with `count` levels."""
    levels = [[None if level is None else level - 1 for level in row] for row in grid.cells]
    styles = [task_colour(level, count) for level in range(1, count + 1)]
    width = grid.rounds_per_column * len(grid.cells[0])
    across = [tick("left", (n - 0.5) / width, f"{n:,}") for n in whole_ticks(1, grid.rounds)]
    height = grid.clients_per_row * len(grid.cells)
    down = [tick("top", (n + 0.5) / height, f"{n}") for n in whole_ticks(0, grid.clients - 1, 6)]
    return tag(
        "div",
        tag("div", "client", class_="y-name"),
        tag("div", *down, class_="y-ticks", aria_hidden="true"),
        _cells(levels, styles, "presence", about),
        tag("div", *across, class_="x-ticks", aria_hidden="true"),
        tag("div", "round", class_="x-name"),
        class_="plot",
        style=f"--h:{min(24, max(6, len(grid.cells) * 0.7)):.1f}rem",
    )


def _legend(names: Sequence[str]) -> Html:
    """Names with their colours, at most a dozen of them."""
    colours = [task_colour(level, len(names)) for level in range(1, len(names) + 1)]
    every = -(-len(names) // 12)
    shown = list(zip(names, colours, strict=True))[::every]
    chips = (tag("li", chip(colour), name) for name, colour in shown)
    return tag("ul", *chips, class_="legend")


def class_mix(mixes: Sequence[ClassMix], tasks: int) -> Html:
    """Clients by classes, one division after the other; the shade is the number of samples relative to the largest."""
    if sum(len(mix.labels) * len(mix.counts) for mix in mixes) > CELLS_WITH_NUMBERS:
        return _mix_picture(mixes, tasks)
    return tag("div", *(_mix_table(mix) for mix in mixes), class_="side-by-side")


def _mix_table(mix: ClassMix) -> Html:
    most = max((count for row in mix.counts for count in row), default=0) or 1
    head = tag("tr", tag("td", "client ↓ class →"), *(tag("th", f"{label}", scope="col") for label in mix.labels))
    rows = [
        tag("tr", tag("th", f"{client}", scope="row"), *(_count(count, most) for count in row))
        for client, row in enumerate(mix.counts)
    ]
    title = tag("caption", f"task {mix.tasks[0]}" if len(mix.tasks) == 1 else "every task")
    return tag("div", tag("table", title, tag("thead", head), tag("tbody", *rows), class_="matrix"), class_="scroll")


def _count(count: int, most: int) -> Html:
    if not count:
        return tag("td", "", class_="empty")
    return tag("td", f"{count}", style=_heat(count / most))


def _mix_picture(mixes: Sequence[ClassMix], tasks: int) -> Html:
    """All divisions in one picture: columns are the classes of task 1, then those of task 2, ..."""
    steps = 5
    most = max((count for mix in mixes for row in mix.counts for count in row), default=0) or 1
    levels: list[list[int | None]] = [[] for _ in mixes[0].counts]
    for i, mix in enumerate(mixes):
        for row, counts in zip(levels, mix.counts, strict=True):
            row += [None if not n else i * steps + min(steps - 1, n * steps // most) for n in counts]
    hues = [task_colour(mix.tasks[0], tasks) for mix in mixes]
    styles = [f"{hue};opacity:{(step + 1) / steps:.1f}" for hue in hues for step in range(steps)]
    about = f"Samples by client (down) and class (across), stronger where there are more, up to {most}."
    return join(tag("p", about, class_="note"), _cells(levels, styles, "presence", about))
