"""Our partitions beside flwr-datasets' partitioners of the same kind."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from everfed.data.partition import dirichlet, iid, partition, pathological, shards
from everfed.errors import PartitionError

pytest.importorskip("flwr_datasets", reason="pip install 'everfed[hub]'")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def column(classes: int = 10, each: int = 100) -> np.ndarray:
    return rng(99).permutation(np.repeat(np.arange(classes), each))


def theirs(name: str, clients: int, seed: int = 0, labels: np.ndarray | None = None, **options) -> list[np.ndarray]:
    return partition(f"flwr:{name}", column() if labels is None else labels, clients, rng(seed), **options)


def table(parts: list[np.ndarray], labels: np.ndarray) -> np.ndarray:
    return np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


def assert_each_once(parts: list[np.ndarray], n: int) -> None:
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))


@pytest.mark.parametrize("clients", [4, 7])
def test_iid_has_the_same_sizes(clients):
    a, b = iid(column(), clients, rng()), theirs("IidPartitioner", clients)
    assert sorted(map(len, a)) == sorted(map(len, b))
    assert_each_once(b, 1000)


def test_shards_have_the_same_sizes_and_as_many_classes():
    labels, clients = column(10, 96), 10  # 20 shards of 48: two a class, as many classes as shards at most
    options = {"num_shards_per_partition": 2, "keep_incomplete_shard": False}
    ours = [table(shards(labels, clients, rng(s)), labels) for s in range(30)]
    flwr = [table(theirs("ShardPartitioner", clients, s, labels, **options), labels) for s in range(30)]
    for counts in (*ours, *flwr):
        assert set(counts.sum(axis=1)) == {96}
        assert set(np.unique(counts)) <= {0, 48, 96}
    # Both shards of a client are of one class with probability 1/19.
    one_class = [np.mean([(c > 0).sum(axis=1) == 1 for c in draws]) for draws in (ours, flwr)]
    assert one_class == pytest.approx([1 / 19, 1 / 19], abs=0.05)


@pytest.mark.parametrize("alpha", [0.1, pytest.param(1.0, marks=pytest.mark.slow), 10.0])
def test_dirichlet_shares_are_as_concentrated(alpha):
    labels, clients, draws = column(), 8, 25
    options = {"alpha": alpha, "min_partition_size": 0, "self_balancing": False}

    def concentration(parts: list[np.ndarray]) -> float:
        return float(((table(parts, labels) / 100) ** 2).sum(axis=0).mean())

    ours = np.mean(
        [concentration(dirichlet(labels, clients, rng(s), alpha=alpha, min_samples=0)) for s in range(draws)]
    )
    flwr = np.mean([concentration(theirs("DirichletPartitioner", clients, s, **options)) for s in range(draws)])
    exact = (alpha + 1) / (clients * alpha + 1)
    assert [ours, flwr] == pytest.approx([exact, exact], rel=0.12)


def test_balanced_dirichlet_has_the_same_largest_clients():
    labels, clients, draws = column(), 10, 40
    options = {"alpha": 0.3, "min_partition_size": 0, "self_balancing": True}
    ours = [dirichlet(labels, clients, rng(s), alpha=0.3, balance=True, min_samples=0) for s in range(draws)]
    flwr = [theirs("DirichletPartitioner", clients, s, **options) for s in range(draws)]
    largest = [np.mean([max(map(len, parts)) for parts in side]) for side in (ours, flwr)]
    assert largest[0] == pytest.approx(largest[1], rel=0.08)


def test_dirichlet_min_samples_is_min_partition_size():
    options = {"alpha": 0.3, "min_partition_size": 10, "self_balancing": True}
    for parts in (
        theirs("DirichletPartitioner", 10, **options),
        dirichlet(column(), 10, rng(), alpha=0.3, balance=True, min_samples=10),
    ):
        assert min(map(len, parts)) >= 10
        assert_each_once(parts, 1000)


@pytest.mark.parametrize("per_client", [1, 3])
def test_pathological_has_the_same_structure(per_client):
    labels, clients = column(5, 60), 12
    options = {"num_classes_per_partition": per_client, "class_assignment_mode": "first-deterministic"}
    for parts in (
        pathological(labels, clients, rng(), classes_per_client=per_client),
        theirs("PathologicalPartitioner", clients, 0, labels, **options),
    ):
        counts = table(parts, labels)
        assert set((counts > 0).sum(axis=1)) == {per_client}
        assert all(counts[k, k % 5] > 0 for k in range(clients))
        assert_each_once(parts, 300)
        for held in counts.T:  # a class is shared evenly by its holders
            assert np.ptp(held[held > 0]) <= 1


def test_the_seed_decides_theirs_too():
    one, two, other = (theirs("DirichletPartitioner", 5, seed, alpha=0.5) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_partitioner_without_seed_or_label_column():
    parts = theirs("SizePartitioner", 3, partition_sizes=[100, 300, 600])
    assert [len(p) for p in parts] == [100, 300, 600]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("NoSuchPartitioner", {}, "no sample partitioner 'NoSuchPartitioner'; allowed: .*DirichletPartitioner"),
        ("VerticalEvenPartitioner", {}, "no sample partitioner"),
        ("DirichletPartitioner", {"beta": 1}, "no option 'beta'; allowed: num_partitions"),
        ("DirichletPartitioner", {}, "refused its options"),
        ("DirichletPartitioner", {"alpha": -1.0}, "refused its options"),
        ("PathologicalPartitioner", {"num_classes_per_partition": 11}, "cannot divide these labels"),
        ("SizePartitioner", {"partition_sizes": [500, 500]}, "makes 2 partitions for 4 clients"),
    ],
)
def test_refusals_name_the_partitioner(name, options, message):
    with pytest.raises(PartitionError, match=message):
        theirs(name, 4, **options)


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", None)
    with pytest.raises(PartitionError, match=r"pip install 'everfed\[hub\]'"):
        theirs("IidPartitioner", 4)
