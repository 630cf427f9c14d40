"""Partitions against their defining properties, and against counts on MNIST's class sizes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everfed.data import partition as module
from everfed.data.partition import dirichlet, exact_labels, iid, partition, pathological, shards, who_got_what
from everfed.errors import PartitionError

MNIST_CLASS_SIZES = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
seeds = st.integers(0, 2**32 - 1)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def column(classes: int, each: int, seed: int = 0) -> np.ndarray:
    return rng(seed).permutation(np.repeat(np.arange(classes), each))


def assert_each_once(parts: list[np.ndarray], n: int) -> None:
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))
    assert all(np.array_equal(part, np.sort(part)) for part in parts)


REQUESTS = [
    ("iid", {}),
    ("shards", {"per_client": 3}),
    ("exact-labels", {"per_client": 2}),
    ("dirichlet", {"alpha": 0.5}),
    ("dirichlet", {"alpha": 0.3, "balance": True, "min_samples": 2}),
    ("lda", {"alpha": 1.0}),
    ("lda", {"alpha": 0.01}),
    ("pathological", {"classes_per_client": 2}),
]


@pytest.mark.parametrize(("kind", "options"), REQUESTS)
@given(seed=seeds, clients=st.integers(3, 12), classes=st.integers(2, 6))
@settings(max_examples=25, deadline=None)
def test_every_index_is_used_exactly_once(kind, options, seed, clients, classes):
    labels = column(classes, 40, seed)
    parts = partition(kind, labels, clients, rng(seed), **options)
    assert len(parts) == clients
    if kind == "pathological" and clients < classes:
        assert len(np.unique(np.concatenate(parts))) == sum(map(len, parts))
    else:
        assert_each_once(parts, len(labels))


@pytest.mark.parametrize(("kind", "options"), REQUESTS)
def test_the_seed_alone_decides(kind, options):
    labels = column(10, 60)
    np.random.seed(1)
    one = partition(kind, labels, 10, rng(7), **options)
    np.random.seed(2)
    two = partition(kind, labels, 10, rng(7), **options)
    other = partition(kind, labels, 10, rng(8), **options)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_iid_sizes_differ_by_one_at_most():
    assert sorted(map(len, iid(column(10, 10), 7, rng()))) == [14, 14, 14, 14, 14, 15, 15]


def test_shards_of_mnist_are_two_runs_of_3000_of_the_sorted_images():
    labels = rng().permutation(np.repeat(np.arange(10), MNIST_CLASS_SIZES))
    place = np.empty(60000, np.int64)
    place[np.argsort(labels, kind="stable")] = np.arange(60000)
    dealt = []
    for part in shards(labels, 10, rng(3)):
        assert len(part) == 6000
        shard, times = np.unique(place[part] // 3000, return_counts=True)
        assert times.tolist() == [3000, 3000]
        dealt += shard.tolist()
    assert sorted(dealt) == list(range(20))


def test_shards_of_mnist_hold_1_to_4_digits_as_often_as_all_pairs_of_shards():
    # FedGP's code deals 2 of 20 sorted shards to each client; all 190 pairs are equally likely
    labels = np.repeat(np.arange(10), MNIST_CLASS_SIZES)
    held = [set(labels[s * 3000 : (s + 1) * 3000].tolist()) for s in range(20)]
    pairs = [len(a | b) for a, b in itertools.combinations(held, 2)]
    assert np.bincount(pairs).tolist() == [0, 2, 73, 87, 28]
    exact = np.array([2, 73, 87, 28]) / 190
    assert exact == pytest.approx([0.01, 0.39, 0.46, 0.15], abs=0.006)
    drawn = [len(np.unique(labels[part])) for seed in range(60) for part in shards(labels, 10, rng(seed))]
    assert np.bincount(drawn, minlength=5)[1:] / len(drawn) == pytest.approx(exact, abs=0.08)


def test_exact_labels_gives_each_client_two_digits_and_each_digit_two_clients():
    labels = rng().permutation(np.repeat(np.arange(10), MNIST_CLASS_SIZES))
    parts = exact_labels(labels, 10, rng(1), per_client=2)
    held = [np.unique(labels[part]).tolist() for part in parts]
    assert all(len(h) == 2 for h in held)
    assert np.bincount(np.concatenate(held)).tolist() == [2] * 10
    for digit in range(10):
        sizes = [int((labels[part] == digit).sum()) for part in parts]
        assert sorted(sizes)[-2] >= sum(sizes) // 2  # the two holders have half each, to one sample


@given(seeds, st.integers(1, 30), st.integers(1, 8), st.data())
@settings(deadline=None)
def test_exact_labels_are_exact_and_even(seed, clients, classes, data):
    per_client = data.draw(st.integers(-(-classes // clients), max(classes, -(-classes // clients))))
    labels = column(classes, 40, seed)
    parts = exact_labels(labels, clients, rng(seed), per_client=per_client)
    held = [np.unique(labels[part]).tolist() for part in parts]
    assert {len(h) for h in held} == {per_client}
    holders = np.bincount(np.concatenate(held), minlength=classes)
    assert holders.max() - holders.min() <= 1


def test_dirichlet_shares_have_the_concentration_asked_for():
    # E[sum_k p_k^2] = (alpha + 1) / (K alpha + 1) for p ~ Dir(alpha 1_K).
    labels, clients = column(10, 1000), 8
    for alpha in (0.1, 0.5, 5.0):
        squares = [
            (np.bincount(labels[part], minlength=10) / 1000) ** 2
            for seed in range(20)
            for part in dirichlet(labels, clients, rng(seed), alpha=alpha, min_samples=0)
        ]
        measured = np.sum(squares) / (20 * 10)
        assert measured == pytest.approx((alpha + 1) / (clients * alpha + 1), rel=0.12)


def test_dirichlet_with_a_huge_alpha_is_even_by_chi_square():
    labels = column(10, 1000)
    counts = np.array([np.bincount(labels[p], minlength=10) for p in dirichlet(labels, 10, rng(), alpha=1e6)])
    chi_square = ((counts - 100) ** 2 / 100).sum()
    assert chi_square < 118.5  # 99 degrees of freedom: far below the 0.9 quantile of an independent draw
    assert abs(counts - 100).max() <= 3


def test_dirichlet_with_a_tiny_alpha_gives_a_class_to_about_one_client():
    labels = column(10, 500)
    parts = dirichlet(labels, 10, rng(4), alpha=0.01, min_samples=0)
    largest = np.max([np.bincount(labels[part], minlength=10) for part in parts], axis=0) / 500
    assert np.median(largest) > 0.95


@given(seeds, st.sampled_from([0.01, 0.3, 1.0]), st.integers(2, 20))
@settings(deadline=None, max_examples=50)
def test_balance_stops_clients_that_have_their_share(seed, alpha, clients):
    labels = column(10, 100, seed)
    parts = dirichlet(labels, clients, rng(seed), alpha=alpha, balance=True, min_samples=0)
    assert_each_once(parts, 1000)
    for part in parts:
        # Without its last class a client was still below the mean.
        classes = np.unique(labels[part])
        assert len(classes) == 0 or (labels[part] < classes[-1]).sum() < 1000 / clients


def test_balance_keeps_the_largest_client_near_the_mean():
    labels = column(10, 500)

    def worst(balance: bool) -> float:
        draws = [dirichlet(labels, 10, rng(s), alpha=0.3, balance=balance, min_samples=0) for s in range(20)]
        return float(np.mean([max(map(len, parts)) / 500 for parts in draws]))

    assert worst(True) < 1.6 < worst(False)


def test_min_samples_is_met_by_redrawing():
    labels = column(2, 1000)
    for seed in range(10):
        parts = dirichlet(labels, 10, rng(seed), alpha=0.3, balance=True, min_samples=10)
        assert min(map(len, parts)) >= 10


def test_an_impossible_min_samples_ends_with_advice():
    with pytest.raises(PartitionError, match="raise alpha, lower min_samples"):
        dirichlet(column(2, 100), 50, rng(), alpha=0.001, min_samples=1)
    with pytest.raises(PartitionError, match="200 samples are too few for 50 clients with at least 5 each"):
        dirichlet(column(2, 100), 50, rng(), alpha=1.0, min_samples=5)


def test_empty_clients_are_allowed_when_asked_for():
    parts = dirichlet(column(2, 50), 40, rng(), alpha=0.05, min_samples=0)
    assert min(map(len, parts)) == 0
    assert_each_once(parts, 100)
    assert_each_once(iid(column(2, 2), 9, rng(), min_samples=0), 4)


@given(seeds, st.integers(2, 25), st.integers(1, 6))
@settings(deadline=None)
def test_pathological_clients_hold_exactly_so_many_classes(seed, clients, per_client):
    labels = column(6, 50, seed)
    parts = pathological(labels, clients, rng(seed), classes_per_client=per_client)
    for client, part in enumerate(parts):
        held = np.unique(labels[part])
        assert len(held) == per_client
        assert client % 6 in held
    if clients >= 6:
        assert_each_once(parts, 300)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("iid", {"min_samples": 21}, "too few"),
        ("shards", {"per_client": 0}, "per_client must be a whole number of at least 1, got 0"),
        ("shards", {"per_client": 60}, "too few"),
        ("exact-labels", {"per_client": 11}, "only 10 classes"),
        ("exact-labels", {"per_client": 1}, "per_client must be at least 2"),
        ("dirichlet", {}, "needs the option 'alpha'"),
        ("dirichlet", {"alpha": 0}, "alpha must be a positive number, got 0"),
        ("dirichlet", {"alpha": float("nan")}, "alpha must be a positive number"),
        ("dirichlet", {"alpha": 1.0, "balance": 1}, "balance must be true or false"),
        ("dirichlet", {"alpha": 1.0, "beta": 1}, "no option 'beta'; allowed: alpha, balance, min_samples"),
        ("pathological", {"classes_per_client": 2.0}, "classes_per_client must be a whole number"),
        ("random", {}, "unknown kind 'random'; allowed: iid, shards"),
    ],
)
def test_what_cannot_be_is_refused_with_the_option_named(kind, options, message):
    with pytest.raises(PartitionError, match=message):
        partition(kind, column(10, 10), 5, rng(), **options)


def test_a_class_too_small_to_share_is_named():
    with pytest.raises(PartitionError, match="label 0 has 1 samples for 2 clients"):
        exact_labels(np.array([0, 1, 1, 1]), 2, rng(), per_client=2)


def test_no_samples_at_all():
    with pytest.raises(PartitionError, match="no sample"):
        partition("dirichlet", np.empty(0, np.int64), 3, rng(), alpha=1.0, min_samples=0)


def test_who_got_what_by_hand():
    labels = np.array([3, 3, 5, 5, 5, 8])
    report = who_got_what(labels, [np.array([0, 2, 3]), np.array([1]), np.array([], np.int64)])
    assert report["labels"] == [3, 5, 8]
    assert report["table"] == [[1, 2, 0], [1, 0, 0], [0, 0, 0]]
    assert report["samples_per_class"] == [2, 2, 0]
    assert report["samples"] == 4
    assert report["unassigned"] == 2
    assert report["samples_per_client"] == {"min": 0, "median": 1.0, "mean": 4 / 3, "max": 3}
    assert report["clients_without_data"] == 1
    assert report["clients_by_number_of_classes"] == {"0": 1, "1": 1, "2": 1}
    json.dumps(report)


def test_who_got_what_stays_small_for_a_large_population():
    labels = column(10, 3000)
    report = who_got_what(labels, shards(labels, 10_000, rng()))
    assert "table" not in report
    assert len(json.dumps(report)) < 2000


def test_different_divisions_have_different_hashes():
    labels = column(10, 30)
    one, two, three = (who_got_what(labels, iid(labels, 5, rng(s)))["hash"] for s in (0, 0, 1))
    assert one == two != three


def test_every_kind_has_a_one_line_description():
    assert all((divide.__doc__ or "").splitlines()[0].endswith(".") for divide in module.KINDS.values())


# LDA, MFCL's partition


@given(seed=seeds, clients=st.integers(2, 12), alpha=st.sampled_from([0.01, 0.3, 1.0, 100.0]))
@settings(max_examples=25, deadline=None)
def test_lda_gives_everyone_the_same_number(seed, clients, alpha):
    sizes = [len(part) for part in partition("lda", column(5, 24, seed), clients, rng(seed), alpha=alpha)]
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == 120


def test_lda_of_a_cifar100_task_is_mfcls():
    labels = column(10, 500)
    parts = partition("lda", labels, 50, rng(3), alpha=1.0)
    assert {len(part) for part in parts} == {100}
    shares = np.array([np.bincount(labels[part], minlength=10) for part in parts]) / 100
    # a component of Dir(1, ..., 1) over 10 classes has mean 0.1 and deviation sqrt(0.09 / 11) = 0.0905
    assert shares.mean() == pytest.approx(0.1)
    assert shares.std() == pytest.approx(0.0905, abs=0.03)


def test_lda_is_even_at_a_large_alpha_and_lopsided_at_a_small_one():
    labels = column(10, 500)
    largest = {}
    for alpha in (1e6, 1e-3):
        parts = partition("lda", labels, 50, rng(0), alpha=alpha)
        largest[alpha] = np.mean([np.bincount(labels[part], minlength=10).max() / len(part) for part in parts])
    assert largest[1e6] < 0.25  # 100 draws from ten equal classes: the largest share is near 0.16
    assert largest[1e-3] > 0.85


@pytest.mark.parametrize(
    ("kind", "options"),
    [("dirichlet", {"alpha": 1e6}), ("iid", {}), ("lda", {"alpha": 1e6}), ("pathological", {"classes_per_client": 1})],
)
def test_which_samples_of_a_class_a_client_gets_is_drawn(kind: str, options: dict[str, Any]) -> None:
    """Of 200 samples of one class half go to either client: not the first hundred, since files are often sorted."""
    parts = partition(kind, np.zeros(200, dtype=np.int64), 2, np.random.default_rng(0), **options)
    first = np.sort(parts[0])
    assert 80 <= len(first) <= 120 and 30 < np.count_nonzero(first < 100) < 70
    again = partition(kind, np.zeros(200, dtype=np.int64), 2, np.random.default_rng(1), **options)
    assert not np.array_equal(first, np.sort(again[0]))


@pytest.mark.parametrize(("samples", "sizes"), [(7, [3, 2, 2]), (8, [3, 3, 2]), (9, [3, 3, 3])])
@pytest.mark.parametrize(("kind", "options"), [("iid", {}), ("lda", {"alpha": 1.0})])
def test_the_first_clients_get_what_is_left_over(
    kind: str, options: dict[str, Any], samples: int, sizes: list[int]
) -> None:
    labels = np.arange(samples) % 2
    parts = partition(kind, labels, 3, np.random.default_rng(0), **options)
    assert [len(part) for part in parts] == sizes
