"""The limitless task pool: who sees which classes when, and how models are scored on clients' own tests."""

from __future__ import annotations

import os
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everfed import streams
from everfed.core import tree
from everfed.core.stream import Stream
from everfed.data.available import available
from everfed.streams import OptionError
from everfed.streams.task_pool import TaskPool, _different_orders, disjoint_slots
from tests.support.toy import Bench, Outcome, comparable
from tests.support.wire import run_over_wire

MIB = 2**20


def arrays(classes: int, train: int, test: int, shape: tuple[int, ...] = (1, 4, 4)) -> dict[str, np.ndarray]:
    """A set in which every image carries its class as its brightness."""
    y, y_test = np.repeat(np.arange(classes), train), np.repeat(np.arange(classes), test)
    x, x_test = (np.broadcast_to(v[:, None, None, None], (len(v), *shape)).astype(np.uint8) for v in (y, y_test))
    return {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test}


def pool(classes: int = 100, train: int = 5, test: int = 1, shape: tuple[int, ...] = (1, 4, 4), **options: Any) -> Any:
    settings_ = {"clients": 10, "tasks": 5, "classes_per_task": 20, "rounds_per_task": 2, **options}
    return streams.from_arrays(**arrays(classes, train, test, shape), scenario="task-pool", **settings_)


@pytest.mark.parametrize(("per_task", "tasks"), [(20, 5), (2, 50)])
@pytest.mark.parametrize("overlap", ["random", "forbid"])
def test_20_every_clients_tasks_partition_the_classes(per_task: int, tasks: int, overlap: str) -> None:
    clients = 5 if overlap == "forbid" else 10
    stream = pool(clients=clients, tasks=tasks, classes_per_task=per_task, class_overlap_within_step=overlap)
    for client in range(clients):
        seen = [label for task in range(tasks) for label in stream.labels_of(client, task)]
        assert len(seen) == 100 and sorted(seen) == list(range(100))
        assert all(len(stream.labels_of(client, task)) == per_task for task in range(tasks))


def test_20_the_same_seed_gives_the_same_orders_and_clients_differ() -> None:
    a, b, c = pool(seed=3), pool(seed=3), pool(seed=4)
    assert np.array_equal(a.orders, b.orders) and not np.array_equal(a.orders, c.orders)
    assert len({tuple(order) for order in a.orders.tolist()}) == 10


def test_a_client_holds_nothing_of_the_tasks_that_it_goes_without() -> None:
    stream = pool(without={"0": [1]})
    held = [[len(stream.data(client, task)) for task in range(2)] for client in range(2)]
    assert held == [[100, 0], [100, 100]]


def test_20_forbid_gives_distinct_classes_at_every_step() -> None:
    stream = pool(tasks=50, classes_per_task=2, class_overlap_within_step="forbid")
    for task in range(50):
        together = [label for client in range(10) for label in stream.labels_of(client, task)]
        assert len(together) == len(set(together)) == 20
        assert stream.labels(task) == tuple(sorted(together))
    assert len({tuple(order) for order in stream.orders.tolist()}) == 10


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 999), st.data())
def test_disjoint_slots_exist_up_to_the_limit(tasks: int, per_task: int, seed: int, data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, tasks))  # clients * C <= classes
    slots = disjoint_slots(clients, tasks * per_task, per_task, np.random.default_rng(seed))
    assert all((np.bincount(row, minlength=tasks) == per_task).all() for row in slots)
    assert all(len(set(column)) == clients for column in slots.T.tolist())


@pytest.mark.parametrize(("per_task", "mib"), [(20, 140.625), (2, 14.0625)])
def test_21_bytes_of_a_task_as_float32(per_task: int, mib: float) -> None:
    """A hundredth of CIFAR-100: 5 + 1 images a class instead of 500 + 100."""
    stream = pool(shape=(3, 32, 32), classes_per_task=per_task, tasks=2)
    images = len(stream.data(3, 1)) + len(stream.test_of(3, 1))
    assert images * 3 * 32 * 32 * 4 / MIB == mib / 100


def test_21_on_cifar100() -> None:
    folder = os.environ.get("EVERFED_DATA")
    if "cifar100" not in {name for name, there, _ in available(folder) if there}:
        pytest.skip("data set cifar100 is not in EVERFED_DATA")
    options = {"dataset": "cifar100", "scenario": "task-pool", "tasks": 50, "classes_per_task": 2}
    stream: Any = streams.build(options, 0, 1)
    data, test = stream.data(0, 0), stream.test_of(0, 0)
    assert (len(data), len(test)) == (1000, 200)
    assert sum(stream.inputs(part.x[:1]).nbytes * len(part) for part in (data, test)) / MIB == 14.0625


# what a client sees --------------------------------------------------------------------------------------------------
def test_shared_images_reach_every_client_that_has_the_class() -> None:
    stream = pool(train=7, test=3)
    for client, task in ((0, 0), (4, 2), (9, 4)):
        data, test = stream.data(client, task), stream.test_of(client, task)
        assert sorted(set(data.y.tolist())) == list(stream.labels_of(client, task)) == sorted(set(test.y.tolist()))
        assert (len(data), len(test)) == (140, 60)
        assert torch.equal(data.x[:, 0, 0, 0].long(), data.y)
    ids = np.concatenate([stream.data(0, task).ids for task in range(5)])
    assert len(np.unique(ids)) == len(ids) == 700


def test_disjoint_images_are_divided_evenly() -> None:
    stream = pool(classes=10, train=20, clients=4, tasks=5, classes_per_task=2, sample_split="disjoint")
    rows = [np.concatenate([stream.data(u, t).ids % 200 for t in range(5)]) for u in range(4)]
    assert [len(part) for part in rows] == [50] * 4
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(200))
    assert [len(stream.data(u, t)) for u in range(4) for t in range(5)] == [10] * 20
    assert len(stream.test_of(0, 0)) == len(stream.test_of(3, 4)) == 2


def test_tasks_beyond_a_pass_repeat_the_order() -> None:
    stream = pool(tasks=12)
    for task in range(7):
        assert stream.labels_of(2, task) == stream.labels_of(2, task + 5)
    assert not set(stream.data(2, 0).ids) & set(stream.data(2, 5).ids)


def test_thousands_of_tasks_cost_nothing_until_they_are_asked_for() -> None:
    stream = pool(classes=1000, train=2, tasks=2500, classes_per_task=2, rounds_per_task=25)
    assert (stream.rounds, len(stream.data(7, 2499)), len(stream._cache._held)) == (62_500, 4, 1)
    assert "labels" not in stream.describe()


def test_it_is_a_stream_and_describes_itself() -> None:
    stream = pool()
    assert isinstance(stream, Stream) and stream.own_tests and not stream.task_ids
    facts = stream.describe()
    assert (facts["scenario"], facts["classes_per_task"], facts["sample_split"]) == ("task-pool", 20, "shared")
    assert facts["labels"][3][1] == list(stream.labels_of(3, 1))
    assert len(facts["who_got_what"]) == 1


def test_validation_is_held_out_of_training() -> None:
    stream = pool(train=10, validation=0.2)
    assert (len(stream.data(0, 0)), len(stream.test_of(0, 0, "validation"))) == (160, 40)
    with pytest.raises(OptionError, match="validation"):
        pool().test_of(0, 0, "validation")
    with pytest.raises(ValueError, match="test, validation"):
        pool().test_of(0, 0, "train")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"classes_per_task": 3}, "stream.classes_per_task: 3 does not divide the 100 classes"),
        ({"class_overlap_within_step": "forbid"}, "needs 10 clients with 20 classes each"),
        ({"class_overlap_within_step": "never"}, "random, forbid"),
        ({"sample_split": "x"}, "shared, disjoint"),
        ({"partition": {"kind": "shards", "per_client": 2}}, "stream.partition"),
        ({"classes": 2, "classes_per_task": 1}, "10 different orders of 2 classes"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        pool(**options)


def test_indices_are_checked() -> None:
    with pytest.raises(IndexError, match="client 10 is not within 0..9"):
        pool().labels_of(10, 0)


# scoring -------------------------------------------------------------------------------------------------------------
def bench(method: str = "fedavg", **options: Any) -> Bench:
    stream: TaskPool = pool(**{"classes": 6, "train": 8, "test": 4, "clients": 3, "tasks": 3, "classes_per_task": 2,
                               "normalise": {"mean": [0.01], "std": [0.008]}, **options})  # fmt: skip
    return Bench(method, stream=stream)  # type: ignore[arg-type]


def test_accuracy_is_over_the_clients_own_tests() -> None:
    """a[t, i] = sum over clients of correct / sum of samples, by hand from the final model."""
    make = bench()
    outcome, stream, trainer = make.run(), make.stream, make.trainer()
    final = outcome.state.rows[2]
    for task in range(3):
        right = total = 0
        for client in range(3):
            test = stream.test_of(client, task)  # type: ignore[attr-defined]
            answers = trainer.outputs(outcome.state.model, test.x).argmax(1)
            right, total = right + int((answers == test.y).sum()), total + len(test)
        assert final[task][:2] == [total, right]
        assert total == 3 * 2 * 4


def test_the_classes_that_compete_are_the_clients_own() -> None:
    outcome = bench().run()
    for row in outcome.state.rows.values():
        for n, full, seen, own in (counts for counts in row if counts is not None):
            assert full <= seen <= own <= n


def test_a_client_that_only_knows_its_own_labels_scores_them() -> None:
    """With one round and one task the `seen` classes are the client's two, so `seen` and `task` agree."""
    first = bench(tasks=3).run(rounds=2).state.rows[0][0]
    assert first[2] == first[3]


@pytest.mark.parametrize("method", ["fedavg", "stamp", "fedomg"])
def test_the_pool_runs_over_the_wire(method: str) -> None:
    def same(a: Outcome, b: Outcome) -> bool:
        return tree.equal(comparable(a.state), comparable(b.state))

    assert same(bench(method).run(), run_over_wire(bench(method)))


def test_traffic_of_stamp_is_fedavgs_here_too() -> None:
    plain, ours = (bench(name).run().state.traffic.as_dict() for name in ("fedavg", "stamp"))
    assert (plain["bytes_up"], plain["bytes_down"]) == (ours["bytes_up"], ours["bytes_down"])


def test_boundaries_are_common_to_all() -> None:
    stream = pool()
    plans = [stream.round(index) for index in range(10)]
    assert [plan.task for plan in plans] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [bool(plan.ends) for plan in plans] == [False, True] * 5
    assert all(a.task <= b.task for a, b in pairwise(plans))


def test_no_two_clients_have_the_same_order_even_where_every_order_is_needed() -> None:
    """Three classes have six orders; six clients draw them all."""
    found = [tuple(order) for order in _different_orders(6, 3, np.random.default_rng(0))]
    assert sorted(found) == sorted(permutations(range(3)))
