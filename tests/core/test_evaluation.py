"""Evaluation: which classes count as seen, what the event's mean covers, and top-k, the same on every engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from everfed.core.context import Setup
from everfed.core.engine import Engine
from everfed.core.evaluate import EvalOptions, EvalSpec, score_tasks
from everfed.core.message import Model
from everfed.core.method import compose
from everfed.core.part import Personal
from everfed.core.stream import RoundPlan
from everfed.core.tree import Tree
from everfed.engines.eager import Eager
from everfed.engines.processes import Processes
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.store.clients import ClientStore
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import Bench, Outcome, Toy


class Recording(Eager):
    """Keeps every EvalSpec that the runner asks for."""

    specs: list[EvalSpec]

    def evaluate(self, model: Model, spec: EvalSpec) -> Tensor:
        self.specs.append(spec)
        return super().evaluate(model, spec)


def specs(bench: Bench) -> list[EvalSpec]:
    found: list[EvalSpec] = []

    def build(setup: Setup, store: ClientStore) -> Engine:
        engine = Recording(setup, store, bench.build_module)
        engine.specs = found
        return engine

    bench.run(build)
    return found


@dataclass(frozen=True)
class OneAhead(ClassToy):
    """Three tasks of two classes; client 1 is a task ahead of the others."""

    tasks: int = 3
    classes: int = 6
    asynchronous: bool = True

    def round(self, index: int) -> RoundPlan:
        plan = super().round(index)
        return replace(plan, tasks={0: plan.task, 1: min(plan.task + 1, self.tasks - 1)})


def test_classes_are_seen_as_soon_as_any_client_has_begun_their_task() -> None:
    assert [(spec.tasks, spec.seen) for spec in specs(Bench(stream=OneAhead()))] == [
        ((0,), 2), ((0, 1), 3), ((0, 1, 2), 3),
    ]  # fmt: skip
    assert [spec.seen for spec in specs(Bench(stream=ClassToy(tasks=3, classes=6)))] == [1, 2, 3]


def test_the_classes_of_a_task_not_yet_begun_do_not_compete_under_the_seen_rule() -> None:
    """Every logit favours the last class, 5; of the two seen tasks' classes, 0 to 3, the favoured one is 3."""
    bench = Bench(stream=ClassToy(tasks=3, classes=6), module=Rising)
    scored = score_tasks(bench.trainer(), bench.setup().held_out, bench.model(), EvalSpec((0, 1), 2))
    threes = int((bench.stream.test(1).y == 3).sum())
    ones = int((bench.stream.test(0).y == 1).sum())
    assert scored.tolist() == [[40, 0, 0, ones], [40, 0, threes, threes]]


class Rising(torch.nn.Module):
    """Logit c is c, whatever the input."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.arange(float(classes)))

    def forward(self, x: Tensor) -> Tensor:
        return self.bias.expand(len(x), -1)


def evaluations(outcome: Outcome) -> list[dict[str, Any]]:
    return [event for event in outcome.events if event["event"] == "evaluation"]


def test_the_mean_in_the_event_is_over_the_tasks_learned_so_far() -> None:
    events = evaluations(Bench(stream=ClassToy(), evaluation=EvalOptions(zero_shot=True)).run())
    first, last = (event["accuracy"] for event in events)
    assert len(first) == 2 and first[0] > 0 and first[1] == 0  # classes that nobody trained are never the answer
    assert [event["acc"] for event in events] == pytest.approx([first[0], sum(last) / 2])


def test_scoring_is_announced_before_it_begins() -> None:
    kinds = [event["event"] for event in Bench(stream=ClassToy()).run().events]
    places = [i for i, kind in enumerate(kinds) if kind == "evaluation"]
    assert places and all(kinds[i - 1] == "scoring" for i in places) and kinds.count("scoring") == len(places)


def test_tasks_that_are_still_to_come_are_scored_at_task_ends_only() -> None:
    """zero_shot fills rows of the matrix; scores in between (`every`) are of the tasks begun."""
    bench = Bench(stream=ClassToy(tasks=3, classes=6), evaluation=EvalOptions(zero_shot=True, every=1))
    outcome = bench.run()
    assert [len(event["accuracy"]) for event in evaluations(outcome)] == [1, 3, 2, 3, 3, 3]
    assert all(None not in row for row in outcome.state.rows.values())


def test_the_event_s_accuracies_follow_the_rule_that_is_reported() -> None:
    rows = Bench(stream=ClassToy()).run().state.rows[1]
    for column, rule in ((1, "full"), (2, "seen"), (3, "task")):
        last = evaluations(Bench(stream=ClassToy(), evaluation=EvalOptions(logits=rule)).run())[-1]
        assert last["accuracy"] == [row[column] / row[0] for row in rows]


ENGINES: dict[str, Callable[[Setup, Bench], Engine]] = {
    "eager": lambda setup, bench: Eager(setup, ClientStore(), bench.build_module),
    "processes": lambda setup, bench: Processes(setup, ClientStore(), bench.build_module, 2),
}


@pytest.mark.parametrize("name", sorted(ENGINES))
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("split", ["test", "validation"])
def test_every_engine_scores_what_the_spec_names(name: str, top_k: int, split: str) -> None:
    """Rising logits: the top k of 4 classes are the last k. One task has begun, so classes 0 and 1 are seen."""
    bench = Bench(stream=Split(), module=Rising)
    engine = ENGINES[name](bench.setup(), bench)
    try:
        found = engine.evaluate(bench.model(), EvalSpec((1, 0), 1, split, top_k))
    finally:
        engine.close()
    for row, task in zip(found.tolist(), (1, 0), strict=True):
        y = bench.stream.test(task, split).y
        lowest_seen, lowest_own = 2 - top_k, 2 * task + 2 - top_k
        full, own = int((y >= 4 - top_k).sum()), int((y >= lowest_own).sum())
        seen = int(((y >= lowest_seen) & (y < 2)).sum())
        assert row == [len(y), full, seen, own]


@dataclass(frozen=True)
class Split(ClassToy):
    """Class-incremental, with a validation split of fewer samples."""

    def test(self, task: int, split: str = "test") -> Any:
        data = super().test(task)
        return data if split == "test" else data.take(range(7))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Guess(Personal):
    """Answers every test sample with one class: that of the task, where the task is known."""

    name: ClassVar[str] = "guess"

    def forward(self, module: nn.Module, x: Tensor, state: Tree, message: Tree) -> Tensor:
        outputs: Tensor = module(x)
        said = torch.full((len(x),), int(state.get("says", 3)))
        return outputs if module.training else nn.functional.one_hot(said, outputs.shape[1]).float()

    def state_for_task(self, state: Tree, task: int) -> Tree:
        return {**state, "says": task}


def test_each_task_is_scored_with_the_state_for_that_task() -> None:
    """The last column alone; the others know nothing of the task, and the class 3 is said."""
    stream = Toy(rounds_per_task=1)
    rows = Bench(lambda: compose(FedAvg(), Guess()), stream=stream).run().state.rows[1]
    for task, row in enumerate(rows):
        labels = stream.test(task).y
        assert row[1] == stream.clients * int((labels == 3).sum())
        assert row[-1] == stream.clients * int((labels == task).sum())
