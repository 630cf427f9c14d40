"""The table of a comparison: mean and population deviation over seeds, as text, JSON, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everfed.experiments.jobs import Outcome
from everfed.metrics.scores import METRICS, PERCENT, Score, plain_text, score_of
from everfed.reports.formats import markdown_table
from everfed.store.files import write_atomic

SHOWN = tuple(key for key in METRICS if key != "bwt")  # a terminal is narrow, and bwt is close to forgetting
COSTS = (("Bytes up", "bytes_up"), ("Time", "seconds"))


@dataclass(frozen=True)
class TableRow:
    """One method or one cell of a grid. spreads: {metric: {mean, deviation, count}}; empty when no seed finished."""

    name: str
    outcomes: tuple[Outcome, ...]
    spreads: dict[str, dict[str, float]]

    def mean(self, metric: str) -> float:
        return self.spreads[metric]["mean"]

    @property
    def score(self) -> Score:
        """The score of its runs."""
        return score_of(next((outcome.result["score"] for outcome in self.outcomes if outcome.result), "accuracy"))

    @property
    def rank(self) -> float:
        """The better, the higher; lowest where nothing was scored."""
        score = self.score
        return score.better * self.mean(score.main) if score.main in self.spreads else -float("inf")


def rows(outcomes: Sequence[Outcome]) -> list[TableRow]:
    """Outcomes by row, the best first; rows without a finished run come last."""
    grouped: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        grouped.setdefault(outcome.job.row, []).append(outcome)
    found = [TableRow(name, tuple(group), _spreads(group)) for name, group in grouped.items()]
    return sorted(found, key=lambda row: row.rank, reverse=True)


def _spreads(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    from everfed.metrics import mean_and_deviation

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


def table(found: Sequence[TableRow], heading: str) -> tuple[list[str], list[list[str]]]:
    """(columns, lines), fractions in per cent; columns without a value are left out."""
    from everfed.reports.formats import clock, size

    score = next((row.score for row in found if row.spreads), score_of("accuracy"))
    metrics = [key for key in SHOWN if any(key in row.spreads for row in found)]
    lines = []
    for row in found:
        scores = [_text(row.spreads.get(key), METRICS[key].kind_of(score)) for key in metrics]
        costs = [size(round(row.mean("bytes_up"))), clock(row.mean("seconds"))] if row.spreads else ["-", "-"]
        finished = sum(outcome.result is not None for outcome in row.outcomes)
        lines.append([row.name, f"{finished}/{len(row.outcomes)}", *scores, *costs])
    return [heading, "Runs", *(METRICS[key].named(score) for key in metrics), *(head for head, _ in COSTS)], lines


def _text(spread: dict[str, float] | None, kind: str) -> str:
    if spread is None:
        return "-"
    scale, text = (100, "{:.2f}".format) if kind == PERCENT else (1, plain_text)
    mean = text(scale * spread["mean"])
    return mean if spread["count"] == 1 else f"{mean} ± {text(scale * spread['deviation'])}"


def as_dict(found: Sequence[TableRow]) -> list[dict[str, Any]]:
    """The rows as in the JSON file."""
    return [
        {
            "name": row.name,
            "metrics": row.spreads,
            "runs": [
                {
                    "seed": outcome.job.recipe.seed,
                    "folder": str(outcome.job.folder),
                    "metrics": outcome.result["metrics"] if outcome.result else None,
                    "problem": outcome.problem or None,
                }
                for outcome in row.outcomes
            ],
        }
        for row in found
    ]


def write(folder: Path, stem: str, found: Sequence[TableRow], heading: str, facts: dict[str, Any]) -> None:
    """stem.json, stem.md and stem.csv in `folder`."""
    content = {**facts, "deviation": "population", "rows": as_dict(found)}
    _write(folder / f"{stem}.json", json.dumps(content, indent=2) + "\n")
    note = "Mean ± population deviation over seeds; accuracies and forgetting in per cent; bytes and seconds per run."
    _write(folder / f"{stem}.md", f"{markdown_table(*table(found, heading))}\n\n{note}\n")
    _write(folder / f"{stem}.csv", _csv(found))


def _write(path: Path, text: str) -> None:
    write_atomic(path, text.encode(), shared=True)


def _csv(found: Sequence[TableRow]) -> str:
    keys = sorted({key for row in found for key in row.spreads})
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["name", "runs", *(f"{key}_{part}" for key in keys for part in ("mean", "deviation"))])
    for row in found:
        numbers = [row.spreads.get(key, {}).get(part, "") for key in keys for part in ("mean", "deviation")]
        writer.writerow([row.name, sum(o.result is not None for o in row.outcomes), *numbers])
    return lines.getvalue()
