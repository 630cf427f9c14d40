"""Results and cells made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from everfed import metrics
from everfed.experiments.papers.measures import Sample, from_events
from everfed.experiments.papers.planning import Experiment, TableCell
from everfed.experiments.papers.tables import PrintedCell, Stated, TableMetric

M1 = [[0.9, 0.1, 0.2], [0.6, 0.8, 0.1], [0.5, 0.7, 0.85]]  # a worked example; rows are tasks learned
POINTS = TableMetric(measure="acc")
STATED = Stated(dataset="mnist", clients=10)
STREAM = {
    "dataset": "mnist",
    "clients": 10,
    "clients_per_round": 5,
    "scale": 1.0,
    "samples": {"train": 60_000, "validation": 0, "test": 10_000},
    "test_labels": "2fd8de6bdb8d1178",
}


def result(matrix: list[list[float]] = M1, **changes: Any) -> dict[str, Any]:
    """A record, as far as measures and verdicts look at it. Task-IL is 0.1 above, where it can be."""
    task_il = [[min(1.0, value + 0.1) for value in row] for row in matrix]
    scored = {"accuracy_matrix": matrix, "metrics": metrics.summary(matrix)}
    made = {
        **scored,
        "by_logits": {"full": scored, "task": {"accuracy_matrix": task_il, "metrics": metrics.summary(task_il)}},
        "curves": [{"round": t, "task": t, "accuracy": row[: t + 1]} for t, row in enumerate(matrix)],
        "cost": {"seconds": 30.0, "rounds": 3, "bytes_up": 0, "bytes_down": 0, "client_state_bytes": 0},
        "stream": STREAM,
        "environment": {},
    }
    return {**made, **changes}


def sample(matrix: list[list[float]] = M1, folder: Path | None = None, **changes: Any) -> Sample:
    """A run; folder: where its events lie."""
    return Sample(result(matrix, **({"from_events": from_events(folder)} if folder else {}), **changes))


def accuracy(value: float) -> Sample:
    """A run with one task and this accuracy."""
    return sample([[value]])


def write_events(folder: Path, *events: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def target(value: float | None, std: float | None = None, method: str = "FedAvg", text: str = "") -> PrintedCell:
    return PrintedCell("FedGP", "T1", "MNIST", "K=10", method, "Acc_T", value, std, text or str(value))


def cell(method: str = "FedAvg", value: float | None = 50.0, std: float | None = None, **changes: Any) -> TableCell:
    """A cell of a column "MNIST" whose run is known by the method's name; the baseline of none."""
    made = TableCell(
        dataset="MNIST",
        setting="K=10",
        method=method,
        metric="Acc_T",
        measured=POINTS,
        logits=None,
        target=None if value is None else target(value, std, method),
        experiment=Experiment("recipe", method),
        against=None,
        missing="",
        not_judged="no number is printed" if value is None else "",
        stated=STATED,
        seeds=5,
    )
    return replace(made, **changes)
