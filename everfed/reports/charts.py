"""Lines, bars and grids of cells as HTML and SVG, without any script.

They stretch to any width, follow the page's theme, and print.

The drawing is an SVG of 1000 x 1000 units that is stretched to its box; strokes keep their width
(`vector-effect: non-scaling-stroke` in page.css), and all text is HTML beside it, so it never scales. charts.js adds
reading of values under the pointer or by arrow keys, and it reads them back from the drawing itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from everfed.metrics.scores import plain_text
from everfed.reports.colours import COLOURS, PIECES
from everfed.reports.formats import NOTHING, Child, Html, duration, join, size, tag
from everfed.reports.series import ClassMix, ClientGrid, Line

UNITS = 1000
DASHES = ("", "7 4", "2 3", "9 3 2 3")
DOTS_UP_TO = 40  # points of a line that are marked one by one
TICK_SIGN = 0.49  # rem: the width of a sign of a tick, in a wide font


@dataclass(frozen=True)
class Axis:
    """unit: "%", "B", "s" or "" (how values read). floor, ceiling: the axis never shows less or more than this.
    log: positions are logarithms; values must be above 0."""

    name: str
    unit: str = ""
    floor: float | None = None
    ceiling: float | None = None
    log: bool = False

    def shown(self, value: float) -> float:
        """The value as it is drawn: fractions in per cent, without the noise of their last digits."""
        return round(100.0 * value, 6) if self.unit == "%" else value

    def has(self, value: float) -> bool:
        """Does the axis have a place for the value? A logarithmic one has none for 0 and below."""
        return not self.log or self.shown(value) > 0

    def place(self, value: float) -> float:
        """Where a value lies on the axis."""
        return math.log10(self.shown(value)) if self.log else self.shown(value)

    def allows(self, value: float) -> bool:
        """Is the value within what the axis may show?"""
        above = self.floor is None or value >= self.floor
        return above and (self.ceiling is None or value <= self.ceiling)

    def text(self, place: float) -> str:
        value = 10**place if self.log else place
        if self.unit in ("B", "s"):
            return size(value) if self.unit == "B" else duration(value)
        return f"{value:,.4g}" if self.log else f"{value:,.10g}"

    @property
    def title(self) -> str:
        return f"{self.name}, %" if self.unit == "%" else self.name


@dataclass(frozen=True)
class Marks:
    """Vertical marks on the x axis: (label, where) of each stretch's beginning, as tasks begin at rounds."""

    stretches: Sequence[tuple[str, float]] = field(default=())


def figure(title: str, body: Html, about: Child = None, name: str = "", notes: Sequence[str] = ()) -> Html:
    """A figure with its title, a description and notes."""
    paragraphs = [tag("p", text, class_="note") for text in notes]
    save = [tag("button", kind, type="button", data_save=kind, title=f"save as {kind}") for kind in ("SVG", "PNG")]
    buttons = None if is_missing(body) else tag("div", *save, class_="save")
    caption = tag("figcaption", buttons, tag("h3", title), tag("p", about) if about else None)
    return tag("figure", caption, body, *paragraphs, class_="chart", data_figure=name or None)


def missing(title: str, why: str, name: str = "") -> Html:
    """A message in place of a figure that cannot be drawn."""
    return figure(title, tag("p", why, class_="missing"), name=name)


def is_missing(text: str) -> bool:
    """Is this what `missing` makes?"""
    return '<p class="missing">' in text


# ticks -------------------------------------------------------------------------------------------------------------
def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`, in steps of 1, 2 or 5 times a power of ten.

    Values that are nearly equal stand in the middle, with a tenth of their size on either side.
    """
    if not high - low > 1e-6 * max(abs(low), abs(high)):
        around = 0.1 * max(abs(low), abs(high)) or 0.5
        low, high = low - around, high + around
    raw = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Logarithms of 1, 2 and 5 times powers of ten within [low, high], logarithms too; of powers of ten alone where
    these are enough; the ends themselves where there are fewer than two."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    for factors in ((1, 2, 5), (1,)):
        found = [p + math.log10(factor) for p in powers for factor in factors]
        inside = [tick for tick in found if low - 1e-9 <= tick <= high + 1e-9]
        if 2 <= len(inside) <= about:
            return inside
    every = -(-len(inside) // about) if inside else 1
    return inside[::every] if len(inside) > 1 else [low, high] if high > low else [low - 0.1, high + 0.1]


def whole_ticks(first: int, last: int, about: int = 8) -> list[int]:
    """Whole round numbers within [first, last]."""
    if last - first + 1 <= about:
        return list(range(first, last + 1))
    return [int(value) for value in ticks(first, last, about) if first <= value <= last and value == int(value)]


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


def lines(
    found: Sequence[Line], x: Axis, y: Axis, about: str, marks: Marks | None = None, with_legend: bool = True
) -> Html:
    """Curves with bands. about: text for screen readers. Lines of the same colour have different dashes."""
    frame, y_ticks = _frame(found, y)
    drawing = tag(
        "svg",
        tag("path", d="".join(f"M0 {_units(1 - frame.y(tick))}H{UNITS}" for tick in y_ticks), class_="grid"),
        _mark_lines(frame, marks),
        *(_curve(line, style, frame, y) for line, style in _styled(found)),
        tag("path", d="", class_="cursor"),
        viewBox=f"0 0 {UNITS} {UNITS}",
        preserveAspectRatio="none",
        role="img",
        tabindex=0,
        aria_label=f"{about} Use the arrow keys to read values.",
        data_frame=f"{frame.x0:.9g} {frame.x1:.9g} {frame.y0:.9g} {frame.y1:.9g}",
        data_x=x.name,
        data_x_unit=x.unit or None,
        data_unit=y.unit,
        data_log=y.log,
    )
    plot = tag(
        "div",
        _mark_names(frame, marks),
        tag("div", y.title, class_="y-name"),
        tag("div", *(tick("bottom", frame.y(t), y.text(t)) for t in y_ticks), class_="y-ticks", aria_hidden="true"),
        drawing,
        tag(
            "div",
            *(tick("left", frame.x(t), x.text(t)) for t in _x_ticks(frame, x)),
            class_="x-ticks",
            aria_hidden="true",
        ),
        tag("div", x.name, class_="x-name"),
        tag("output", class_="reading", aria_live="polite"),
        class_="plot",
        style=f"--t:{max(len(y.text(t)) for t in y_ticks) * TICK_SIGN + 0.6:.1f}rem",
    )
    return join(legend(found) if with_legend else None, plot)


def legend(found: Sequence[Line]) -> Html:
    """The lines' names; each is a button that hides its line, and one more hides the bands."""
    entries = [_legend_entry(line, style) for line, style in _styled(found)]
    if any(line.low for line in found):
        entries.append(tag("li", tag("button", "bands", type="button", data_bands=True, aria_pressed="true")))
    return tag("ul", *entries, class_="legend")


def _styled(found: Sequence[Line]) -> list[tuple[Line, int]]:
    """(line, its colour and dash as one number): a later line of the same number gets the next dash."""
    taken: set[int] = set()
    result = []
    for line in found:
        style = line.colour
        while style in taken:
            style += COLOURS
        taken.add(style)
        result.append((line, style))
    return result


def _dash(style: int) -> str | None:
    return DASHES[style // COLOURS % len(DASHES)] or None


def _frame(found: Sequence[Line], y: Axis) -> tuple[_Frame, list[float]]:
    xs = [value for line in found for value in line.x]
    ys = [value for line in found for value in (*line.y, *(line.low or ()), *(line.high or ()))]
    x0, x1 = min(xs), max(xs)
    x0, x1 = (x0, x1) if x1 > x0 else (x0 - 0.5, x1 + 0.5)
    if y.log:
        positive = [y.place(value) for value in ys if y.has(value)]
        marked = log_ticks(min(positive), max(positive))
        return _Frame(x0, x1, min(marked[0], *positive), max(marked[-1], *positive)), marked
    shown = [y.shown(value) for value in ys]
    floor, ceiling = (min(shown) if y.floor is None else y.floor), (max(shown) if y.ceiling is None else y.ceiling)
    allowed = [tick for tick in ticks(max(min(shown), floor), min(max(shown), ceiling)) if y.allows(tick)]
    return _Frame(x0, x1, allowed[0], allowed[-1]), allowed


def _x_ticks(frame: _Frame, x: Axis) -> list[float]:
    if x.unit:
        return [tick for tick in ticks(frame.x0, frame.x1, 4) if frame.x0 <= tick <= frame.x1]
    return [*whole_ticks(-int(-frame.x0 // 1), int(frame.x1))]


def tick(side: str, share: float, text: str) -> Html:
    """A text at a share of the width or height of a plot."""
    return tag("span", text, style=f"{side}:{100 * share:.2f}%")


def _legend_entry(line: Line, style: int) -> Html:
    swatch = tag(
        "svg",
        tag("path", d="M1 5H25", stroke_dasharray=_dash(style)),
        viewBox="0 0 26 10",
        class_="swatch",
        style=_colour(style),
        aria_hidden="true",
    )
    said = ", ".join(part for part in (f"{line.seeds} seeds" if line.seeds > 1 else "", line.note) if part)
    text = f"{line.label} ({said})" if said else line.label
    button = tag("button", swatch, text, type="button", data_line=line.label, aria_pressed="true")
    return tag("li", button)


def _colour(style: int) -> str:
    """A method's colour; where all dashes of it are taken, closer to the text's."""
    plain, turn = f"var(--s{style % COLOURS})", style // COLOURS // len(DASHES)
    return f"--c:color-mix(in oklab,{plain} {max(40, 100 - 25 * turn)}%,var(--text))" if turn else f"--c:{plain}"


def _curve(line: Line, style: int, frame: _Frame, y: Axis) -> Html:
    points = [frame.point(a, y.place(b)) for a, b in zip(line.x, line.y, strict=True) if y.has(b)]
    band = NOTHING
    if line.low is not None and line.high is not None:
        edge = [*zip(line.x, line.high, strict=True), *reversed([*zip(line.x, line.low, strict=True)])]
        placed = ((a, y.place(b) if y.has(b) else frame.y0) for a, b in edge)
        clipped = ((a, min(max(b, frame.y0), frame.y1)) for a, b in placed)
        band = tag("polygon", points=" ".join(frame.point(a, b) for a, b in clipped), class_="band")
    dots = NOTHING
    if len(points) <= DOTS_UP_TO:
        dots = tag("path", d="".join(f"M{point}h0" for point in points), class_="dots")
    curve = tag("polyline", points=" ".join(points), class_="line", stroke_dasharray=_dash(style))
    return tag("g", band, curve, dots, data_line=line.label, style=_colour(style))


def _mark_lines(frame: _Frame, marks: Marks | None) -> Html:
    inner = [where for _, where in (marks.stretches if marks else ()) if frame.x0 < where <= frame.x1]
    return tag("path", d="".join(f"M{_units(frame.x(where))} 0V{UNITS}" for where in inner), class_="marks")


# Shares of a plot's width that must lie between two names, so that they fit into the 250 pixels of a phone, too.
_AFTER_FIRST, _AFTER_OTHERS, _BEFORE_END = 0.16, 0.1, 0.05


def _mark_names(frame: _Frame, marks: Marks | None) -> Html:
    """Names above the stretches: the first in full ("task 1"), of the others the number, wherever there is room."""
    stretches = [*marks.stretches] if marks else []
    while len(stretches) > 1 and stretches[1][1] <= frame.x0:  # over before the plot begins
        del stretches[0]
    names: list[Html] = []
    free = 0.0
    for text, where in stretches:
        share = frame.x(max(where, frame.x0))
        if free <= share <= 1 - _BEFORE_END:
            free = share + (_AFTER_OTHERS if names else _AFTER_FIRST)
            names.append(tick("left", share, text.rpartition(" ")[2] if names else text))
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


class PieceColours:
    """The colour of each kind of piece in the bars of a page. None of them is a method's colour."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}

    def __call__(self, kind: str) -> str:
        return f"--c:var(--p{self._of.setdefault(kind, len(self._of)) % PIECES})"


def bars(found: Sequence[Bar], text: Callable[[float], str], name: str, colour: Callable[[str], str]) -> Html:
    """Bars of one scale. Each kind of piece has its `colour`, named above; where there is one kind only, bars have
    the colours of their methods."""
    kinds = list(dict.fromkeys(what for bar in found for what, _ in bar.stack))
    longest = max((bar.total for bar in found), default=0.0) or 1.0
    named = tag("ul", *(tag("li", chip(colour(kind)), kind) for kind in kinds), class_="legend")
    rows = [_bar(bar, colour if len(kinds) > 1 or bar.colour is None else None, longest, text) for bar in found]
    head = tag("tr", tag("th", "", scope="col"), tag("th", name, scope="col"), tag("th", "total", scope="col"))
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="bars")
    return join(named if len(kinds) > 1 else None, table)


def chip(colour: str) -> Html:
    """A small patch of a colour, beside a name in a legend."""
    return tag("span", class_="chip", style=colour)


def _bar(bar: Bar, colour: Callable[[str], str] | None, longest: float, text: Callable[[float], str]) -> Html:
    """colour: of each kind of piece; None where pieces have the method's."""
    own = _colour(bar.colour or 0)
    pieces = [
        tag(
            "span",
            class_="piece",
            style=f"{colour(what) if colour else own};width:{100 * value / longest:.3f}%",
            title=f"{what}: {text(value)}",
        )
        for what, value in bar.stack
    ]
    spelled = ", ".join(f"{what} {text(value)}" for what, value in bar.stack)
    strip = tag("div", *pieces, class_="strip", role="img", aria_label=spelled)
    label = tag("th", None if bar.colour is None else chip(own), bar.label, scope="row")
    return tag("tr", label, tag("td", strip), tag("td", text(bar.total), class_="number"))


# cells -------------------------------------------------------------------------------------------------------------
NUMBERED_UP_TO = 20  # tasks whose numbers fit into the cells
CELLS_WITH_NUMBERS = 800  # of all divisions of the data together
SHADES = 12


def matrix(
    entries: Sequence[Sequence[tuple[float, float] | None]],
    unit: str,
    axes: tuple[str, str] = ("after task", "on task"),
    first: int = 1,
) -> Html:
    """Row t, column i: the score on task i after task t, shaded. entries: (mean, deviation). axes: what rows and
    columns are, which are numbered from `first`."""
    known = [entry[0] for row in entries for entry in row if entry is not None]
    low, high = (0.0, 1.0) if unit == "%" else (min(known, default=0.0), max(known, default=1.0))
    shares = [[None if e is None else (e[0] - low) / ((high - low) or 1.0) for e in row] for row in entries]
    if max((len(row) for row in entries), default=0) > NUMBERED_UP_TO:
        return _shaded(shares, low, high, unit, axes)
    corner = " ".join(f"{axis.removesuffix(' task')} {arrow}" for axis, arrow in zip(axes, "↓→", strict=True))
    columns = range(first, first + len(entries[0]))
    head = tag("tr", tag("td", corner), *(tag("th", f"{i}", scope="col") for i in columns))
    rows = [
        tag("tr", tag("th", f"{t + first}", scope="row"), *(_cell(e, s, unit) for e, s in zip(row, share, strict=True)))
        for t, (row, share) in enumerate(zip(entries, shares, strict=True))
    ]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_="matrix"), class_="scroll")


def _cell(entry: tuple[float, float] | None, share: float | None, unit: str) -> Html:
    if entry is None or share is None:
        return tag("td", "", class_="empty")
    mean, deviation = (value * (100 if unit == "%" else 1) for value in entry)
    text = f"{mean:.1f}" if unit == "%" else plain_text(mean)
    title = f"{mean:.2f} ± {deviation:.2f}{' %' if unit else ''}"
    return tag("td", text, style=_heat(share), title=title)


def _heat(share: float) -> str:
    """A shaded cell. The page's text can be read on every shade."""
    return f"--v:{round(100 * min(max(share, 0.0), 1.0))}%"


def _shaded(
    shares: Sequence[Sequence[float | None]], low: float, high: float, unit: str, axes: tuple[str, str]
) -> Html:
    levels = [[None if s is None else min(int(s * SHADES), SHADES - 1) for s in row] for row in shares]
    styles = [f"--v:{100 * (i + 0.5) / SHADES:.0f}%" for i in range(SHADES)]
    scale = 100 if unit == "%" else 1
    ends = f"from {low * scale:.4g} (light) to {high * scale:.4g}{' %' if unit else ''} (strong)"
    drawing = _cells(levels, styles, "shades", f"Scores by task, shaded {ends}.")
    names = (f"{axes[0]} ↓ ({len(shares)})", f"{axes[1]} → ({max(map(len, shares))})")
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


def clients_by_rounds(grid: ClientGrid, names: Sequence[str], about: str) -> Html:
    """Clients by rounds, coloured by level. names: of the levels."""
    levels = [[None if level is None else level - 1 for level in row] for row in grid.cells]
    styles = [task_colour(level, len(names)) for level in range(1, len(names) + 1)]
    width = grid.rounds_per_column * len(grid.cells[0])
    across = [tick("left", (n - 0.5) / width, f"{n:,}") for n in whole_ticks(1, grid.rounds)]
    height = grid.clients_per_row * len(grid.cells)
    down = [tick("top", (n + 0.5) / height, f"{n}") for n in whole_ticks(0, grid.clients - 1, 6)]
    every = -(-len(names) // 12)  # at most a dozen are named
    named = [tag("li", chip(style), name) for name, style in zip(names, styles, strict=True)][::every]
    drawing = tag(
        "div",
        tag("div", "client", class_="y-name"),
        tag("div", *down, class_="y-ticks", aria_hidden="true"),
        _cells(levels, styles, "presence", about),
        tag("div", *across, class_="x-ticks", aria_hidden="true"),
        tag("div", "round", class_="x-name"),
        class_="plot",
        style=f"--h:{min(24, max(6, len(grid.cells) * 0.7)):.1f}rem",
    )
    return join(tag("ul", *named, class_="legend"), drawing)


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
