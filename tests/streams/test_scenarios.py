"""The scenarios as the papers define them: FedGP (rotated and permuted MNIST), MFCL and FedSSI (new classes)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from everfed.data.transforms import permute_pixels, rotate
from everfed.streams import build, from_arrays
from everfed.streams.options import OptionError


def domain(transform="rotate", seed=0, **change):
    table = {"dataset": "digits", "scenario": "domain-incremental", "transform": transform, "tasks": 4, "clients": 5}
    return build({**table, **change}, seed, 2)


def classes(seed=0, scenario="class-incremental", **change):
    return build({"dataset": "digits", "scenario": scenario, "clients": 5, **change}, seed, 2)


def test_rotation_turns_training_and_test_images_of_all_clients_by_one_angle():
    s = domain()
    for task, angle in enumerate(s.describe()["angles"]):
        for client in range(5):
            data = s.data(client, task)
            base = s.source.x_train[torch.from_numpy(data.ids - task * 1438)]
            assert torch.equal(data.x, rotate(base, angle))
        assert torch.equal(s.test(task).x, rotate(s.source.x_test, angle))


def test_the_first_task_is_turned_too_and_angles_fill_the_half_circle():
    x, y = np.zeros((10, 4, 4), np.uint8), np.arange(10)
    streams = [from_arrays(x, y, x, y, scenario="domain-incremental", tasks=4, seed=seed) for seed in range(100)]
    angles = np.array([[s.angle(task) for task in range(4)] for s in streams])
    assert angles.min() >= 0
    assert angles.max() < 180
    assert angles[:, 0].min() > 0
    counts = np.histogram(angles, bins=6, range=(0, 180))[0]
    assert ((counts - 400 / 6) ** 2 / (400 / 6)).sum() < 20.5  # chi-square, 5 degrees of freedom, 0.001


def test_permutation_is_one_per_task_shared_by_all():
    s = domain("permute")
    orders = [s.permutation(task) for task in range(4)]
    assert all(sorted(order) == list(range(64)) for order in orders)
    assert len({order.tobytes() for order in orders}) == 4
    assert not np.array_equal(orders[0], np.arange(64))
    data = s.data(3, 2)
    base = s.source.x_train[torch.from_numpy(data.ids - 2 * 1438)]
    assert torch.equal(data.x, permute_pixels(base, orders[2]))
    assert torch.equal(s.test(2).x, permute_pixels(s.source.x_test, orders[2]))


@pytest.mark.parametrize("transform", ["rotate", "permute"])
def test_every_image_keeps_its_client_through_all_tasks(transform):
    s = domain(transform, partition={"kind": "shards", "per_client": 2})
    for client in range(5):
        held = [s.data(client, task).ids - task * 1438 for task in range(4)]
        assert all(np.array_equal(held[0], h) for h in held)
        assert s.labels(client % 4) == tuple(range(10))


def test_more_tasks_do_not_change_the_first_ones():
    few, many = domain(tasks=2), domain(tasks=6)
    assert few.describe()["angles"] == many.describe()["angles"][:2]
    assert torch.equal(few.data(1, 1).x, many.data(1, 1).x)


def test_classes_come_in_natural_order_in_blocks():
    s = classes(tasks=5)
    assert [s.labels(t) for t in range(5)] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]


def test_blocks_that_do_not_divide_differ_by_one():
    s = classes(tasks=3)
    assert [s.labels(t) for t in range(3)] == [(0, 1, 2, 3), (4, 5, 6), (7, 8, 9)]


def test_a_shuffled_order_follows_the_seed_and_covers_all_classes():
    orders = [tuple(classes(seed=s, tasks=5, class_order="shuffled").labels(t) for t in range(5)) for s in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(sum(orders[0], ())) == list(range(10))


def test_an_order_of_ones_own_leaves_other_classes_out():
    s = classes(tasks=2, class_order=[7, 2, 9, 4])
    assert [s.labels(task) for task in range(2)] == [(2, 7), (4, 9)]
    assert s.classes == 10
    assert set(s.data(0, 1).y.tolist()) | set(s.test(1).y.tolist()) <= {4, 9}


@pytest.mark.parametrize("order", [[1, 1], [0, 10], [-1, 2], ["a", "b"]])
def test_an_order_that_is_none_is_refused(order):
    with pytest.raises(OptionError, match=r"stream.class_order: expected .* a list of different classes from 0 to 9"):
        classes(tasks=2, class_order=order)


def test_images_are_untouched_in_class_incremental():
    s = classes(tasks=5)
    data = s.data(2, 3)
    assert torch.equal(data.x, s.source.x_train[torch.from_numpy(data.ids - 3 * 1438)])


def test_every_task_is_divided_anew():
    # Equal numbers of every class, so that equal draws would show as equal rows.
    x, y = np.zeros((400, 3), np.float32), np.repeat(np.arange(10), 40)
    s = from_arrays(
        *(x, y, x, y),
        scenario="class-incremental",
        tasks=5,
        clients=4,
        partition={"kind": "dirichlet", "alpha": 0.5, "min_samples": 0},
    )
    tables = [str(report["table"]) for report in s.describe()["who_got_what"]]
    assert len(set(tables)) == 5


def test_task_incremental_is_class_incremental_with_known_tasks():
    a, b = classes(tasks=5), classes(tasks=5, scenario="task-incremental")
    assert (a.task_ids, b.task_ids) == (False, True)
    assert torch.equal(a.data(1, 1).x, b.data(1, 1).x)


def test_the_division_of_the_papers_code():
    # FedGP's code on CIFAR: alpha 0.3, capped, at least 10 samples each, drawn anew for every task.
    s = classes(tasks=5, clients=4, partition={"kind": "dirichlet", "alpha": 0.3, "balance": True, "min_samples": 10})
    for report in s.describe()["who_got_what"]:
        assert report["samples_per_client"]["min"] >= 10
        assert report["clients"] == 4


def test_features_can_be_permuted_and_divided():
    x = np.arange(60, dtype=np.float32).reshape(20, 3)
    y = np.arange(20) % 2
    s = from_arrays(x, y, x, y, scenario="domain-incremental", transform="permute", tasks=2, clients=3)
    order = s.permutation(1)
    assert torch.equal(s.test(1).x, torch.from_numpy(x[:, order]))
    assert torch.equal(s.inputs(s.test(1).x), s.test(1).x)


def test_token_sequences_pass_through():
    x, y = np.ones((20, 7), np.int64), np.arange(20) % 4
    s = from_arrays(x, y, x, y, scenario="class-incremental", tasks=2, clients=2)
    assert s.inputs(s.data(0, 0).x).dtype == torch.int64
    assert s.input_shape == (7,)


def test_torch_arrays_and_named_classes():
    x, y = torch.rand(30, 1, 6, 6), torch.arange(30) % 3
    s = from_arrays(x, y, x, y, scenario="task-incremental", tasks=2, clients=2, classes=4, seed=3, rounds_per_task=4)
    assert (s.classes, s.rounds) == (4, 8)


def test_flwr_partitioners_serve_streams():
    pytest.importorskip("flwr_datasets", reason="pip install 'everfed[hub]'")
    s = classes(tasks=2, partition={"kind": "flwr:DirichletPartitioner", "alpha": 1.0, "min_partition_size": 1})
    assert sum(len(s.data(c, t)) for c in range(5) for t in range(2)) == 1438
