"""Charts as HTML and SVG, without any script: they stretch to any width, follow the page's theme, and print.

The drawing is an SVG of 1000 x 1000 units that is stretched to its box; strokes keep their width
(`vector-effect: non-scaling-stroke` in page.css), and all text is HTML beside it, so it never scales. charts.js adds
reading of values under the pointer or by arrow keys, and it reads them back from the drawing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from everfed.report.groups import COLOURS, Colours
from everfed.report.markup import NOTHING, Child, Html, join, tag
from everfed.report.numbers import plain, size, ticks, whole_ticks
from everfed.report.series import ClassMix, Grid, Line

UNITS = 1000
DASHES = ("", "7 4", "2 3", "9 3 2 3")
DOTS_UP_TO = 40  # points of a line that are marked one by one


@dataclass(frozen=True)
class Axis:
    """unit: "%", "B" or "" (how values read). floor, ceiling: the axis never shows less or more than this."""

    name: str
    unit: str = ""
    floor: float | None = None
    ceiling: float | None = None

    def shown(self, value: float) -> float:
        """The value as it is drawn: fractions in per cent, without the noise of their last digits."""
        return round(100.0 * value, 6) if self.unit == "%" else value

    def allows(self, value: float) -> bool:
        """Is the value within what the axis may show?"""
        above = self.floor is None or value >= self.floor
        return above and (self.ceiling is None or value <= self.ceiling)

    def text(self, value: float) -> str:
        return size(value) if self.unit == "B" else f"{value:,.10g}"


@dataclass(frozen=True)
class Marks:
    """Vertical marks on the x axis: (label, where) of each stretch's beginning, as tasks begin at rounds."""

    stretches: Sequence[tuple[str, float]] = field(default=())


def figure(title: str, body: Html, about: Child = None, name: str = "", notes: Sequence[str] = ()) -> Html:
    """A figure with its title, a description and notes."""
    paragraphs = [tag("p", text, class_="note") for text in notes]
    caption = tag("figcaption", tag("h3", title), tag("p", about) if about else None)
    return tag("figure", caption, body, *paragraphs, class_="chart", id=name or None)


def missing(title: str, why: str, name: str = "") -> Html:
    """A message in place of a figure that cannot be drawn."""
    return figure(title, tag("p", why, class_="missing"), name=name)


# lines -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Frame:
    """The window on the data."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return (value - self.x0) / (self.x1 - self.x0)

    def y(self, value: float) -> float:
        return (value - self.y0) / (self.y1 - self.y0)

    def point(self, x: float, y: float) -> str:
        return f"{_units(self.x(x))},{_units(1 - self.y(y))}"


def _units(share: float) -> str:
    """A share of the box in drawing units, short."""
    return f"{share * UNITS:.2f}".rstrip("0").rstrip(".")


def lines(found: Sequence[Line], x: Axis, y: Axis, about: str, marks: Marks | None = None) -> Html:
    """Curves with bands. about: text for screen readers. Lines of the same colour have different dashes."""
    frame, y_ticks = _frame(found, y)
    legend = tag("ul", *(_legend_entry(i, line, dash) for i, line, dash in _dashed(found)), class_="legend")
    drawing = tag(
        "svg",
        tag("path", d="".join(f"M0 {_units(1 - frame.y(tick))}H{UNITS}" for tick in y_ticks), class_="grid"),
        _mark_lines(frame, marks),
        *(_curve(i, line, dash, frame, y) for i, line, dash in _dashed(found)),
        tag("path", d="", class_="cursor"),
        viewBox=f"0 0 {UNITS} {UNITS}",
        preserveAspectRatio="none",
        role="img",
        tabindex=0,
        aria_label=f"{about} Use the arrow keys to read values.",
        data_frame=f"{frame.x0:g} {frame.x1:g} {frame.y0:g} {frame.y1:g}",
        data_x=x.name,
        data_unit=y.unit,
    )
    plot = tag(
        "div",
        _mark_names(frame, marks),
        tag("div", y.name if y.unit in ("", "B") else f"{y.name}, {y.unit}", class_="y-name"),
        tag("div", *(_tick("bottom", frame.y(t), y.text(t)) for t in y_ticks), class_="y-ticks", aria_hidden="true"),
        drawing,
        tag(
            "div",
            *(_tick("left", frame.x(t), x.text(t)) for t in _x_ticks(frame)),
            class_="x-ticks",
            aria_hidden="true",
        ),
        tag("div", x.name, class_="x-name"),
        tag("output", class_="reading", aria_live="polite"),
        class_="plot",
    )
    return join(legend, plot)


def _dashed(found: Sequence[Line]) -> list[tuple[int, Line, str]]:
    """(position, line, dash): the n-th line of a colour has the n-th dash."""
    seen: dict[int, int] = {}
    result = []
    for i, line in enumerate(found):
        colour = line.colour % COLOURS
        turn = max(seen.get(colour, -1) + 1, line.colour // COLOURS if colour not in seen else 0)
        seen[colour] = turn
        result.append((i, line, DASHES[turn % len(DASHES)]))
    return result


def _frame(found: Sequence[Line], y: Axis) -> tuple[_Frame, list[float]]:
    xs = [value for line in found for value in line.x]
    ys = [y.shown(value) for line in found for value in (*line.y, *(line.low or ()), *(line.high or ()))]
    floor, ceiling = (min(ys) if y.floor is None else y.floor), (max(ys) if y.ceiling is None else y.ceiling)
    allowed = [tick for tick in ticks(max(min(ys), floor), min(max(ys), ceiling)) if y.allows(tick)]
    x0, x1 = min(xs), max(xs)
    x0, x1 = (x0, x1) if x1 > x0 else (x0 - 0.5, x1 + 0.5)
    return _Frame(x0, x1, allowed[0], allowed[-1]), allowed


def _x_ticks(frame: _Frame) -> list[int]:
    return whole_ticks(-int(-frame.x0 // 1), int(frame.x1))


def _tick(side: str, share: float, text: str) -> Html:
    return tag("span", text, style=f"{side}:{100 * share:.2f}%")


def _legend_entry(index: int, line: Line, dash: str) -> Html:
    swatch = tag(
        "svg",
        tag("path", d="M1 5H25", stroke_dasharray=dash or None),
        viewBox="0 0 26 10",
        class_="swatch",
        style=_colour(line.colour),
        aria_hidden="true",
    )
    seeds = f" ({line.seeds} seeds)" if line.seeds > 1 else ""
    button = tag("button", swatch, f"{line.label}{seeds}", type="button", data_line=index, aria_pressed="true")
    return tag("li", button)


def _colour(index: int) -> str:
    return f"--c:var(--s{index % COLOURS})"


def _curve(index: int, line: Line, dash: str, frame: _Frame, y: Axis) -> Html:
    points = [frame.point(a, y.shown(b)) for a, b in zip(line.x, line.y, strict=True)]
    band = NOTHING
    if line.low is not None and line.high is not None:
        edge = [*zip(line.x, line.high, strict=True), *reversed([*zip(line.x, line.low, strict=True)])]
        clipped = ((a, min(max(y.shown(b), frame.y0), frame.y1)) for a, b in edge)
        band = tag("polygon", points=" ".join(frame.point(a, b) for a, b in clipped), class_="band")
    dots = NOTHING
    if len(points) <= DOTS_UP_TO:
        dots = tag("path", d="".join(f"M{point}h0" for point in points), class_="dots")
    curve = tag("polyline", points=" ".join(points), class_="line", stroke_dasharray=dash or None)
    return tag("g", band, curve, dots, data_line=index, data_label=line.label, style=_colour(line.colour))


def _mark_lines(frame: _Frame, marks: Marks | None) -> Html:
    inner = [where for _, where in (marks.stretches if marks else ()) if frame.x0 < where <= frame.x1]
    return tag("path", d="".join(f"M{_units(frame.x(where))} 0V{UNITS}" for where in inner), class_="marks")


def _mark_names(frame: _Frame, marks: Marks | None) -> Html:
    """Names above the stretches; at most a dozen, evenly chosen."""
    stretches = [
        (text, max(where, frame.x0)) for text, where in (marks.stretches if marks else ()) if where <= frame.x1
    ]
    every = -(-len(stretches) // 12)
    names = [_tick("left", frame.x(where), text) for text, where in stretches[:: every or 1]]
    return tag("div", *names, class_="mark-names", aria_hidden="true")


# bars --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Bar:
    """A stacked horizontal bar: (what, how much) from left to right. colour: of the method it is about."""

    label: str
    stack: Sequence[tuple[str, float]]
    colour: int | None = None

    @property
    def total(self) -> float:
        return sum(value for _, value in self.stack)


def bars(found: Sequence[Bar], text: Callable[[float], str], name: str) -> Html:
    """Bars of one scale. Each kind of piece has its colour, named above when there is more than one."""
    kinds = list(dict.fromkeys(what for bar in found for what, _ in bar.stack))
    colours = Colours()
    colours.assign(kinds)
    longest = max((bar.total for bar in found), default=0.0) or 1.0
    legend = tag("ul", *(tag("li", _chip(colours.of(kind)), kind) for kind in kinds), class_="legend")
    rows = [_bar(bar, colours, longest, text) for bar in found]
    head = tag("tr", tag("th", "", scope="col"), tag("th", name, scope="col"), tag("th", "total", scope="col"))
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="bars")
    return join(legend if len(kinds) > 1 else None, table)


def _chip(colour: int) -> Html:
    return tag("span", class_="chip", style=_colour(colour))


def _bar(bar: Bar, colours: Colours, longest: float, text: Callable[[float], str]) -> Html:
    pieces = [
        tag(
            "span",
            class_="piece",
            style=f"{_colour(colours.of(what))};width:{100 * value / longest:.3f}%",
            title=f"{what}: {text(value)}",
        )
        for what, value in bar.stack
    ]
    spelled = ", ".join(f"{what} {text(value)}" for what, value in bar.stack)
    strip = tag("div", *pieces, class_="strip", role="img", aria_label=spelled)
    label = tag("th", None if bar.colour is None else _chip(bar.colour), bar.label, scope="row")
    return tag("tr", label, tag("td", strip), tag("td", text(bar.total), class_="number"))


# matrices ----------------------------------------------------------------------------------------------------------
NUMBERED_UP_TO = 20  # tasks whose numbers fit into the cells
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
    return tag("td", text, class_="high" if share > 0.5 else None, style=f"--v:{100 * share:.0f}%", title=title)


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


# who saw what when -------------------------------------------------------------------------------------------------
def task_colour(task: int, tasks: int) -> str:
    """Tasks run through the hues in order, all equally light."""
    hue = 275 - 245 * (task - 1) / max(1, tasks - 1)
    return f"--t:{hue:.0f}"


def participation(grid: Grid, tasks: int) -> Html:
    """Clients by rounds, coloured by task."""
    about = f"Which of {grid.clients} clients trained in which of {grid.rounds} rounds, coloured by task."
    return join(task_legend(tasks), _by_client(grid, tasks, about))


def suspicions(grid: Grid, names: Sequence[str]) -> Html:
    """Clients by rounds, coloured by the signal of a suspected shift."""
    about = f"In which of {grid.rounds} rounds the data of which of {grid.clients} clients seemed to have changed."
    return join(_legend(names), _by_client(grid, len(names), about))


def _by_client(grid: Grid, count: int, about: str) -> Html:
    """A grid with `count` levels."""
    levels = [[None if level is None else level - 1 for level in row] for row in grid.cells]
    styles = [task_colour(level, count) for level in range(1, count + 1)]
    width = grid.rounds_per_column * len(grid.cells[0])
    across = [_tick("left", (n - 0.5) / width, f"{n:,}") for n in whole_ticks(1, grid.rounds)]
    height = grid.clients_per_row * len(grid.cells)
    down = [_tick("top", (n + 0.5) / height, f"{n}") for n in whole_ticks(0, grid.clients - 1, 6)]
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


def task_legend(tasks: int) -> Html:
    """Colours of the tasks, at most a dozen spelled out."""
    return _legend([f"task {t}" for t in range(1, tasks + 1)])


def _legend(names: Sequence[str]) -> Html:
    colours = [task_colour(level, len(names)) for level in range(1, len(names) + 1)]
    every = -(-len(names) // 12)
    shown = list(zip(names, colours, strict=True))[::every]
    chips = (tag("li", tag("span", class_="chip task", style=colour), name) for name, colour in shown)
    return tag("ul", *chips, class_="legend")


CELLS_WITH_NUMBERS = 800


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
    return tag("td", f"{count}", class_="high" if count > most / 2 else None, style=f"--v:{100 * count / most:.0f}%")


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
