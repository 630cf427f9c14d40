"""The numbers behind every figure, as plain data, for the page and for the files alike.

Tasks and rounds count from 1 here. Long curves are thinned by `thin`, which keeps every extreme.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from everfed.metrics.matrix import forgetting, oriented, over_time
from everfed.metrics.matrix import mean as _mean
from everfed.metrics.scores import score_of
from everfed.metrics.statistics import mean_and_deviation
from everfed.reports.groups import SeedGroup
from everfed.reports.read import LoggedRun, Matrix, StoredResult
from everfed.store.event_log import TRAIN, PhaseLine

POINTS = 600  # that a thinned curve has at most, about
BINS = 240  # columns of the participation grid at most
ROWS = 120  # rows of the participation grid at most


@dataclass(frozen=True)
class Line:
    """y over x; low and high: mean less and plus one population deviation over `seeds` runs, None for a single run.
    of: how many points the curve had before it was thinned. note: what a reader of the legend must know."""

    label: str
    colour: int
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    seeds: int = 1
    of: int = 0
    note: str = ""

    def __len__(self) -> int:
        return len(self.x)


def thin(y: Sequence[float], limit: int = POINTS) -> list[int]:
    """Positions to keep of a long curve, ascending: first, last, and the lowest and highest of each stretch."""
    if len(y) <= limit:
        return list(range(len(y)))
    stretches = max(1, limit // 2 - 1)
    kept = {0, len(y) - 1}
    for i in range(stretches):
        stretch = range(i * len(y) // stretches, (i + 1) * len(y) // stretches)
        kept |= {min(stretch, key=y.__getitem__), max(stretch, key=y.__getitem__)}
    return sorted(kept)


def thinned(line: Line, limit: int = POINTS) -> Line:
    """The line with at most about `limit` points; `of` is how many it had."""
    keep = thin(line.y, limit)
    low, high = (None if band is None else tuple(band[i] for i in keep) for band in (line.low, line.high))
    x, y = (tuple(values[i] for i in keep) for values in (line.x, line.y))
    return replace(line, x=x, y=y, low=low, high=high, of=len(line))


# one run: {x: y} ---------------------------------------------------------------------------------------------------
Points = dict[float, float]


def score_by_round(run: LoggedRun) -> Points:
    """Mean score over the tasks seen so far, wherever it was measured."""
    return {value.round + 1: value.score for value in run.evaluations() if value.score is not None}


def loss_by_round(run: LoggedRun) -> Points:
    """Mean training loss of the round's clients."""
    lines = sorted((key[0], line.loss) for key, line in run.log.phases.items() if key[1] == TRAIN)
    return {index + 1: loss for index, loss in lines if loss is not None}


def bytes_by_round(run: LoggedRun) -> Points:
    """Bytes up and down from the beginning to the end of each round."""
    return _accumulated(run, lambda line: line.bytes_up + line.bytes_down)


def seconds_by_round(run: LoggedRun) -> Points:
    """Seconds of all phases from the beginning to the end of each round; evaluation is not counted."""
    return _accumulated(run, lambda line: line.seconds)


def _accumulated(run: LoggedRun, of: Callable[[PhaseLine], float]) -> Points:
    total, found = 0.0, {}
    for (index, _, _), line in sorted(run.log.phases.items()):
        total += of(line)
        found[float(index + 1)] = total
    return found


def last_rounds(run: LoggedRun) -> Points:
    """The last round of each task that has ended."""
    return {float(value.task + 1): float(value.round + 1) for value in run.evaluations() if value.task_end}


def measure_by_round(run: LoggedRun, name: str) -> Points:
    """A measurement of a part."""
    return {index + 1: value for index, value in sorted(run.log.measures.get(name, {}).items())}


def acc_by_task(run: LoggedRun) -> Points:
    """Acc_t: mean score over the tasks learned, after each of them."""
    matrix = _whole_matrix(run)
    return _numbered([_mean(row[: t + 1]) for t, row in enumerate(matrix)])


def forgetting_by_task(run: LoggedRun) -> Points:
    """Fgt_t as FedGP defines it, from the second task on, in the unit of the score; there is none of a score with a
    metric of its own for what was lost."""
    matrix, score = _whole_matrix(run), score_of(run.score)
    if not matrix or score.lost != "forgetting":
        return {}
    return _numbered(over_time(forgetting, oriented(matrix, score)))


def _whole_matrix(run: LoggedRun) -> Matrix:
    """The accuracy matrix, or nothing where it has fewer columns than rows."""
    matrix = run.accuracy_matrix()
    return matrix if all(len(row) >= len(matrix) for row in matrix) else []


def _numbered(values: Sequence[float | None]) -> Points:
    return {float(t): value for t, value in enumerate(values, start=1) if value is not None}


def within(points: Points, first: float, last: float) -> Points:
    """The points from `first` to `last`."""
    return {x: y for x, y in points.items() if first <= x <= last}


def joined(keys: Points, values: Points) -> Points:
    """{keys[k]: values[k]} where both have k."""
    return {keys[k]: value for k, value in values.items() if k in keys}


def smoothed(line: Line, weight: float) -> Line:
    """Exponential moving averages of the line and of its band: m <- weight m + (1 - weight) y, divided by
    1 - weight^n at the n-th point, so that the first points are not drawn towards 0."""
    if not weight:
        return line
    low, high = (None if band is None else _moving(band, weight) for band in (line.low, line.high))
    return replace(line, y=_moving(line.y, weight), low=low, high=high)


def _moving(values: Sequence[float], weight: float) -> tuple[float, ...]:
    found, mean = [], 0.0
    for n, value in enumerate(values, start=1):
        mean = weight * mean + (1 - weight) * value
        found.append(mean / (1 - weight**n))
    return tuple(found)


# several runs ------------------------------------------------------------------------------------------------------
Curve = Callable[[LoggedRun], Points]


def mean_lines(
    groups: Sequence[SeedGroup], points: Curve, limit: int = POINTS, *, at: Curve | None = None, smooth: float = 0.0
) -> list[Line]:
    """One line per group: mean and deviation over its seeds, at the points that all seeds with this curve have.

    at: {x of `points`: x to draw at}, as the seconds at which rounds ended; of several seeds their mean.
    smooth: the weight of `smoothed`.
    """
    lines = (_mean_line(group, _curves(group.runs, points, at)) for group in groups)
    return [thinned(smoothed(line, smooth), limit) for line in lines if line is not None]


def _curves(runs: Sequence[LoggedRun], points: Curve, at: Curve | None) -> list[tuple[Points, Points]]:
    """({x: y}, {x: where it is drawn}) of the runs that have this curve."""
    found = ((curve, at(run) if at else {x: x for x in curve}) for run in runs if (curve := points(run)))
    return [({x: y for x, y in curve.items() if x in places}, places) for curve, places in found]


def _mean_line(group: SeedGroup, curves: Sequence[tuple[Points, Points]]) -> Line | None:
    common = sorted(set.intersection(*(set(curve) for curve, _ in curves))) if curves else []
    if not common:
        return None
    x = tuple(mean_and_deviation([places[key] for _, places in curves]).mean for key in common)
    spreads = [mean_and_deviation([curve[key] for curve, _ in curves]) for key in common]
    y = tuple(spread.mean for spread in spreads)
    note = ", ".join(_notes(group, [curve for curve, _ in curves], common[-1]))
    if len(curves) == 1:
        return Line(group.label, group.colour, x, y, note=note)
    low, high = (tuple(s.mean + sign * s.deviation for s in spreads) for sign in (-1, 1))
    return Line(group.label, group.colour, x, y, low, high, len(curves), note=note)


def _notes(group: SeedGroup, curves: Sequence[Points], end: float) -> Iterator[str]:
    """What the line does not show: seeds that went further than the others, and those that diverged."""
    if any(max(curve) > end for curve in curves):
        yield "up to the shortest"
    diverged = sum(run.diverged for run in group.runs)
    if diverged:
        yield "diverged" if diverged == len(group.runs) else f"{diverged} diverged"


def run_lines(
    groups: Sequence[SeedGroup], points: Curve, limit: int = POINTS, *, at: Curve | None = None, smooth: float = 0.0
) -> list[Line]:
    """One line per run, in the colour of its group."""
    found = ((group, run, _curves([run], points, at)) for group in groups for run in group.runs)
    lines = (
        Line(f"{group.label} · seed {run.seed}", group.colour, tuple(places[x] for x in curve), tuple(curve.values()))
        for group, run, curves in found
        for curve, places in curves
        if curve
    )
    return [thinned(smoothed(line, smooth), limit) for line in lines]


def boundaries(runs: Sequence[LoggedRun]) -> list[tuple[int, int]]:
    """(task, its first round) as the runs' rounds are counted under tasks; empty where the runs do not agree."""
    found = [_boundaries(run) for run in runs]
    longest = max(found, key=len, default=[])
    agree = all(longest[: len(one)] == one for one in found if one)
    return longest if agree else []


def _boundaries(run: LoggedRun) -> list[tuple[int, int]]:
    first: dict[int, int] = {}
    for line in run.log.phases.values():
        first[line.task] = min(line.round, first.get(line.task, line.round))
    return [(task + 1, index + 1) for task, index in sorted(first.items())]


def mean_matrix(runs: Sequence[LoggedRun]) -> list[list[tuple[float, float] | None]]:
    """(mean, population deviation) of every entry of the accuracy matrix, None where a run did not measure it."""
    matrices = [matrix for run in runs if (matrix := run.accuracy_matrix())]
    rows = min((len(matrix) for matrix in matrices), default=0)
    return [[_entry([matrix[t] for matrix in matrices], i) for i in range(len(matrices[0][t]))] for t in range(rows)]


def _entry(rows: Sequence[Sequence[float | None]], i: int) -> tuple[float, float] | None:
    known = [value for row in rows if i < len(row) and (value := row[i]) is not None]
    if len(known) < len(rows):
        return None
    spread = mean_and_deviation(known)
    return spread.mean, spread.deviation


def shares_of_rows(group: SeedGroup) -> dict[str, list[list[float]]]:
    """By metric of eval.metrics whose value for all tasks is a matrix: shares of its rows, mean over finished seeds."""
    found: dict[str, list[list[list[float]]]] = {}
    for result in group.results:
        for name, one in result.measured.items():
            whole = one.get("whole")
            if isinstance(whole, list) and whole and all(isinstance(row, list) for row in whole):
                found.setdefault(name, []).append([[value / (sum(row) or 1) for value in row] for row in whole])
    return {
        name: [[sum(cells) / len(cells) for cells in zip(*rows, strict=True)] for rows in zip(*seeds, strict=True)]
        for name, seeds in found.items()
    }


def lists_of(result: StoredResult) -> dict[str, list[float | None]]:
    """By metric of eval.metrics: the value for all tasks, where it is a list of numbers."""
    found = {name: one.get("whole") for name, one in result.measured.items()}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, list) and value and all(entry is None or isinstance(entry, int | float) for entry in value)
    }


# clients by rounds -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ClientGrid:
    """cells[row][column]: a level from 1 (the task a client trained on, say), None where there is nothing. A row stands
    for `clients_per_row` clients from row * clients_per_row on, a column for `rounds_per_column` rounds."""

    cells: tuple[tuple[int | None, ...], ...]
    clients: int
    rounds: int
    clients_per_row: int
    rounds_per_column: int


def participation(run: LoggedRun, clients: int) -> ClientGrid | None:
    """Clients by rounds, coloured by task; None where the log does not name the clients.

    Where several clients or rounds share a cell, it holds the last task that any of them trained on.
    """
    lines = [line for key, line in sorted(run.log.phases.items()) if key[1] == TRAIN and line.clients is not None]
    if not lines:
        return None
    clients = max(clients, 1 + max((max(line.clients) for line in lines if line.clients), default=0))
    rounds = max(run.rounds, 1 + lines[-1].round)
    return _grid(clients, rounds, (mark for line in lines for mark in _trained_on(line)))


def _trained_on(line: PhaseLine) -> Iterator[tuple[int, int, int]]:
    clients = line.clients or ()
    for client, task in zip(clients, line.tasks or [line.task] * len(clients), strict=True):
        yield client, line.round, task + 1


def _grid(clients: int, rounds: int, marks: Iterable[tuple[int, int, int]]) -> ClientGrid:
    """Of (client, round, level)s; the last one of a cell stays."""
    per_row, per_column = -(-clients // ROWS), -(-rounds // BINS)
    cells: list[list[int | None]] = [[None] * -(-rounds // per_column) for _ in range(-(-clients // per_row))]
    for client, index, level in marks:
        cells[client // per_row][index // per_column] = level
    return ClientGrid(tuple(map(tuple, cells)), clients, rounds, per_row, per_column)


def suspicions(run: LoggedRun) -> tuple[ClientGrid, list[str]] | None:
    """(clients by rounds, the names of its levels): suspected shifts, by signal."""
    found = sorted(run.log.shifts_by.items())
    if not found:
        return None
    kinds = {(index, c): _signals(by, c) for index, by in found for clients in by.values() for c in clients}
    names = sorted(set(kinds.values()))
    start, last = run.log.start, max(client for _, client in kinds)
    clients, rounds = max(start.clients if start else 0, last + 1), max(run.rounds, 1 + found[-1][0])
    marks = ((client, index, 1 + names.index(kind)) for (index, client), kind in kinds.items())
    return _grid(clients, rounds, marks), names


def _signals(by: Mapping[str, tuple[int, ...]], client: int) -> str:
    return " and ".join(signal for signal, clients in sorted(by.items()) if client in clients)


@dataclass(frozen=True)
class ClassMix:
    """counts[client][k]: samples of class labels[k]. tasks: the tasks (from 1) that use this division."""

    labels: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    tasks: tuple[int, ...]


def class_mixes(run: LoggedRun) -> list[ClassMix]:
    """The classes of every client, for each division that the result lists client by client."""
    stream = run.result.stream if run.result else {}
    reports = [report for report in stream.get("who_got_what", []) if isinstance(report, dict)]
    tasks = int(stream.get("tasks") or len(reports) or 1)
    return [_mix(report, i, len(reports), tasks) for i, report in enumerate(reports) if report.get("table")]


def _mix(report: dict[str, Any], index: int, divisions: int, tasks: int) -> ClassMix:
    served = tuple(range(1, tasks + 1)) if divisions == 1 else (index + 1,)
    return ClassMix(tuple(report["labels"]), tuple(tuple(row) for row in report["table"]), served)


# cost --------------------------------------------------------------------------------------------------------------
def mean_cost(group: SeedGroup, key: str) -> float | None:
    """Mean over the finished seeds of one entry of result.json's cost."""
    values = (getattr(result.cost, key, None) for result in group.results)
    known = [float(value) for value in values if value is not None]
    return mean_and_deviation(known).mean if known else None


def bytes_by_part(group: SeedGroup, direction: str) -> dict[str, float]:
    """Mean bytes over the finished seeds, by part; direction: "up" or "down"."""
    tables = [result.cost.bytes_by_part for result in group.results]
    return _means([{part: float(sizes.get(direction, 0)) for part, sizes in table.items()} for table in tables])


def seconds_by_phase(group: SeedGroup) -> dict[str, float]:
    """Mean seconds over the finished seeds, by phase, with the rest (evaluation, bookkeeping) as "other"."""
    found = []
    for run, result in zip(group.finished, group.results, strict=True):
        phases = run.log.seconds_by_phase()
        found.append({**phases, "other": max(0.0, result.cost.seconds - sum(phases.values()))})
    return _means(found)


def _means(tables: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean by key, absent ones counting 0; keys whose mean is 0 are left out."""
    totals: dict[str, float] = {}
    for table in tables:
        for key, value in table.items():
            totals[key] = totals.get(key, 0.0) + value
    return {key: total / len(tables) for key, total in totals.items() if total}
