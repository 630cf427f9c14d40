"""The figures of a report and of the dashboard: a chart of the runs, or the reason why there is none."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from everfed.reports import charts, formats, series
from everfed.reports.charts import Axis, Bar, Marks, PieceColours
from everfed.reports.formats import NOTHING, Html, join, tag
from everfed.reports.groups import SeedGroup, score
from everfed.reports.read import LoggedRun
from everfed.store.run import RunFolder


@dataclass(frozen=True)
class Curve:
    """One kind of curve. points: of a run. score: is y the run's score? by_task: is x the task?"""

    title: str
    about: str
    points: Callable[[LoggedRun], series.Points]
    y: Axis
    by_task: bool = False
    score: bool = False
    none: str = "No run has measured this yet."


CURVES = {
    "acc": Curve(
        "{score} by round",
        "Mean over the tasks seen so far, wherever it was measured; set eval.every for more points.",
        series.score_by_round,
        Axis("{score}", "%", floor=0, ceiling=100),
        score=True,
    ),
    "loss": Curve(
        "Training loss by round",
        "Mean over the clients of a round of their mean loss.",
        series.loss_by_round,
        Axis("Loss"),
    ),
    "acc_t": Curve(
        "{score} over the tasks learned",
        "Acc_t: mean over tasks 1 to t, after task t.",
        series.acc_by_task,
        Axis("{score}", "%", floor=0, ceiling=100),
        by_task=True,
        score=True,
        none="No task has ended yet.",
    ),
    "forgetting": Curve(
        "Forgetting",
        "Fgt_t: best score since a task was learned less the score after task t, mean over tasks 1 to t-1.",
        series.forgetting_by_task,
        Axis("Forgetting", "%"),
        by_task=True,
        none="Forgetting needs two tasks that have ended; perplexities have a forgetting factor instead.",
    ),
    "bytes": Curve(
        "Bytes sent",
        "From the beginning to the end of each round, all clients together, up and down.",
        series.bytes_by_round,
        Axis("Bytes", "B", floor=0),
    ),
    "time": Curve(
        "Time",
        "From the beginning to the end of each round, evaluation not counted.",
        series.seconds_by_round,
        Axis("Time", "s", floor=0),
    ),
}
PANELS = ("acc", "forgetting", "loss", "bytes", "time")  # of a comparison

# What x may be in a comparison: its axis, and where a round lies on it.
ALONG: dict[str, tuple[Axis, series.Curve | None]] = {
    "round": (Axis("Round"), None),
    "time": (Axis("Time", "s"), series.seconds_by_round),
    "bytes": (Axis("Bytes sent", "B"), series.bytes_by_round),
}


Window = tuple[float, float]
EVERYTHING: Window = (float("-inf"), float("inf"))


@dataclass(frozen=True)
class View:
    """How curves are drawn. by: "method" draws means over seeds with bands, "run" every run. limit: points of a line.
    window: first and last round. along: one of ALONG; empty: rounds, or tasks where a curve is by task.
    smooth: the weight of a moving average, 0 to below 1. log: is the y axis logarithmic?"""

    by: str = "method"
    limit: int = series.POINTS
    window: Window = EVERYTHING
    along: str = ""
    smooth: float = 0.0
    log: bool = False


def curve(kind: str, groups: Sequence[SeedGroup], view: View = View()) -> Html:  # noqa: B008 (it is frozen)
    """One of CURVES with its legend."""
    return _curve(kind, groups, view, _lines(kind, groups, view), with_legend=True)


def panels(kinds: Sequence[str], groups: Sequence[SeedGroup], view: View) -> Html:
    """Several of CURVES side by side under one legend."""
    found = {kind: _lines(kind, groups, view) for kind in kinds}
    named = {line.label: line for lines in found.values() for line in lines}
    drawn = [_curve(kind, groups, view, lines, with_legend=False) for kind, lines in found.items()]
    return tag("div", charts.legend([*named.values()]), tag("div", *drawn, class_="panels"), data_lines=True)


def _lines(kind: str, groups: Sequence[SeedGroup], view: View) -> list[series.Line]:
    spec = CURVES[kind]
    groups = _alike(groups)[0] if spec.score else groups
    y = replace(axis(spec, groups), log=view.log)

    def points(run: LoggedRun) -> series.Points:
        found = spec.points(run)
        found = series.joined(series.last_rounds(run), found) if spec.by_task and view.along else found
        found = series.within(found, *view.window)
        return {x: value for x, value in found.items() if y.has(value)}

    draw = series.mean_lines if view.by == "method" else series.run_lines
    at = ALONG[view.along][1] if view.along else None
    return draw(groups, points, view.limit, at=at, smooth=view.smooth)


def _curve(kind: str, groups: Sequence[SeedGroup], view: View, found: Sequence[series.Line], with_legend: bool) -> Html:
    spec = CURVES[kind]
    groups, notes = _alike(groups) if spec.score else (groups, [])
    title = spec.title.format(score=score(groups).title)
    title = title.removesuffix(" by round") if view.along else title
    if not found:
        return charts.missing(title, spec.none, kind)
    by_task = spec.by_task and not view.along
    x = ALONG[view.along or "round"][0] if not by_task else Axis("Task")
    y = replace(axis(spec, groups), log=view.log)
    marks = None if by_task or x.unit else _tasks(groups)
    drawing = charts.lines(found, x, y, f"{title}, {len(found)} lines.", marks, with_legend)
    return charts.figure(title, drawing, spec.about, kind, [*notes, *_curve_notes(found)])


def only_task_ends(groups: Sequence[SeedGroup]) -> bool:
    """Was every score measured at the end of a task?"""
    runs = [run for group in groups for run in group.runs if run.evaluations()]
    return bool(runs) and all(len(run.evaluations()) == len(run.accuracy_matrix()) for run in runs)


def _alike(groups: Sequence[SeedGroup]) -> tuple[Sequence[SeedGroup], list[str]]:
    """The groups with the score of the first, since others have another scale, and a note on the others."""
    own = score(groups)
    same = [group for group in groups if score([group]) == own]
    others = len(groups) - len(same)
    return same, [f"Not drawn: {others} with another score."] if others else []


def measured(groups: Sequence[SeedGroup]) -> list[Html]:
    """A curve for every measurement of parts, mean over seeds."""
    names = sorted({name for group in groups for run in group.runs for name in run.log.measures})
    return [_measured(name, groups) for name in names]


def _measured(name: str, groups: Sequence[SeedGroup]) -> Html:
    found = series.mean_lines(groups, lambda run: series.measure_by_round(run, name))
    drawing = charts.lines(
        found, Axis("Round"), Axis(name.partition(": ")[2]), f"{name}, {len(found)} lines.", _tasks(groups)
    )
    about = "Reported by the part, or by a metric of eval.metrics (eval: ...); it does not affect training."
    return charts.figure(name, drawing, about, notes=_curve_notes(found))


def axis(spec: Curve, groups: Sequence[SeedGroup]) -> Axis:
    """The y axis of a curve. Scores that are no fractions have neither per cent nor bounds."""
    measured = score(groups)
    if not spec.score or measured.unit:
        return Axis(spec.y.name.format(score=measured.title), spec.y.unit, spec.y.floor, spec.y.ceiling)
    return Axis(spec.y.name.format(score=measured.title))


def _tasks(groups: Sequence[SeedGroup]) -> Marks:
    found = series.boundaries([run for group in groups for run in group.runs])
    return Marks([(f"task {task}", first) for task, first in found])


def _curve_notes(found: Sequence[series.Line]) -> list[str]:
    notes = []
    if any(line.seeds > 1 for line in found):
        notes.append("Bands: mean ± one population deviation over seeds.")
    if any("shortest" in line.note for line in found):
        notes.append("A mean ends where the first of its seeds ends.")
    thinned = [line for line in found if line.of > len(line)]
    if thinned:
        of = max(line.of for line in thinned)
        notes.append(
            f"Thinned for drawing: up to {of:,} points are drawn as about {len(thinned[0]):,}; extremes are kept."
        )
    return notes


def accuracy_matrix(group: SeedGroup) -> Html:
    """The heat map of a method, mean over its seeds."""
    entries = series.mean_matrix(group.finished or group.runs)
    measured = score([group])
    title = f"{measured.title} by task: {group.label}"
    if not entries:
        diverged = any(run.diverged for run in group.runs)
        return charts.missing(title, "Diverged before a task ended." if diverged else "No task has ended yet.")
    seeds = len(group.finished or group.runs)
    about = f"Row: after which task; column: on which task{'' if seeds == 1 else f'; mean of {seeds} seeds'}."
    in_per_cent = " In per cent." if measured.unit else ""
    return charts.figure(title, charts.matrix(entries, measured.unit), about + in_per_cent)


def metric_matrices(groups: Sequence[SeedGroup]) -> list[Html]:
    """The metrics of eval.metrics whose values are matrices (the confusion matrix), in shares of a row."""
    found = []
    for group in groups:
        for name, shares in series.shares_of_rows(group).items():
            entries = [[(share, 0.0) for share in row] for row in shares]
            drawing = charts.matrix(entries, "%", ("row", "column"), first=0)
            about = "On all tasks together, after the last one; in per cent of a row, mean over seeds."
            found.append(charts.figure(f"{name}: {group.label}", drawing, about))
    return found


def traffic(groups: Sequence[SeedGroup], pieces: PieceColours) -> Html:
    """Bytes by part and direction; of runs that go on, by direction."""
    title = "Bytes by part and direction"
    found = [
        Bar(f"{group.label} {arrow}", _named_parts(series.bytes_by_part(group, way)), group.colour)
        for group in groups
        if group.finished
        for way, arrow in (("up", "↑ up"), ("down", "↓ down"))
    ]
    about = "All clients together, mean over finished seeds. Up: from clients to the server."
    if not found:
        title, about = "Bytes by direction, so far", "All clients together. The split by part is known at the end."
        sent = [(group, group.runs[0].log) for group in groups if group.runs[0].log.phases]
        found = [
            Bar(f"{group.label} {arrow}", (("sent", float(count)),), group.colour)
            for group, log in sent
            for arrow, count in (("↑ up", log.bytes_up), ("↓ down", log.bytes_down))
        ]
    if not found:
        return charts.missing(title, "No round has ended yet.", "traffic")
    return charts.figure(title, charts.bars(found, formats.size, "bytes", pieces), about, "traffic")


def _named_parts(sizes: dict[str, float]) -> tuple[tuple[str, float], ...]:
    """A part may have the name of a method, which has another colour."""
    return tuple((f"part {name}", size) for name, size in sizes.items())


def time(groups: Sequence[SeedGroup], pieces: PieceColours) -> Html:
    """Seconds by phase; of runs that go on, so far."""
    title = "Time by phase"
    found = [Bar(g.label, tuple(series.seconds_by_phase(g).items()), g.colour) for g in groups if g.finished]
    about = "Mean over finished seeds; other: evaluation and bookkeeping. Machines differ: compare ratios only."
    if not found:
        title, about = "Time by phase, so far", "Without evaluation and bookkeeping."
        logs = [(group, group.runs[0].log.seconds_by_phase()) for group in groups]
        found = [Bar(group.label, tuple(seconds.items()), group.colour) for group, seconds in logs if seconds]
    if not found:
        return charts.missing(title, "No round has ended yet.", "time")
    return charts.figure(title, charts.bars(found, formats.duration, "seconds", pieces), about, "time")


def memory(groups: Sequence[SeedGroup], pieces: PieceColours) -> Html:
    """Peak memory of the process, and the clients' state."""
    peak = _memory_bars(groups, "peak_memory_bytes", "peak of the process", pieces)
    state = _memory_bars(groups, "client_state_bytes", "state of all clients", pieces)
    if not peak and not state:
        return charts.missing("Memory", "No run is finished yet.", "memory")
    about = "Peak resident memory of the process that ran the experiment, and what clients keep between rounds."
    return charts.figure("Memory", join(peak, state), about, "memory")


def _memory_bars(groups: Sequence[SeedGroup], key: str, what: str, pieces: PieceColours) -> Html | None:
    known = [(group, series.mean_cost(group, key)) for group in groups]
    found = [Bar(group.label, ((what, value),), group.colour) for group, value in known if value is not None]
    return charts.bars(found, formats.size, what, pieces) if any(bar.total for bar in found) else None


# one run -----------------------------------------------------------------------------------------------------------
def who_saw_what(run: LoggedRun) -> Html:
    """Clients by rounds, coloured by task."""
    title = "Who saw what when"
    start = run.log.start
    grid = series.participation(run, start.clients if start else 0)
    if grid is None:
        return charts.missing(title, _why_missing(run))
    tasks = max([start.tasks if start else 1, *(task for row in grid.cells for task in row if task is not None)])
    about = "A client has the colour of the task it trained on in that round; without colour it did not take part."
    told = f"Which of {grid.clients} clients trained in which of {grid.rounds} rounds, coloured by task."
    drawing = charts.clients_by_rounds(grid, [f"task {task}" for task in range(1, tasks + 1)], told)
    return charts.figure(title, drawing, about, notes=_grid_notes(grid, "trained"))


def _why_missing(run: LoggedRun) -> str:
    if not run.log.phases:
        return "The run has no events yet, or its events.jsonl is missing."
    return "The events have the number of clients only: an earlier version wrote them."


def _grid_notes(grid: series.ClientGrid, did: str) -> list[str]:
    notes = []
    if grid.rounds_per_column > 1:
        notes.append(
            f"A column stands for {grid.rounds_per_column} rounds: coloured if the client {did} in any of them."
        )
    if grid.clients_per_row > 1:
        notes.append(f"A row stands for {grid.clients_per_row} clients: coloured if any of them {did}.")
    return notes


def suspected_shifts(run: LoggedRun) -> Html:
    """Clients by rounds, where the drift monitor suspected a change; nothing where there are none."""
    found = series.suspicions(run)
    if found is None:
        return NOTHING
    grid, signals = found
    about = "Rounds in which the data of a client seemed to have changed, coloured by signal."
    told = f"In which of {grid.rounds} rounds the data of which of {grid.clients} clients seemed to have changed."
    drawing = charts.clients_by_rounds(grid, signals, told)
    return charts.figure("Suspected shifts", drawing, about, notes=_grid_notes(grid, "was suspected"))


def class_mix(run: LoggedRun) -> Html:
    """Which classes each client holds."""
    title = "Who holds which classes"
    mixes = series.class_mixes(run)
    if not mixes:
        why = "is known when the run is finished" if run.result is None else "is listed for up to 100 clients only"
        return charts.missing(title, f"The division of the data {why}.")
    tasks = max(task for mix in mixes for task in mix.tasks)
    return charts.figure(title, charts.class_mix(mixes, tasks), "Training samples by client and class.")


def buffers(run: LoggedRun) -> Html:
    """From which tasks the samples in the clients' buffers come, at each task's end."""
    title = "Buffer composition by task"
    found = sorted(run.log.buffers.items())
    if not found:
        return charts.missing(title, "The run recorded no buffer: its method has none, or does not report it.")
    rows = [
        Bar(f"round {index + 1}", tuple((f"task {t}", float(n)) for t, n in enumerate(counts, start=1) if n))
        for index, counts in found
    ]
    tasks = max(run.log.start.tasks if run.log.start else 1, *(len(counts) for _, counts in found))
    some = run.log.buffers_of
    whose = f"The first {some[0]:,} of {some[1]:,} clients together." if some else "All clients together."
    drawing = charts.bars(rows, formats.count, "samples", lambda task: charts.task_colour(int(task[5:]), tasks))
    return charts.figure(title, drawing, whose)


def pictures(run: LoggedRun) -> Html:
    """Test samples as the run drew them at its end; nothing for streams that draw none."""
    files = sorted(RunFolder(run.folder).pictures.glob("*.png"))
    if not files:
        return NOTHING
    shown = [_picture(path) for path in files]
    about = "White: the true boxes. Colours: the trained model's, by class."
    return charts.figure("Test samples", tag("div", *shown, class_="two"), about, "pictures")


def _picture(path: Path) -> Html:
    task, _, number = path.stem.removeprefix("task").partition("-")
    data = base64.b64encode(path.read_bytes()).decode()
    alternative = f"test sample {number} of task {task} with boxes"
    return tag("img", src=f"data:image/png;base64,{data}", alt=alternative, loading="lazy")
