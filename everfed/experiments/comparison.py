"""What a comparison or a sweep came to: mean and population deviation over seeds, for Python, as text and as files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everfed.experiments.jobs import Outcome
from everfed.metrics.scores import METRICS, PERCENT, Score, ShownMetric, own_metrics, score_of
from everfed.metrics.statistics import PairedDifference, Spread, mean_and_deviation, paired_by_seed
from everfed.reports.formats import clock, csv_text, markdown_table, size
from everfed.reports.result import Result, as_frame, html_table, plot
from everfed.reports.tables import cell_text
from everfed.store.files import write_atomic

SHOWN = tuple(key for key in METRICS if key != "bwt")  # a terminal is narrow, and bwt is close to forgetting
COSTS = (("Bytes up", "bytes_up"), ("Time", "seconds"))


@dataclass(frozen=True)
class TableRow:
    """One method or one cell of a grid. spreads: {metric: {mean, deviation, count}}; empty when no seed finished.
    difference: of its score to that of the row it is compared with, over the seeds that both have."""

    name: str
    outcomes: tuple[Outcome, ...]
    spreads: dict[str, dict[str, float]]
    difference: PairedDifference | None = None

    def mean(self, metric: str) -> float:
        return self.spreads[metric]["mean"]

    @property
    def score(self) -> Score:
        """The score of its runs."""
        return score_of(next((outcome.result["score"] for outcome in self.outcomes if outcome.result), "accuracy"))

    @property
    def rank(self) -> tuple[bool, float]:
        """The better, the higher; lowest where nothing was scored. A row with a run that was stopped comes below: its
        mean is of the better seeds."""
        score = self.score
        value = score.better * self.mean(score.main) if score.main in self.spreads else -float("inf")
        return not any(outcome.stopped for outcome in self.outcomes), value

    @property
    def runs(self) -> str:
        """How many of its runs finished, and what became of the others."""
        failed = [outcome for outcome in self.outcomes if outcome.result is None]
        lost, stopped = sum(one.diverged for one in failed), sum(one.stopped for one in failed)
        kinds = {"diverged": lost, "stopped early": stopped, "failed": len(failed) - lost - stopped}
        named = [word if lone == len(self.outcomes) else f"{lone} {word}" for word, lone in kinds.items() if lone]
        return ", ".join([f"{len(self.outcomes) - len(failed)}/{len(self.outcomes)}", *named])


def rows(outcomes: Sequence[Outcome], baseline: str = "") -> list[TableRow]:
    """Outcomes by row, the best first; rows without a finished run come last. baseline: the row that all others are
    compared with, seed by seed."""
    grouped: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        grouped.setdefault(outcome.job.row, []).append(outcome)
    found = [
        TableRow(name, tuple(group), _spreads(group), _difference(group, grouped[baseline]))
        if baseline in grouped and name != baseline
        else TableRow(name, tuple(group), _spreads(group))
        for name, group in grouped.items()
    ]
    return sorted(found, key=lambda row: row.rank, reverse=True)


def _difference(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> PairedDifference | None:
    """Of the main score, over the seeds that both have finished; None where these are fewer than two."""
    found = paired_by_seed(_main_by_seed(ours), _main_by_seed(theirs))
    return found if found is not None and found.count > 1 else None


def _main_by_seed(outcomes: Sequence[Outcome]) -> dict[int, float]:
    found = {}
    for outcome in outcomes:
        result = outcome.result or {}
        value = _numbers(result).get(score_of(result["score"]).main) if result else None
        if value is not None and math.isfinite(value):
            found[outcome.job.recipe.seed] = value
    return found


def _spreads(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    values: dict[str, list[float]] = {}
    for outcome in outcomes:
        for metric, value in _numbers(outcome.result or {}).items():
            values.setdefault(metric, []).append(value)
    return {metric: vars(mean_and_deviation(found)) for metric, found in values.items()}


def _numbers(result: dict[str, Any]) -> dict[str, float]:
    """Every number of a result: metrics, the task-IL accuracy of the same logits where it differs, costs."""
    if not result:
        return {}
    numbers = {**result["metrics"], **{key: result["cost"].get(key) for _, key in COSTS}}
    numbers["bytes_down"] = result["cost"].get("bytes_down")
    task_il = result.get("by_logits", {}).get("task", {})
    if task_il.get("accuracy_matrix") != result["accuracy_matrix"]:
        numbers["acc_task"] = task_il.get("metrics", {}).get("acc")
    return {key: float(value) for key, value in numbers.items() if isinstance(value, (int, float))}


def table(found: Sequence[TableRow], heading: str, baseline: str = "") -> tuple[list[str], list[list[str]]]:
    """(columns, lines), fractions in per cent; columns without a value are left out, but for the score."""
    score = next((row.score for row in found if row.spreads), score_of("accuracy"))
    known = METRICS | _own_metrics(found)
    shown = [*SHOWN, *(key for key in known if key not in METRICS)]
    metrics = [key for key in shown if key == score.main or any(key in row.spreads for row in found)]
    paired = any(row.difference for row in found)
    lines = []
    for row in found:
        scores = [_text(row.spreads.get(key), known[key].kind_of(score)) for key in metrics]
        if not row.spreads:
            scores[metrics.index(score.main)] = row.runs.partition(", ")[2]
        if paired:
            scores.insert(metrics.index(score.main) + 1, _difference_text(row.difference, score))
        costs = [size(round(row.mean("bytes_up"))), clock(row.mean("seconds"))] if row.spreads else ["-", "-"]
        lines.append([row.name, row.runs, *scores, *costs])
    headings = [known[key].named(score) for key in metrics]
    if paired:
        headings.insert(metrics.index(score.main) + 1, f"vs {baseline} (95 %)")
    return [heading, "Runs", *headings, *(head for head, _ in COSTS)], lines


def _own_metrics(found: Sequence[TableRow]) -> dict[str, ShownMetric]:
    """How the metrics that the recipe adds are shown."""
    results = [outcome.result for row in found for outcome in row.outcomes if outcome.result]
    return {key: metric for result in results for key, metric in own_metrics(result.get("measured", {})).items()}


def _difference_text(difference: PairedDifference | None, score: Score) -> str:
    """The mean difference and its interval, with signs."""
    if difference is None or difference.low is None or difference.high is None:
        return "-"
    scale, digits = (100, ".2f") if score.kind == PERCENT else (1, ".3g")
    mean, low, high = (f"{scale * value:+{digits}}" for value in (difference.mean, difference.low, difference.high))
    return f"{mean} ({low} to {high})"


def _text(spread: dict[str, float] | None, kind: str) -> str:
    return "-" if spread is None else cell_text(Spread(spread["mean"], spread["deviation"], int(spread["count"])), kind)


def as_dict(found: Sequence[TableRow]) -> list[dict[str, Any]]:
    """The rows as in the JSON file."""
    return [
        {
            "name": row.name,
            "metrics": row.spreads,
            **({"difference": vars(row.difference)} if row.difference else {}),
            "runs": [
                {
                    "seed": outcome.job.recipe.seed,
                    "folder": str(outcome.job.folder),
                    "metrics": outcome.result["metrics"] if outcome.result else None,
                    "problem": outcome.problem or None,
                    "diverged": outcome.diverged,
                    "stopped": outcome.stopped,
                }
                for outcome in row.outcomes
            ],
        }
        for row in found
    ]


def write(comparison: Comparison, stem: str, facts: Mapping[str, Any]) -> None:
    """stem.json, stem.md and stem.csv in the folder of the comparison. facts: what all rows are of."""
    folder, found = comparison.folder, comparison.rows
    content = {**facts, "baseline": comparison.baseline, "deviation": "population", "rows": as_dict(found)}
    _write(folder / f"{stem}.json", json.dumps(content, indent=2) + "\n")
    notes = [
        "Mean ± population deviation over seeds; accuracies and forgetting in per cent; bytes and seconds per run."
    ]
    if any(row.difference for row in found):
        notes.append(
            f"The column `vs {comparison.baseline}` is the mean difference over common seeds with its 95 % t-interval."
        )
    notes += [f"{comparison.note[0].upper()}{comparison.note[1:]}."] if comparison.note else []
    text = "\n\n".join([markdown_table(*table(found, comparison.heading, comparison.baseline)), *notes])
    _write(folder / f"{stem}.md", f"{text}\n")
    _write(folder / f"{stem}.csv", _csv(found, {key: facts[key] for key in ("split", "scale")}))


def _write(path: Path, text: str) -> None:
    write_atomic(path, text.encode(), shared=True)


def _csv(found: Sequence[TableRow], facts: Mapping[str, Any]) -> str:
    keys = sorted({key for row in found for key in row.spreads})
    parts = ("mean", "low", "high") if any(row.difference for row in found) else ()
    spread = [f"{key}_{part}" for key in keys for part in ("mean", "deviation")]
    lines: list[list[object]] = [["name", "runs", *facts, *(f"difference_{part}" for part in parts), *spread]]
    for row in found:
        numbers = [row.spreads.get(key, {}).get(part, "") for key in keys for part in ("mean", "deviation")]
        differences = [getattr(row.difference, part, "") for part in parts]
        finished = sum(o.result is not None for o in row.outcomes)
        lines.append([row.name, finished, *facts.values(), *differences, *numbers])
    return csv_text(lines)


@dataclass(frozen=True, repr=False)
class Comparison:
    """Finished runs by row, the best first. folder: of all run folders and the written tables. heading: what a row is.
    note: what the scores are of. baseline: the row that the others are compared with; "" for none."""

    folder: Path
    rows: Sequence[TableRow]
    heading: str
    note: str = ""
    baseline: str = ""

    @property
    def results(self) -> dict[str, list[Result]]:
        """The finished runs of every row, by seed."""
        return {
            row.name: [Result(outcome.job.folder, outcome.result) for outcome in row.outcomes if outcome.result]
            for row in self.rows
        }

    @property
    def problems(self) -> dict[Path, str]:
        """Run folders of runs that failed, with the error."""
        failed = (outcome for row in self.rows for outcome in row.outcomes if outcome.result is None)
        return {outcome.job.folder: outcome.problem for outcome in failed}

    @property
    def best(self) -> str:
        """The name of the best row; empty where no run finished."""
        return self.rows[0].name if self.rows and self.rows[0].spreads else ""

    @property
    def table(self) -> Any:
        """Every number as mean and deviation over seeds; a pandas frame, or a list of dicts without pandas."""
        rows = [
            {self.heading.lower(): row.name}
            | {f"{key}_{part}": spread[part] for key, spread in row.spreads.items() for part in ("mean", "deviation")}
            for row in self.rows
        ]
        return as_frame(rows)

    def plot(self) -> Any:
        """A matplotlib figure: every row's mean score over the tasks, of its first seed."""
        first = [(name, runs[0]) for name, runs in self.results.items() if runs]
        return plot([(name, run.folder, run.data) for name, run in first])

    def report(self, out: str | Path | None = None, *, figures: bool | None = None) -> Path:
        """Write the report of all runs (`everfed.report`)."""
        from everfed.reports.html import write

        folders = [run.folder for runs in self.results.values() for run in runs]
        return write(folders, out or self.folder / "report.html", figures=figures)

    def __repr__(self) -> str:
        return f"{markdown_table(*table(self.rows, self.heading, self.baseline))}\n{self._note()}"

    def _repr_html_(self) -> str:
        return html_table(*table(self.rows, self.heading, self.baseline), self._note())

    def _note(self) -> str:
        return "; ".join(part for part in (self.note, f"in {self.folder}") if part)
