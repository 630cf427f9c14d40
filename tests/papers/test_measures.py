"""A cell's number from a run, against worked examples and printed numbers of the papers."""

from __future__ import annotations

from pathlib import Path

import pytest

from everfed.experiments.papers.measures import MEASURES, MIB, Sample, curves, measure
from everfed.experiments.papers.tables import papers
from everfed.store.event_log import events
from tests.papers.made import M1, result, sample, write_events


def value(name: str, run: Sample, unit: str = "points") -> float | None:
    return measure(name, unit, run)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("acc", 68.3333333),
        ("acc_avg_incremental", 76.1111111),
        ("learning_accuracy", 85.0),
        ("forgetting", 25.0),
        ("forgetting_clipped", 25.0),
    ],
)
def test_metrics_are_in_points(name: str, expected: float) -> None:
    assert value(name, sample()) == pytest.approx(expected)


def test_the_logits_of_the_cell_are_scored() -> None:
    assert value("acc", Sample(result(), logits="task")) == pytest.approx(78.3333333)


def test_after_a_task() -> None:
    """Acc_t of M1 is .9, .7, .6833; nothing is forgotten before the second task."""
    at = [Sample(result(), task=t) for t in (1, 2, 3)]
    assert [value("acc_after_task", run) for run in at] == pytest.approx([90.0, 70.0, 68.3333333])
    assert value("forgetting_clipped_after_task", at[0]) is None
    assert [value("forgetting_clipped_after_task", run) for run in at[1:]] == pytest.approx([30.0, 25.0])


def test_the_last_pass_over_the_classes_is_scored_alone() -> None:
    """Four tasks are two passes over four classes, two at a time: (.7 + .8) / 2, and .7 - .4 forgotten."""
    rows = [[0.9], [0.1, 0.9], [0.2, 0.9, 0.7], [0.3, 0.8, 0.4, 0.8]]
    pool = {"scenario": "task-pool", "classes": 4, "classes_per_task": 2}
    again = sample(rows, stream=pool)
    assert value("learning_accuracy_last_pass", again) == pytest.approx(75.0)
    assert value("forgetting_last_pass", again) == pytest.approx(30.0)
    once = sample(rows[:2], stream=pool)
    assert value("learning_accuracy_last_pass", once) is None is value("learning_accuracy_last_pass", sample())


def curve(*tasks: list[list[float]]) -> Sample:
    found = [{"round": 0, "task": t, "accuracy": row} for t, rows in enumerate(tasks) for row in rows]
    return sample([[0.5] * len(tasks)] * len(tasks), curves=found)


def test_the_last_rounds_and_the_rounds_to_the_best() -> None:
    """FedSSI's A(f) is the mean of the last ten rounds; the best of (.1, .5, .5, .4) is the second."""
    run = curve([[0.1], [0.5], [0.5], [0.4]], [[0.0, 0.2 * r] for r in range(6)])
    assert curves(run.result)[0] == [[0.1], [0.5], [0.5], [0.4]]
    assert value("rounds_to_best_of_task", Sample(run.result, task=1)) == 2
    assert value("rounds_to_best", run) == 2 + 6
    assert value("acc_last_rounds", run) == pytest.approx(100 * sum(0.1 * r for r in range(6)) / 6)
    long = curve([[0.9]], [[0.0, 0.0]] * 5 + [[0.0, 1.0]] * 10)
    assert value("acc_last_rounds", long) == pytest.approx(50.0)


def test_fedssis_accuracies_have_one_definition() -> None:
    """A(f) is A_t of the last task and A_bar the mean of all A_t, as in FedSSI's Tables 2 and 8; all from the last ten
    rounds: (0.5 + 1) / 2 and, over two tasks, (0.2 + 0.4) / 2."""
    long = curve([[0.0]] * 3 + [[0.5]] * 5 + [[1.0]] * 5, [[0.2, 0.4]] * 12)
    metric = papers()["fedssi"].metrics
    after = [value(metric["A_t"].measure, Sample(long.result, task=t)) for t in (1, 2)]
    assert after == pytest.approx([75.0, 30.0])
    assert value(metric["A(f)"].measure, long) == after[-1]
    assert value(metric["A_bar"].measure, long) == pytest.approx(52.5)


def test_delta() -> None:
    """42.58 after 304 rounds against 35.88 after 315: 22.17 (FedSSI, Table 4)."""
    best = {304: 0.4258, 315: 0.3588}
    runs = {rounds: curve([[0.0]] * (rounds - 1) + [[acc]] * 10) for rounds, acc in best.items()}
    found = value("delta", Sample(runs[315].result, against=runs[304]), "per cent")
    assert found == pytest.approx(22.17, abs=0.005)
    assert value("delta", runs[315]) is None


def test_a_ratio_is_to_the_other_run() -> None:
    slow, fast = sample(cost={"seconds": 45.0, "rounds": 3}), sample(cost={"seconds": 30.0, "rounds": 3})
    assert value("seconds", Sample(slow.result, against=fast), "ratio") == 1.5
    assert value("seconds_per_round", slow) == 15.0
    assert value("seconds", slow, "ratio") is None


def test_times_of_a_shared_device_are_no_measure(tmp_path: Path) -> None:
    """Nor are ratios to them; scores are."""
    train = {"event": "phase", "phase": "train", "round": 0, "task": 0, "seconds": 2.0, "trained": 2}
    write_events(tmp_path, train, {**train, "round": 1, "task": 1})
    alone, beside = sample(folder=tmp_path), sample(folder=tmp_path, shared_device=True)
    for name in ("seconds", "seconds_per_round", "train_seconds_first_task", "train_seconds_later_tasks"):
        assert value(name, alone) is not None and value(name, Sample(alone.result, against=alone), "ratio") == 1.0
        assert value(name, beside) is None and value(name, Sample(alone.result, against=beside), "ratio") is None
    assert value("acc", beside) == value("acc", alone)


def test_sizes_are_per_client_and_round() -> None:
    cost = {"seconds": 1.0, "rounds": 4, "bytes_up": 40 * MIB, "bytes_down": 60 * MIB, "client_state_bytes": 30 * MIB}
    run = sample(cost=cost)  # 5 of 10 clients per round
    assert [value(f"mebibytes_{way}", run) for way in ("up", "down")] == [2.0, 3.0]
    assert value("state_mebibytes", run) == 3.0
    assert value("device_mebibytes", run) is None
    assert value("device_mebibytes", sample(environment={"peak_device_bytes": 5 * MIB})) == 5.0


def test_perplexity() -> None:
    """RCP(90, 100) = -0.1; a forgetting factor of 5 beside a perplexity of 100 is 0.05."""
    ours = sample(metrics={"perplexity": 90.0, "forgetting_factor": 5.0})
    without = sample(metrics={"perplexity": 100.0})
    both = Sample(ours.result, against=without)
    assert value("rcp", both, "relative") == pytest.approx(-0.1)
    assert value("forgetting_factor_relative", both, "relative") == pytest.approx(0.05)
    assert value("rcp", ours, "relative") is None


def test_perplexity_by_period() -> None:
    """On period 1: 90 against 110 without replay, whose perplexity on all periods is 100; 90 after 85 was forgotten."""
    ours = sample(accuracy_matrix=[[85.0, 120.0], [90.0, 95.0]])
    without = sample(accuracy_matrix=[[80.0, 130.0], [110.0, 91.0]], metrics={"perplexity": 100.0})
    both = Sample(ours.result, task=1, against=without)
    assert value("rcp_of_period", both, "relative") == pytest.approx(-0.2)
    assert value("forgetting_of_period", both, "relative") == pytest.approx(0.05)
    assert value("rcp_of_period", ours, "relative") is None


def test_measurements_of_parts(tmp_path: Path) -> None:
    first = {"event": "measure", "round": 0, "part": "stamp", "task": 0, "temporal_cosine": 0.2}
    measured = [first, {**first, "round": 1, "temporal_cosine": 0.4}]
    write_events(tmp_path, *measured, {"event": "checkpoint", "round": 1}, {**measured[1], "temporal_cosine": 0.6})
    assert value("temporal_cosine", sample(folder=tmp_path), "cosine") == pytest.approx(0.4)
    assert value("spatial_cosine", sample(folder=tmp_path), "cosine") is None
    assert len(events(tmp_path, "measure")) == 2


def test_the_accuracy_of_the_clients_own_models_is_that_of_the_last_round(tmp_path: Path) -> None:
    events = (
        {"event": "measure", "round": r, "task": 0, "part": "gap", "local_accuracy": a} for r, a in ((0, 0.2), (1, 0.6))
    )
    write_events(tmp_path, *events)
    assert value("local_accuracy", sample(folder=tmp_path)) == pytest.approx(60.0)
    assert value("local_accuracy", sample()) is None


def test_the_gap_is_that_of_each_tasks_best_round(tmp_path: Path) -> None:
    def gap(index: int, task: int, local: float, shared: float) -> dict:
        numbers = {"global_accuracy": shared, "local_global_gap": local - shared}
        return {"event": "measure", "round": index, "task": task, "part": "gap", **numbers}

    write_events(tmp_path, gap(0, 0, 0.9, 0.5), gap(1, 0, 0.9, 0.7), gap(2, 1, 0.8, 0.4), gap(3, 1, 0.9, 0.3))
    assert value("gap", sample(folder=tmp_path)) == pytest.approx(100 * (0.2 + 0.4) / 2)


def test_seconds_of_local_training(tmp_path: Path) -> None:
    def train(index: int, task: int, seconds: float) -> dict:
        return {"event": "phase", "phase": "train", "round": index, "task": task, "seconds": seconds, "trained": 2}

    other = {"event": "phase", "phase": "reference", "round": 0, "task": 0, "seconds": 99.0}
    write_events(tmp_path, train(0, 0, 2.0), other, train(1, 1, 4.0), train(2, 2, 8.0))
    run = sample(folder=tmp_path)
    assert (value("train_seconds_first_task", run), value("train_seconds_later_tasks", run)) == (1.0, 3.0)


def test_every_measure_takes_a_run_as_it_comes(tmp_path: Path) -> None:
    write_events(tmp_path)
    run = sample(M1, tmp_path)
    assert all(isinstance(found(run), float | int | None) for found in MEASURES.values())
