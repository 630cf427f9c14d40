"""Accuracy against cost as a picture: every method a point, and the front of those that no other one beats in both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everfed.reports.formats import Html, size, tag

BYTES, SAMPLES = "bytes", "samples"
KINDS = {
    BYTES: "Accuracy against the bytes of a run, up and down",
    SAMPLES: "Accuracy against the samples that a client stores",
}
FRONT, OTHERS = "#0b6e99", "#999"
LETTER, LINE = 6.5, 14  # width and height of a label's letters, about
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 60, 130, 30, 50


@dataclass(frozen=True)
class Point:
    """cost: at least 0, the less the better. accuracy: a fraction."""

    name: str
    cost: float
    accuracy: float


def front(points: Iterable[Point]) -> list[Point]:
    """The points that no other one matches in cost and beats in accuracy, by cost; of equals in cost the best."""
    found: list[Point] = []
    for point in sorted(points, key=lambda one: (one.cost, -one.accuracy)):
        if not found or point.accuracy > found[-1].accuracy:
            found.append(point)
    return found


def drawing(points: Sequence[Point], title: str, *, alone: bool = False) -> str:
    """An SVG; costs on a logarithmic axis that begins at 0. alone: as a file of its own."""
    if not points:
        return ""
    best, scale = front(points), _Scale(points)
    line = " ".join(f"{scale.x(point.cost):.1f},{scale.y(point.accuracy):.1f}" for point in best)
    return str(
        tag(
            "svg",
            tag("title", title),
            *scale.axes(title),
            tag("polyline", points=line, fill="none", stroke=FRONT, stroke_width=2, class_="front"),
            *(_dot(point, scale, point in best) for point in points),
            *_labels(best, scale),
            xmlns="http://www.w3.org/2000/svg" if alone else None,
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            role="img",
            font_family="sans-serif",
            font_size=12,
            **({"style": "background:#fff"} if alone else {"class_": "pareto"}),
        )
    )


class _Scale:
    """From cost and accuracy to places in the picture."""

    def __init__(self, points: Sequence[Point]) -> None:
        costs, accuracies = ([getattr(point, key) for point in points] for key in ("cost", "accuracy"))
        self._integer = max(costs) < 1e4
        self._from, self._to = (math.log10(1 + bound) for bound in (min(costs), max(costs)))
        self._to = max(self._to, self._from + 0.1)
        self._low, self._high = math.floor(10 * min(accuracies)) / 10, math.ceil(10 * max(accuracies)) / 10
        self._high = max(self._high, self._low + 0.1)

    def x(self, cost: float) -> float:
        share = (math.log10(1 + cost) - self._from) / (self._to - self._from)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, accuracy: float) -> float:
        return TOP + (self._high - accuracy) / (self._high - self._low) * (HEIGHT - TOP - BOTTOM)

    def axes(self, title: str) -> list[Html]:
        """A line for every ten per cent, and five costs."""
        lines: list[Html] = []
        for step in range(round(10 * self._low), round(10 * self._high) + 1):
            y = self.y(step / 10)
            lines.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, stroke="currentColor", stroke_opacity=0.2))
            lines.append(tag("text", f"{10 * step} %", x=LEFT - 8, y=y + 4, text_anchor="end", fill="currentColor"))
        for place in range(5):
            cost = 10 ** (self._from + place / 4 * (self._to - self._from)) - 1
            shown = f"{cost:.0f}" if self._integer else size(round(cost))
            x = LEFT + place / 4 * (WIDTH - LEFT - RIGHT)
            lines.append(tag("text", shown, x=x, y=HEIGHT - 28, text_anchor="middle", fill="currentColor"))
        lines.append(tag("text", title, x=LEFT, y=HEIGHT - 8, fill="currentColor"))
        return lines


def _dot(point: Point, scale: _Scale, on_front: bool) -> Html:
    x, y = scale.x(point.cost), scale.y(point.accuracy)
    about = tag("title", f"{point.name}: {100 * point.accuracy:.1f} %, {point.cost:,.0f}")
    place = {"cx": f"{x:.1f}", "cy": f"{y:.1f}"}
    if on_front:
        return tag("circle", about, **place, r=5, fill=FRONT, class_="front")
    return tag("circle", about, **place, r=3.5, fill=OTHERS)


def _labels(best: Sequence[Point], scale: _Scale) -> list[Html]:
    """The names of the front's points, each beside its point where no other label is."""
    placed: list[tuple[float, float, str]] = []
    for point in best:
        x, y = scale.x(point.cost) + 8, scale.y(point.accuracy)
        rows = (y - 6 + LINE * step for step in (0, 1.5, -1, 2.5, -2))
        free = (row for row in rows if not any(_overlap((x, row, point.name), other) for other in placed))
        placed.append((x, next(free, y - 6), point.name))
    return [tag("text", name, x=f"{x:.1f}", y=f"{y:.1f}", fill="currentColor") for x, y, name in placed]


def _overlap(one: tuple[float, float, str], other: tuple[float, float, str]) -> bool:
    left, right = sorted((one, other))
    return abs(one[1] - other[1]) < LINE and right[0] < left[0] + LETTER * len(left[2])
