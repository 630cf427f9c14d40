"""What a finished run leaves: the numbers of result.json, a warning where nothing was learned, the trained model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import everfed
from everfed.core.server import RunState
from everfed.errors import DataError
from everfed.recipe import Recipe, read
from everfed.session import assemble
from everfed.session.assembly import fingerprint
from everfed.session.execution import _require_data
from everfed.session.reporting import report_fault
from everfed.session.result import _curves, _measured, _scores, _without_metrics, at_chance
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import Toy


# at chance -----------------------------------------------------------------------------------------------------------
def learned(task_il: float | None, class_il: float | None = None) -> dict[str, Any]:
    both = {"metrics": {"learning_accuracy": class_il}}
    return {**both, "by_logits": {"full": both, "task": {"metrics": {"learning_accuracy": task_il}}}}


@pytest.mark.parametrize(
    ("accuracy", "warned"), [(0.25, True), (0.29, True), (0.31, False), (0.9, False), (None, False)]
)
def test_a_model_that_guesses_is_warned_about(accuracy: float | None, warned: bool) -> None:
    """Four classes in every task: chance is 25 %."""
    assert (at_chance(Toy(), learned(accuracy)) is not None) is warned


def test_chance_is_that_of_a_task_s_own_classes() -> None:
    """Two classes in each of two tasks: 52 % is no more than guessing, though there are four classes."""
    warning = at_chance(ClassToy(), learned(0.52))
    assert warning is not None
    assert "52.0 % among the classes of a task right after it was trained, where guessing gives 50.0 %" in warning


def test_chance_is_the_mean_over_tasks() -> None:
    """Two classes, then four: 37.5 %."""

    class Growing(ClassToy):
        def labels(self, task: int) -> tuple[int, ...]:
            return tuple(range(2 + 2 * task))

    assert "guessing gives 37.5 %" in (at_chance(Growing(), learned(0.4)) or "")
    assert at_chance(Growing(), learned(0.45)) is None


def test_a_model_that_keeps_all_classes_apart_has_learned() -> None:
    """45 % of four classes, and 80 % where only the task's own two may answer: no warning, though 45 is below 50."""
    assert at_chance(ClassToy(), learned(0.8, class_il=0.45)) is None


def test_a_task_of_one_class_cannot_be_guessed_wrongly() -> None:
    """All of its samples are right however the model is: no word of another learning rate."""

    class OneClassEach(ClassToy):
        def labels(self, task: int) -> tuple[int, ...]:
            return (task,)

    assert at_chance(OneClassEach(), learned(1.0)) is None


def test_other_scores_have_no_chance() -> None:
    assert at_chance(Toy(score="perplexity"), learned(0.0)) is None


# scores --------------------------------------------------------------------------------------------------------------
def state(rows: dict[int, list[list[float] | None]], curves: list[dict[str, Any]] | None = None) -> RunState:
    return RunState({}, rows=rows, curves=curves or [])


def test_tasks_that_nobody_was_scored_on_are_left_out_of_the_metrics() -> None:
    """Counts are (tests, right answers). Task 1 has no tests; at the end of the run task 0 is at 60 % and task 2 at
    80 %: Acc 70 %. Task 0 fell from 90 %: forgetting 30 %."""
    rows: dict[int, list[list[float] | None]] = {
        0: [[10, 9], None, None],
        1: [[10, 7], None, None],
        2: [[10, 6], None, [10, 8]],
    }
    found = _scores(Toy(), "accuracy", "full", state(rows), [10, 0, 10], None)
    assert found["accuracy_matrix"] == [[0.9, None, None], [0.7, None, None], [0.6, None, 0.8]]
    assert found["metrics"]["acc"] == pytest.approx(0.7) and found["metrics"]["forgetting"] == pytest.approx(0.3)


def test_the_last_row_is_the_end_of_the_run_where_its_last_task_has_no_test() -> None:
    """Task 0 after the run is at 50 %, not at the 70 % of task 1's end."""
    rows: dict[int, list[list[float] | None]] = {
        0: [[10, 9], None, None],
        1: [[10, 7], [10, 6], None],
        2: [[10, 5], [10, 4], None],
    }
    assert _scores(Toy(), "accuracy", "full", state(rows), [10, 10, 0], None)["metrics"]["acc"] == pytest.approx(0.45)


def test_scores_are_of_counts_without_the_sums_of_metrics() -> None:
    """At the end of every task, and of the untrained model."""
    setup = assemble(read("demo", sets=["eval.metrics=['per-class']"])).setup
    row = [10.0, 5.0, 6.0, 7.0]
    with_sums = state({0: [[*row, *[1.0] * setup.metrics.size], None]})
    with_sums.initial = [[*row, *[2.0] * setup.metrics.size]]
    plain = _without_metrics(SimpleNamespace(setup=setup), with_sums)  # type: ignore[arg-type]
    assert plain.rows == {0: [row, None]} and plain.initial == [row]


def test_a_metric_of_the_whole_is_that_of_all_tasks_sums() -> None:
    class Known:
        metrics = (SimpleNamespace(name="m", percent=True, better="high"),)

        def values(self, row: list[float]) -> dict[str, float]:
            return {"m": row[1] / row[0]}

        def means(self, rows: list[list[float]]) -> dict[str, float]:
            return {"m": sum(row[1] / row[0] for row in rows) / len(rows)}

    run: Any = SimpleNamespace(setup=SimpleNamespace(metrics=Known()))
    found = _measured(run, state({0: [[10.0, 9.0], None], 1: [[10.0, 5.0], [30.0, 3.0]]}))["m"]
    assert found["by_task"] == found["matrix"][1] == [0.5, 0.1] and found["matrix"][0] == [0.9, None]
    assert (found["whole"], found["mean"]) == (8 / 40, 0.3)


def test_rounds_are_counted_only_where_every_round_was_scored() -> None:
    stream = Toy(tasks=1, rounds_per_task=3)
    every = [{"round": index, "task": 0, "accuracy": [0.1 * index]} for index in range(3)]
    assert _curves(state({}, every), stream) == [[[0.0], [0.1], [0.2]]]
    assert _curves(state({}, every[1:]), stream) is None


# a run ---------------------------------------------------------------------------------------------------------------
RECIPE = {
    "stream": {"dataset": "digits", "scenario": "class-incremental", "tasks": 2, "clients": 2, "max_train": 60},
    "model": {"kind": "small-cnn"},
    "train": {"rounds_per_task": 1},
    "method": {"name": "fedavg"},
    "engine": {"kind": "eager"},
}


def test_the_matrix_is_that_of_the_recipe_s_logits_and_the_model_is_ready_for_use(tmp_path: Path) -> None:
    result = everfed.run({**RECIPE, "eval": {"logits": "task"}}, tmp_path / "run").data
    assert result["accuracy_matrix"] == result["by_logits"]["task"]["accuracy_matrix"]
    assert result["accuracy_matrix"] != result["by_logits"]["full"]["accuracy_matrix"]
    loaded = everfed.load(tmp_path / "run")
    assert not any(module.training for module in loaded.model.modules())
    assert loaded.result == result


def test_a_stream_s_own_seed_draws_it_whatever_the_run_s_seed_is() -> None:
    def divided(seed: int, own: int | None = None) -> list[list[int]]:
        recipe = Recipe.model_validate({**RECIPE, "seed": seed, "stream": {**RECIPE["stream"], "seed": own}})
        return [sorted(assemble(recipe).stream.data(client, 0).ids.tolist()) for client in range(2)]

    own = divided(1, own=5)
    assert own == divided(2, own=5) == divided(5)
    assert divided(1) != divided(2)


# faults --------------------------------------------------------------------------------------------------------------
def test_a_fault_reaches_every_observer_that_still_works() -> None:
    """The log may lie on the disk that is full."""
    seen: list[dict[str, Any]] = []

    def full(event: dict[str, Any]) -> None:
        raise OSError("no space left on device")

    report_fault([full, seen.append], ValueError("a mistake"))
    assert seen == [{"event": "fault", "message": "ValueError: a mistake"}]


# what a run may go on with ----------------------------------------------------------------------------------------
def test_a_run_goes_on_with_another_monitor_and_engine_but_not_with_another_rate() -> None:
    def of(*sets: str) -> str:
        return fingerprint(assemble(read("demo", sets=["method.name=fedavg", *sets])))

    first = of()
    assert of("monitor.kind=page-hinkley", "engine.kind=eager") == first != of("train.optimizer.lr=0.123")
    run = assemble(read("demo", sets=["method.name=fedavg"]))
    assert fingerprint(replace(run, frozen="0123")) != first  # nor with other frozen weights


def test_an_option_of_the_aggregating_part_counts_before_that_of_the_method() -> None:
    def weighting(*sets: str) -> str:
        part: Any = assemble(read("demo", sets=["method.name=fedavg", *sets])).method.aggregator
        return str(part.weighting)

    assert weighting("method.weighting=samples") == "samples"
    assert weighting("method.weighting=samples", "method.fedavg.weighting=uniform") == "uniform"


@pytest.mark.parametrize(("sent", "refused"), [({"evaluate": 32}, True), ({"evaluate": 32, "fedavg": 8}, False)])
def test_a_run_in_which_clients_only_scored_had_no_data(sent: dict[str, int], refused: bool) -> None:
    final = RunState({})
    final.traffic.up.update(sent)
    made = assemble(read("demo", sets=["method.name=fedavg"]))
    with pytest.raises(DataError, match="no client had any sample") if refused else nullcontext():
        _require_data(made, final)
