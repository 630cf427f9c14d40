"""Run folders made by hand, in the form in which everfed writes them, with numbers that are known beforehand."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from everfed.metrics import matrix as accuracy_matrix
from everfed.recipe import Recipe, to_toml
from everfed.store.event_log import EventLog
from everfed.store.run import EVENTS, RunFolder

Event = dict[str, Any]
# Three tasks: Acc = (0.5 + 0.6 + 0.9) / 3, forgetting = ((0.8 - 0.5) + (0.7 - 0.6)) / 2
MATRIX = [[0.8, None, None], [0.6, 0.7, None], [0.5, 0.6, 0.9]]


def recipe(method: str = "fedavg", seed: int = 0, parts: Event | None = None, **sections: Any) -> Recipe:
    """parts: options of the method's parts."""
    stream = {"dataset": "digits", "scenario": "domain-incremental", "tasks": 3, "clients": 4}
    return Recipe.model_validate(
        {"name": "toy", "seed": seed, "method": {"name": method, **(parts or {})}, "stream": stream, **sections}
    )


def create(
    path: Path, method: str = "fedavg", seed: int = 0, settings: Event | None = None, **sections: Any
) -> RunFolder:
    """A folder with its recipe and settings, and no event."""
    chosen = {"data_dir": None, "scale": 1.0, "own_stream": False, **(settings or {})}
    return RunFolder.create(path, to_toml(recipe(method, seed, **sections)), chosen)


def start(
    method: str = "fedavg", seed: int = 0, rounds: int = 6, at: int = 0, tasks: int = 3, clients: int = 4
) -> Event:
    return {
        **{"event": "start", "method": method, "recipe": "toy", "seed": seed},
        **{"rounds": rounds, "tasks": tasks, "clients": clients, "round": at},
    }


def phase(index: int, task: int = 0, name: str = "train", **changed: Any) -> Event:
    return {
        **{"event": "phase", "round": index, "task": task, "phase": name, "repeat": 0, "clients": [0, 1, 2, 3]},
        **{"bytes_up": 100, "bytes_down": 200, "seconds": 0.5, "loss": 1.0 / (index + 1), "trained": 4},
        **changed,
    }


def evaluation(index: int, task: int, accuracy: Sequence[float | None], end: bool = True) -> Event:
    known = [value for value in accuracy[: task + 1] if value is not None]
    mean = sum(known) / len(known)
    return {
        **{"event": "evaluation", "round": index, "task": task, "task_end": end},
        **{"accuracy": list(accuracy), "acc": mean},
    }


def whole(matrix: Sequence[Sequence[float | None]] = MATRIX, per_task: int = 2, **announced: Any) -> Iterator[Event]:
    """All events of a run whose task t ends with the scores matrix[t]."""
    yield start(rounds=per_task * len(matrix), tasks=len(matrix), **announced)
    for task, row in enumerate(matrix):
        for i in range(per_task):
            yield phase(task * per_task + i, task)
        yield evaluation((task + 1) * per_task - 1, task, row[: task + 1])
    yield {"event": "end", "metrics": {}, "seconds": 3.0}


def log(folder: RunFolder, events: Sequence[Event] | Iterator[Event], clock: float | None = None) -> None:
    """Append events; with `clock`, one second apart from there on."""
    if clock is None:
        writer = EventLog(folder.path / EVENTS)
        for event in events:
            writer(event)
        writer.close()
        return
    with open(folder.path / EVENTS, "a") as file:
        for i, event in enumerate(events):
            file.write(json.dumps({"time": clock + i, **event}) + "\n")


def result(
    method: str = "fedavg", seed: int = 0, matrix: Sequence[Sequence[float | None]] = MATRIX, **changed: Any
) -> Event:
    metrics = accuracy_matrix.summary(matrix, n_test=[10] * len(matrix))
    scores = {"accuracy_matrix": matrix, "metrics": metrics}
    return {
        **{"everfed": "0.1.0", "method": method, "recipe": "toy", "seed": seed, "score": "accuracy", "logits": "full"},
        **{"evaluated": "global", "split": "test", "n_test": [10] * len(matrix), **scores},
        "by_logits": {rule: scores for rule in ("full", "seen", "task")},
        "curves": [],
        "stream": {
            "tasks": len(matrix),
            "who_got_what": [
                {"labels": [0, 1], "table": [[5, 0], [0, 7], [1, 1], [2, 0]], "clients": 4, "samples": 16}
            ],
        },
        "cost": {
            **{"rounds": 6, "seconds": 4.0, "bytes_up": 600, "bytes_down": 1200},
            "bytes_by_part": {"fedavg": {"up": 400, "down": 900}, "fedgp": {"up": 200, "down": 300}},
            **{"client_state_bytes": 64, "peak_memory_bytes": 5_000_000, "samples": 96},
        },
        "environment": {"python": "3.11", "torch": "2", "machine": "x86_64", "cores": 2, "engine": "eager"},
        **changed,
    }


def finished(path: Path, method: str = "fedavg", seed: int = 0, matrix: Any = MATRIX, **sections: Any) -> RunFolder:
    """A whole finished run."""
    folder = create(path, method, seed, **sections)
    log(folder, whole(matrix, method=method, seed=seed))
    folder.write_result(result(method, seed, matrix))
    return folder


def long_events(rounds: int, tasks: int = 10, clients: int = 100, seed: int = 0) -> Iterator[Event]:
    """A long run with two phases and an evaluation in every round, ten of the clients at a time."""
    draw = random.Random(seed)
    yield start(rounds=rounds, tasks=tasks, clients=clients)
    for index in range(rounds):
        task = index * tasks // rounds
        cohort = sorted(draw.sample(range(clients), 10))
        yield phase(index, task, clients=cohort, trained=10, loss=draw.random(), bytes_up=87_360, bytes_down=87_360)
        yield phase(index, task, "reference", clients=cohort, bytes_up=87_360, bytes_down=87_360)
        end = (index + 1) * tasks % rounds == 0
        yield evaluation(index, task, [draw.random() for _ in range(task + 1)], end)


def long_run(path: Path, rounds: int, **options: Any) -> RunFolder:
    """A finished run of that many rounds."""
    folder = create(path, stream={"dataset": "digits", "scenario": "domain-incremental", "tasks": 10, "clients": 100})
    with open(folder.path / EVENTS, "w") as file:
        file.writelines(
            json.dumps({"time": i / 10, **event}) + "\n" for i, event in enumerate(long_events(rounds, **options))
        )
    matrix = [[0.9 - 0.01 * (t - i) if i <= t else None for i in range(10)] for t in range(10)]
    folder.write_result(result(matrix=matrix))
    return folder
