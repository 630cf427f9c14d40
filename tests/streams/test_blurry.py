"""Blurry tasks, against the definitions of i-Blurry and Si-Blurry; methods that take them, and one that cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import everfed
from everfed import streams
from everfed.core import tree
from everfed.errors import CompositionError, SettingError
from everfed.methods import registry as methods

TASKS, CLIENTS = 5, 3
TABLE = {"dataset": "digits", "scenario": "blurry", "tasks": TASKS, "clients": CLIENTS, "boundaries": False}


def stream(seed: int = 0, **options: Any) -> Any:
    return streams.build({**TABLE, **options}, seed, 2)


def labels_in(some: Any, task: int) -> np.ndarray:
    """The labels of what all clients see in a task."""
    return np.concatenate([some.data(client, task).y.numpy() for client in range(CLIENTS)])


def rows_in(some: Any, task: int) -> np.ndarray:
    ids = np.concatenate([some.data(client, task).ids for client in range(CLIENTS)])
    return ids % len(some.source.x_train)


@pytest.mark.parametrize("stochastic", [False, True])
def test_every_sample_comes_once(stochastic: bool) -> None:
    some = stream(stochastic=stochastic, blur=0.3)
    rows = np.concatenate([rows_in(some, task) for task in range(TASKS)])
    assert sorted(rows.tolist()) == list(range(len(some.source.x_train)))


@pytest.mark.parametrize("blur", [0.0, 0.1, 0.5, 1.0])
def test_i_blurry_has_equal_numbers_of_classes_and_of_blurred_samples(blur: float) -> None:
    some = stream(blur=blur)
    facts, totals = some.facts(), np.bincount(some.source.y_train.numpy(), minlength=10)
    assert [len(own) for own in facts["disjoint_classes"]] == [1] * TASKS == [len(b) for b in facts["blurry_classes"]]
    assert sorted(np.concatenate(facts["disjoint_classes"] + facts["blurry_classes"]).tolist()) == list(range(10))
    pool, taken = 0, []
    for task in range(TASKS):
        counts = np.bincount(labels_in(some, task), minlength=10)
        for other, own in enumerate(facts["disjoint_classes"]):  # disjoint classes come in their task alone
            assert counts[own[0]] == (totals[own[0]] if other == task else 0)
        (blurry,) = facts["blurry_classes"][task]
        kept = totals[blurry] - round(blur * int(totals[blurry]))
        assert counts[blurry] >= kept
        pool += totals[blurry] - kept
        taken.append(len(labels_in(some, task)) - totals[facts["disjoint_classes"][task][0]] - kept)
    assert sum(taken) == pool and max(taken) - min(taken) <= 1
    if blur == 0.5:  # each task sees other tasks' blurry classes
        assert all(len(set(labels_in(some, task))) > 2 for task in range(TASKS))


def test_si_blurry_has_random_numbers_of_disjoint_classes_and_equal_ones_of_blurry() -> None:
    sizes, takes = set(), set()
    for seed in range(6):
        some = stream(seed, stochastic=True, blur=0.5)
        facts = some.facts()
        assert sum(map(len, facts["disjoint_classes"])) == 5
        assert [len(own) for own in facts["blurry_classes"]] == [1] * TASKS
        sizes |= {tuple(map(len, facts["disjoint_classes"]))}
        takes |= {tuple(len(labels_in(some, task)) for task in range(TASKS))}
        for task, own in enumerate(facts["disjoint_classes"]):
            others = np.concatenate([labels_in(some, t) for t in range(TASKS) if t != task])
            assert not set(own) & set(others.tolist())
    assert len(sizes) > 2 and len(takes) == 6


def test_without_blurry_classes_it_is_class_incremental() -> None:
    some = stream(disjoint=1.0)
    for task in range(TASKS):
        assert set(labels_in(some, task).tolist()) == set(some.labels(task))


def test_tests_are_of_the_own_classes_and_nothing_tells_the_task() -> None:
    some = stream(blur=0.5, validation=0.2)
    for task in range(TASKS):
        assert (
            set(some.test(task).y.tolist()) == set(some.labels(task)) == set(some.test(task, "validation").y.tolist())
        )
    assert not some.boundaries and not some.task_ids
    assert some.round(2).begins == some.round(2).ends == ()


def recipe(method: str, **options: Any) -> dict[str, Any]:
    own = {"memory": {"size": 10}, "ranpac": {"width": 20, "exchange": "round"}}
    return {"stream": {**TABLE, "max_train": 120, **options}, "model": {"kind": "mlp", "hidden": [8]},
            "train": {"rounds_per_task": 1, "optimizer": {"lr": 0.1}}, "method": {"name": method, "defaults": own},
            "engine": {"kind": "eager"}}  # fmt: skip


@pytest.mark.parametrize("method", ["er", "gss-greedy", "fedgp+er"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_methods_without_boundaries_run(method: str, stochastic: bool, tmp_path: Any) -> None:
    result = everfed.run(recipe(method, stochastic=stochastic), tmp_path / "run", progress=False)
    assert 0.0 < result.metrics["acc"] <= 1.0


def test_ranpac_ends_with_the_same_bits_however_blurry_tasks_are(tmp_path: Any) -> None:
    """Its sums do not depend on the order in which samples come."""
    for name, blur in (("a", 0.0), ("b", 0.7)):
        everfed.run(recipe("ranpac", blur=blur), tmp_path / name, progress=False)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert tree.equal(a, b)


def test_mfcl_says_why_it_cannot() -> None:
    with pytest.raises(CompositionError, match="part 'mfcl' must know when a task begins or ends"):
        methods.build("mfcl").fit_stream(stream())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"boundaries": True}, "stream.boundaries: blurry tasks have none"),
        ({"disjoint": 0.6}, "6 disjoint classes cannot be shared equally among 5 tasks|4 blurry classes"),
        ({"disjoint": 1.5}, "stream.disjoint"),
        ({"blur": -0.1}, "stream.blur"),
        ({"order": [0, 1]}, "stream.order: has no effect"),
    ],
)
def test_what_cannot_be_divided_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        stream(**options)
