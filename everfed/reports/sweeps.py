"""A sweep as pictures: every cell as a line through its options to its score, and how much of the scores each option
explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from everfed.metrics.matrix import mean
from everfed.metrics.scores import Score
from everfed.reports import charts
from everfed.reports.charts import Bar, PieceColours
from everfed.reports.formats import Html, tag
from everfed.reports.groups import SeedGroup, differing, facts, score, short, short_key

FEWEST = 3  # cells that make a sweep
NAMED = 8  # values of an option that are written beside its axis
EXPLAINED = "explained"
BINS = 3  # of an option that has a value of its own in most cells


@dataclass(frozen=True)
class Cell:
    """A cell of a sweep. value: its score, mean over its seeds."""

    label: str
    options: dict[str, Any]
    value: float


def figures(groups: Sequence[SeedGroup], pieces: PieceColours) -> list[Html]:
    """Two figures for each method that has three or more cells with a score; nothing where there is none."""
    by_method: dict[str, list[SeedGroup]] = {}
    for group in groups:
        by_method.setdefault(group.runs[0].method, []).append(group)
    found: list[Html] = []
    for method, own in by_method.items():
        keys = differing([group.runs[0] for group in own])
        cells = [cell for group in own if (cell := _cell(group, keys)) is not None]
        if keys and len(cells) >= FEWEST:
            found += [_coordinates(method, keys, cells, score(own)), _importance(method, keys, cells, pieces)]
    return found


def _cell(group: SeedGroup, keys: Sequence[str]) -> Cell | None:
    value = mean([run.last_score for run in group.finished or group.runs])
    own = facts(group.runs[0])
    return None if value is None else Cell(group.label, {key: own.get(key) for key in keys}, value)


# parallel coordinates ----------------------------------------------------------------------------------------------
def _coordinates(method: str, keys: Sequence[str], cells: Sequence[Cell], measured: Score) -> Html:
    worst, best = sorted((min(c.value for c in cells), max(c.value for c in cells)), key=lambda v: measured.better * v)
    levels = {key: _levels([cell.options[key] for cell in cells]) for key in keys}

    def share(cell: Cell) -> float:
        return (cell.value - worst) / (best - worst) if best != worst else 1.0

    axes = [*(([short(value) for value in levels[key]], short_key(key)) for key in keys)]
    axes.append(([measured.text(worst), measured.text(best)], measured.title))
    lines = [
        _line(
            cell,
            [*(_place(levels[key].index(cell.options[key]), len(levels[key])) for key in keys), share(cell)],
            share,
        )
        for cell in sorted(cells, key=share)  # the best on top
    ]
    drawing = tag(
        "svg",
        tag("path", d="".join(f"M{x * charts.UNITS:.2f} 0V{charts.UNITS}" for x in _across(len(axes))), class_="grid"),
        *lines,
        viewBox=f"0 0 {charts.UNITS} {charts.UNITS}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{len(cells)} cells of a sweep, each a line from option to option to its score.",
    )
    names = [
        tag("span", name, style=f"left:{100 * x:.2f}%") for x, (_, name) in zip(_across(len(axes)), axes, strict=True)
    ]
    values = [
        tag("span", text, style=f"left:{100 * x:.2f}%;bottom:{100 * _place(i, len(texts)):.2f}%")
        for x, (texts, _) in zip(_across(len(axes)), axes, strict=True)
        for i, text in enumerate(texts)
        if len(texts) <= NAMED or i in (0, len(texts) - 1)
    ]
    body = tag(
        "div",
        drawing,
        tag("div", *values, class_="levels", aria_hidden="true"),
        tag("div", *names, class_="axes"),
        class_="plot parallel",
    )
    about = "A line is a cell of the sweep: the values of its options, and its score at the right. Stronger is better."
    return charts.figure(f"Options and score: {method}", body, about, "options")


def _line(cell: Cell, places: Sequence[float], share: Any) -> Html:
    points = [(x * charts.UNITS, (1 - y) * charts.UNITS) for x, y in zip(_across(len(places)), places, strict=True)]
    return tag(
        "polyline",
        tag("title", cell.label),
        points=" ".join(f"{x:.6g},{y:.6g}" for x, y in points),
        class_="line",
        style=f"--c:color-mix(in oklab,var(--accent) {round(100 * share(cell))}%,var(--rule))",
    )


def _across(count: int) -> list[float]:
    return [i / (count - 1) for i in range(count)]


def _place(index: int, count: int) -> float:
    return index / (count - 1) if count > 1 else 0.5


def _levels(values: Sequence[Any]) -> list[Any]:
    """The different values: numbers in order, then all others by name."""
    different = [value for i, value in enumerate(values) if value not in values[:i]]
    return sorted(different, key=lambda v: (0, v, "") if _is_number(v) else (1, 0, str(v)))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# importance --------------------------------------------------------------------------------------------------------
def _importance(method: str, keys: Sequence[str], cells: Sequence[Cell], pieces: PieceColours) -> Html:
    scores = [cell.value for cell in cells]
    shares = {key: explained([cell.options[key] for cell in cells], scores) for key in keys}
    ordered = sorted(keys, key=lambda key: shares[key], reverse=True)
    drawing = charts.bars(
        [Bar(short_key(key), ((EXPLAINED, shares[key]),)) for key in ordered],
        lambda share: f"{100 * share:.0f} %",
        "share of the variance of the scores",
        pieces,
    )
    about = (
        "How much of the variance of the scores the values of one option explain alone (η², from 0 to 100 %). With few "
        "cells a share is large by chance; what two options do together is in none of them."
    )
    return charts.figure(f"Importance of options: {method}", drawing, about, "importance")


def explained(values: Sequence[Any], scores: Sequence[float]) -> float:
    """The variance of the group means over the whole variance. Numbers that hardly repeat are put into thirds."""
    groups: dict[str, list[float]] = {}
    for name, value in zip(_groups(values), scores, strict=True):
        groups.setdefault(name, []).append(value)
    centre = sum(scores) / len(scores)
    whole = sum((value - centre) ** 2 for value in scores)
    between = sum(len(own) * (sum(own) / len(own) - centre) ** 2 for own in groups.values())
    return between / whole if whole else 0.0


def _groups(values: Sequence[Any]) -> list[str]:
    levels = _levels(values)
    if 2 * len(levels) > len(values) and len(levels) > BINS and all(map(_is_number, levels)):
        return [str(BINS * levels.index(value) // len(levels)) for value in values]
    return [repr(value) for value in values]
