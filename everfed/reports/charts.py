"""Lines and bars as HTML and SVG, without any script: they stretch to any width, follow the page's theme, and print.

The drawing is an SVG of 1000 x 1000 units that is stretched to its box; strokes keep their width
(`vector-effect: non-scaling-stroke` in page.css), and all text is HTML beside it, so it never scales. charts.js adds
reading of values under the pointer or by arrow keys, and it reads them back from the drawing itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from everfed.reports.colours import PIECES
from everfed.reports.formats import duration, log_ticks, size, ticks, whole_ticks
from everfed.reports.groups import COLOURS
from everfed.reports.markup import NOTHING, Child, Html, join, tag
from everfed.reports.series import Line

UNITS = 1000
DASHES = ("", "7 4", "2 3", "9 3 2 3")
DOTS_UP_TO = 40  # points of a line that are marked one by one


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
    caption = tag("figcaption", tag("h3", title), tag("p", about) if about else None)
    return tag("figure", caption, body, *paragraphs, class_="chart", data_figure=name or None)


def missing(title: str, why: str, name: str = "") -> Html:
    """A message in place of a figure that cannot be drawn."""
    return figure(title, tag("p", why, class_="missing"), name=name)


def is_missing(text: str) -> bool:
    """Is this what `missing` makes?"""
    return '<p class="missing">' in text


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
    )
    return join(legend(found) if with_legend else None, plot)


def legend(found: Sequence[Line]) -> Html:
    """The lines' names; each is a button that hides its line."""
    return tag("ul", *(_legend_entry(line, style) for line, style in _styled(found)), class_="legend")


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
    seeds = f" ({line.seeds} seeds)" if line.seeds > 1 else ""
    button = tag("button", swatch, f"{line.label}{seeds}", type="button", data_line=line.label, aria_pressed="true")
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
