"""A cell's number from a run: accuracies and forgetting in points, sizes in MiB, times in seconds.

A measure is None where a run did not measure it: a GPU's memory on a CPU, a curve that was not evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everfed import metrics
from everfed.metrics.matrix import Curves, Matrix, mean
from everfed.recipe.schema import Logits
from everfed.store.event_log import events

Result = dict[str, Any]
MIB = 2**20
LAST_ROUNDS = 10  # FedSSI's A_t and A(f) are their mean


@dataclass(frozen=True)
class Sample:
    """A finished run, or one that diverged, for one cell. result: its record. task: counted from 1; None for the end.
    logits: which logits are scored, None for the recipe's own. against: the other run of the same seed, where the
    measure needs one. differs: the keys in which its settings are not those of the table's recipe."""

    result: Result
    task: int | None = None
    logits: Logits | None = None
    against: Sample | None = None
    differs: tuple[str, ...] = ()

    @property
    def diverged(self) -> bool:
        return "diverged" in self.result

    @property
    def scores(self) -> Result:
        """The metrics and the accuracy matrix under the logits of the cell."""
        if self.logits is None:
            return self.result
        found: Result = self.result["by_logits"][self.logits]
        return found

    @property
    def matrix(self) -> list[list[float | None]]:
        """The accuracy matrix up to the cell's task."""
        rows: list[list[float | None]] = self.scores["accuracy_matrix"]
        return rows[: self.task]


Measure = Callable[[Sample], float | None]


def measure(name: str, unit: str, sample: Sample) -> float | None:
    """The number that `name` stands for; of a ratio, that of the run over that of the other one."""
    value = MEASURES[name](sample)
    if unit != "ratio" or value is None:
        return value
    other = MEASURES[name](sample.against) if sample.against else None
    return value / other if other else None


# from the metrics and the accuracy matrix ------------------------------------------------------------------------


def _metric(name: str, of: Callable[[Sample], Sample | None] = lambda sample: sample) -> Measure:
    """A metric of the run, or of the other one."""

    def found(sample: Sample) -> float | None:
        run = of(sample)
        return None if run is None else run.scores["metrics"].get(name)

    return found


def _in_points(measure: Measure) -> Measure:
    return lambda sample: _points(measure(sample))


def _of_last_pass(metric: Callable[[Matrix], float | None]) -> Measure:
    """A metric of the accuracy matrix of a task pool's last pass over the classes; none where there is one pass."""

    def found(sample: Sample) -> float | None:
        stream, rows = sample.result["stream"], sample.scores["accuracy_matrix"]
        if stream.get("scenario") != "task-pool" or not rows:
            return None
        begin = len(rows) - stream["classes"] // stream["classes_per_task"]
        return _points(metric([row[begin:] for row in rows[begin:]])) if begin > 0 else None

    return found


def _points(value: float | None) -> float | None:
    return None if value is None else 100 * value


# from the accuracy after every round -----------------------------------------------------------------------------


def curves(result: Result) -> list[list[list[float | None]]]:
    """curves[t][r][i] of `everfed.metrics`, from a result's evaluations."""
    return metrics.by_task(result["curves"], len(result["accuracy_matrix"]))


def _acc_last_rounds(sample: Sample) -> float | None:
    """Over the last ten rounds of the cell's task, or of the last one; a scaled run may have fewer."""
    return _points(_last_rounds(curves(sample.result)[: sample.task]))


def _acc_avg_incremental_last_rounds(sample: Sample) -> float | None:
    """The mean over the tasks of what `_acc_last_rounds` gives for each."""
    found = curves(sample.result)
    return _points(mean(_last_rounds(found[: task + 1]) for task in range(len(found))))


def _last_rounds(found: Curves) -> float | None:
    return metrics.acc_last_rounds(found, min(LAST_ROUNDS, len(found[-1])) or 1)


def _delta(sample: Sample) -> float | None:
    """FedSSI's Delta of this run's method: `against` is FedSSI's own run."""
    if sample.against is None:
        return None
    measures = (_acc_last_rounds, MEASURES["rounds_to_best"])
    numbers = [of(run) for of in measures for run in (sample.against, sample)]
    present = [number for number in numbers if number]  # neither accuracies nor rounds of 0 can be compared
    return metrics.delta(*present) if len(present) == len(numbers) else None


# from perplexities -----------------------------------------------------------------------------------------------


_perplexity, _forgetting_factor = _metric("perplexity"), _metric("forgetting_factor")
_perplexity_without_replay = _metric("perplexity", lambda sample: sample.against)


def _rcp(sample: Sample) -> float | None:
    ours, theirs = _perplexity(sample), _perplexity_without_replay(sample)
    return metrics.rcp(ours, theirs) if ours and theirs else None


def _forgetting_factor_relative(sample: Sample) -> float | None:
    raw, theirs = _forgetting_factor(sample), _perplexity_without_replay(sample)
    return raw / theirs if raw is not None and theirs else None


def _rcp_of_period(sample: Sample) -> float | None:
    """The period's, over the perplexity without replay on all periods."""
    without = _perplexity_without_replay(sample)
    if sample.against is None or without is None:
        return None
    ours, theirs = (_of_period(run, sample.task)[-1] for run in (sample, sample.against))
    return metrics.rcp(ours, theirs, without)


def _forgetting_of_period(sample: Sample) -> float | None:
    without = _perplexity_without_replay(sample)
    *history, latest = _of_period(sample, sample.task)
    return None if without is None else metrics.forgetting_factor_relative(history, latest, without)


def _of_period(sample: Sample, period: int | None) -> list[float]:
    """The perplexity on a period's test text after every period."""
    return [row[(period or 1) - 1] for row in sample.result["accuracy_matrix"]]


# costs -----------------------------------------------------------------------------------------------------------


def _alone(measure: Measure) -> Measure:
    """Of a time: none where other programs used the device."""
    return lambda sample: None if sample.result.get("shared_device") else measure(sample)


def _mebibytes(direction: str) -> Measure:
    """Payload per client and round, mean over the rounds."""

    def found(sample: Sample) -> float | None:
        cost, clients = sample.result["cost"], sample.result["stream"].get("clients_per_round")
        return cost[direction] / cost["rounds"] / clients / MIB if clients else None

    return found


def _device_mebibytes(sample: Sample) -> float | None:
    peak = sample.result["environment"].get("peak_device_bytes")
    return None if peak is None else peak / MIB


def _state_mebibytes(sample: Sample) -> float | None:
    """What a client keeps between rounds, mean over clients."""
    clients = sample.result["stream"].get("clients")
    return sample.result["cost"]["client_state_bytes"] / clients / MIB if clients else None


# from the events of a run ------------------------------------------------------------------------------------------


def _train_seconds(first: bool) -> Callable[[Path], float | None]:
    """Mean seconds of local training per client and round, in the first task or in the later ones."""

    def found(folder: Path) -> float | None:
        lines = [line for line in events(folder, "phase") if line["phase"] == "train" and line.get("trained")]
        return mean(line["seconds"] / line["trained"] for line in lines if (line["task"] == 0) == first)

    return found


def _mean(name: str) -> Callable[[Path], float | None]:
    """Mean over the rounds of a number that a part reports."""
    return lambda folder: mean(event[name] for event in events(folder, "measure") if name in event)


def _gap(folder: Path) -> float | None:
    """Local less global accuracy in each task's round with the best global one, mean over tasks."""
    best: dict[int, tuple[float, float]] = {}
    for event in events(folder, "measure"):
        if "local_global_gap" in event:
            found = (event["global_accuracy"], event["local_global_gap"])
            best[event["task"]] = max(best.get(event["task"], found), found)
    return 100 * sum(gap for _, gap in best.values()) / len(best) if best else None


def _local_accuracy(folder: Path) -> float | None:
    """Accuracy of the clients' own models in the last round in which one was measured."""
    found = [event["local_accuracy"] for event in events(folder, "measure") if "local_accuracy" in event]
    return 100 * found[-1] if found else None


FROM_EVENTS: dict[str, Callable[[Path], float | None]] = {
    "train_seconds_first_task": _train_seconds(first=True),
    "train_seconds_later_tasks": _train_seconds(first=False),
    "temporal_cosine": _mean("temporal_cosine"),
    "spatial_cosine": _mean("spatial_cosine"),
    "gap": _gap,
    "local_accuracy": _local_accuracy,
}


def from_events(folder: Path) -> dict[str, float]:
    """The measures that a record cannot give from its numbers, computed from a run folder's events."""
    found = {name: of(folder) for name, of in FROM_EVENTS.items()}
    return {name: value for name, value in found.items() if value is not None}


def _recorded(name: str) -> Measure:
    return lambda sample: sample.result.get("from_events", {}).get(name)


MEASURES: dict[str, Measure] = {
    **{
        name: _in_points(_metric(name))
        for name in (
            "acc",
            "acc_avg_incremental",
            "acc_avg_incremental_micro",
            "learning_accuracy",
            "forgetting",
            "forgetting_standard",
            "forgetting_clipped",
            "forgetting_full",
        )
    },
    "acc_after_task": _in_points(lambda sample: metrics.acc_t(sample.matrix)),
    "forgetting_clipped_after_task": _in_points(lambda sample: metrics.forgetting_clipped(sample.matrix)),
    "learning_accuracy_last_pass": _of_last_pass(metrics.learning_accuracy),
    "forgetting_last_pass": _of_last_pass(metrics.forgetting),
    "acc_last_rounds": _acc_last_rounds,
    "acc_avg_incremental_last_rounds": _acc_avg_incremental_last_rounds,
    "rounds_to_best": lambda sample: metrics.rounds_to_best_sum(curves(sample.result)),
    "rounds_to_best_of_task": lambda sample: metrics.rounds_to_best_per_task(curves(sample.result))[
        (sample.task or 1) - 1
    ],
    "delta": _delta,
    "perplexity": _perplexity,
    "forgetting_factor": _forgetting_factor,
    "rcp": _rcp,
    "forgetting_factor_relative": _forgetting_factor_relative,
    "rcp_of_period": _rcp_of_period,
    "forgetting_of_period": _forgetting_of_period,
    "seconds": _alone(lambda sample: float(sample.result["cost"]["seconds"])),
    "seconds_per_round": _alone(lambda sample: sample.result["cost"]["seconds"] / sample.result["cost"]["rounds"]),
    "mebibytes_up": _mebibytes("bytes_up"),
    "mebibytes_down": _mebibytes("bytes_down"),
    "device_mebibytes": _device_mebibytes,
    "state_mebibytes": _state_mebibytes,
    **{name: _recorded(name) for name in FROM_EVENTS},
    **{name: _alone(_recorded(name)) for name in FROM_EVENTS if name.startswith("train_seconds")},
}
