"""Finished runs as a line of text, tables and plots, for Python and notebooks. pandas and matplotlib are optional."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from everfed.errors import optional_package
from everfed.metrics.scores import METRICS, PERCENT, Score, own_metrics, score_of

Row = dict[str, Any]
SCALED = "at --scale {scale:g} of the work: fewer rounds, less data; it does not compare with full runs"
VALIDATED = "scored on validation data"
_SIZE = (9.0, 3.2)  # inches


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run. data: the content of result.json."""

    folder: Path
    data: dict[str, Any]

    @property
    def metrics(self) -> dict[str, float | None]:
        metrics: dict[str, float | None] = self.data["metrics"]
        return metrics

    @property
    def history(self) -> Any:
        """A row for every round: task, loss, score, bytes, seconds, and what parts reported, as "part: name". A pandas
        frame; a list of dicts without pandas. Rounds and tasks count from 1, as in the terminal and the report."""
        from everfed.reports.read import read_run

        run = read_run(self.folder)
        rows: dict[int, Row] = {}
        for line in run.log.phases.values():
            first = {"round": line.round + 1, "task": line.task + 1, "loss": None, run.score: None}
            row = rows.setdefault(line.round, {**first, "bytes_up": 0, "bytes_down": 0, "seconds": 0.0})
            row["loss"] = row["loss"] if line.loss is None else line.loss
            for key in ("bytes_up", "bytes_down", "seconds"):
                row[key] += getattr(line, key)
        for scored in run.evaluations():
            if scored.round in rows:
                rows[scored.round][run.score] = scored.score
        for name, reported in run.log.measures.items():
            for index, row in rows.items():
                row[name] = reported.get(index)
        return as_frame([rows[number] for number in sorted(rows)], "round")

    @property
    def accuracy_matrix(self) -> Any:
        """Row t: the scores after task t, a column for every task. A pandas frame; a list of lists without pandas."""
        matrix = self.data["accuracy_matrix"]
        if find_spec("pandas") is None:
            return matrix
        import pandas

        width = max(map(len, matrix), default=0)
        index = pandas.Index([f"after task {task + 1}" for task in range(len(matrix))])
        return pandas.DataFrame(matrix, index=index, columns=[f"task {task + 1}" for task in range(width)], dtype=float)

    def plot(self) -> Any:
        """A matplotlib figure: every task's score over the run, and the loss of every round."""
        return plot([(str(self.data["method"]), self.folder, self.data)])

    def report(self, out: str | Path | None = None, *, figures: bool | None = None) -> Path:
        """Write the report of this run (`everfed.report`)."""
        from everfed.reports.html import write

        return write([self.folder], out, figures=figures)

    def __repr__(self) -> str:
        return f"<Result {headline(self.data)}, in {self.folder}>"

    def _repr_html_(self) -> str:
        """The main metrics and the accuracy matrix of the run."""
        score, matrix = score_of(self.data["score"]), self.data["accuracy_matrix"]
        columns = ["", *(f"task {task + 1}" for task in range(max(map(len, matrix), default=0)))]
        lines = [
            [f"after task {number}", *("" if value is None else score.text(value, 1) for value in row)]
            for number, row in enumerate(matrix, start=1)
        ]
        note = "; ".join(part for part in (f"run folder: {self.folder}", scope_of(self.data)) if part)
        return f"<p><b>{escape(headline(self.data))}</b></p>{html_table(columns, lines, note)}"


def headline(data: Row) -> str:
    """Method, seed, the two main metrics of a result and those of its recipe in one line."""
    score, metrics = score_of(data["score"]), data["metrics"]
    shown = {METRICS[key].named(score): metrics.get(key) for key in (score.main, score.lost)}
    numbers = [f"{name} {score.text(value)}" for name, value in shown.items() if value is not None]
    for name, own in own_metrics(data.get("measured", {})).items():
        numbers.append(f"{name} {Score(name, name, name, own.kind).text(data['measured'][name]['mean'])}")
    return f"{data['method']} seed {data['seed']}: {'  '.join(numbers)}"


def scope_note(split: str, scale: float) -> str:
    """What the scores of a run are of; empty for a full run on test data."""
    notes = {VALIDATED: split == "validation", SCALED.format(scale=scale): scale < 1}
    return "; ".join(note for note, applies in notes.items() if applies)


def scope_of(data: Row) -> str:
    """The `scope_note` of a result."""
    return scope_note(data.get("split", "test"), data.get("scale", 1.0))


def as_frame(rows: Sequence[Row], index: str | None = None) -> Any:
    """A pandas frame; the rows themselves without pandas."""
    if find_spec("pandas") is None:
        return list(rows)
    import pandas

    frame = pandas.DataFrame(list(rows))
    return frame.set_index(index) if index and len(frame) else frame


def plot(runs: Sequence[tuple[str, Path, Row]]) -> Any:
    """A matplotlib figure of runs as (name, folder, result): scores by round (of every task for a single run, their
    mean for several) and losses by round."""
    plt = optional_package("matplotlib.pyplot", "plots", "a plot")
    from everfed.reports.progress import notebook_display
    from everfed.reports.read import read_run

    score = score_of(runs[0][2]["score"] if runs else "accuracy")
    factor = 100 if score.kind == PERCENT else 1
    figure, (scores, losses) = plt.subplots(1, 2, figsize=_SIZE, layout="constrained")
    for name, folder, _ in runs:
        read = read_run(folder)
        phases = [line for _, line in sorted(read.log.phases.items()) if line.loss is not None]
        losses.plot([line.round + 1 for line in phases], [line.loss for line in phases], label=name)
        for label, rounds, values in _curves(name, read.evaluations(), single=len(runs) == 1):
            scores.plot(rounds, [factor * value for value in values], marker="o", label=label)
    scores.set(xlabel="round", ylabel=f"{score.title} (%)" if score.unit else score.title)
    losses.set(xlabel="round", ylabel="training loss")
    scores.legend(fontsize="small")
    if notebook_display() is not None:
        plt.close(figure)  # the notebook shows what is returned; an open figure would be shown a second time
    return figure


def _curves(name: str, scored: Sequence[Any], single: bool) -> list[tuple[str, list[int], list[float]]]:
    """(label, rounds, scores): of every task for a single run, else their mean."""
    if not single:
        known = [(one.round + 1, one.score) for one in scored if one.score is not None]
        return [(name, [x for x, _ in known], [y for _, y in known])]
    tasks = max((len(one.accuracy) for one in scored), default=0)
    curves = []
    for task in range(tasks):
        known = [
            (one.round + 1, one.accuracy[task])
            for one in scored
            if task < len(one.accuracy) and one.accuracy[task] is not None and one.task >= task
        ]
        curves.append((f"task {task + 1}", [x for x, _ in known], [y for _, y in known]))
    return curves


def html_table(columns: Sequence[str], lines: Sequence[Sequence[str]], note: str = "") -> str:
    """A plain table, styled by the notebook."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(value)}</td>" for value in line) + "</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{escape(note)}</p>"
