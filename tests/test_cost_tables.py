"""What the cost tables of method families make of a run: which seconds count, and whose options are whose."""

from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks import generative_cost as table
from benchmarks.entrants import EAGER, entrant, take_turns
from everfed.recipe import Recipe

TINY = {
    "stream": {"dataset": "digits", "tasks": 2, "clients": 2, "max_train": 20, "max_test": 10},
    "model": {"kind": "mlp", "hidden": [4]},
    "train": {"rounds_per_task": 1, "batch_size": 10},
    "engine": {**EAGER, "device": "cpu"},
}


class Told:
    """An entrant of which only the events are looked at."""

    def __init__(self, *phases: tuple[int, int, str, list[int], float]) -> None:
        names = ("task", "round", "phase", "clients", "seconds")
        self.events: list[dict[str, Any]] = [{"event": "phase", **dict(zip(names, p, strict=True))} for p in phases]
        self.events.append({"event": "evaluation", "task": 0, "round": 0})


def test_client_seconds_are_of_warm_rounds_and_of_all_client_phases() -> None:
    rounds = [(task, 4 * task + i, "train", [0], 100.0 if i < 2 else 1.0 + task) for task in range(2) for i in range(4)]
    one = cast(Any, Told(*rounds, (1, 6, "remember", [0], 5.0), (1, 7, "generator", [], 50.0)))
    assert table.client_seconds(one, first=True) == 1.0
    assert table.client_rounds(one)[1] == [100.0, 100.0, 7.0, 2.0]
    assert table.client_seconds(one, first=False) == 4.5
    assert table.client_seconds(cast(Any, Told(rounds[0])), first=True) == 100.0, "a single round counts"
    assert table.client_seconds(cast(Any, Told(rounds[0])), first=False) is None


def test_server_seconds_are_summed_by_task() -> None:
    chunks = [(0, 3, "generator", [], 2.0), (0, 3, "generator", [], 3.0), (1, 7, "generator", [], 4.0)]
    one = cast(Any, Told((0, 3, "train", [0, 1], 9.0), *chunks))
    assert table.server_seconds(one) == {0: 5.0, 1: 4.0}


@pytest.mark.parametrize(("method", "steps"), [("mfcl", 7), ("fedavg", None)])
def test_a_method_takes_the_options_of_its_own_parts(method: str, steps: int | None) -> None:
    sets = ["method.mfcl.gen_steps=7", "method.target.syn_round=3", "stream.tasks=5"]
    recipe = table.recipe_for(method, "mfcl/family-cifar100-small", sets, rounds=2)
    assert (recipe.stream.tasks, recipe.train.rounds_per_task) == (5, 2)
    assert (recipe.method.model_extra or {}).get("mfcl", {}).get("gen_steps") == steps
    assert "target" not in (recipe.method.model_extra or {})


def test_entrants_take_turns_and_give_ratios() -> None:
    entrants = [entrant(Recipe.model_validate({**TINY, "method": {"name": name}})) for name in ("fedavg", "lwf")]
    take_turns(entrants, 2)
    base, lwf = entrants
    assert [len(one.seconds) for one in entrants] == [2, 2]
    assert base.times("bytes_down", base) == 1.0 and lwf.times("bytes_down", base) > 1.0
    found = table.costs(lwf, base)
    assert found["bytes_by_part"]["lwf"]["down"] > 0 and found["times_base"]["later_tasks"] > 0
    assert "lwf" in table.row(found, table.costs(base, base))
