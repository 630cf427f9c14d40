"""Robust reducers: closed forms, and what a minority of attackers can do at most."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everfed.core import tree
from everfed.core.context import TrainOptions
from everfed.core.method import Method, compose
from everfed.core.optimizer import Optimizer
from everfed.core.phase import Reducer, Shared
from everfed.errors import CompositionError
from everfed.methods import registry as methods
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.methods.aggregate.robust import (
    ClippedMean,
    GeometricMedian,
    Median,
    TooFewReplies,
    TrimmedMean,
    Trimming,
    gram_matrix,
    nearest_means,
)
from everfed.privacy.secure_client import secured
from tests.support.toy import Bench, Norm, Toy

rows = st.integers(3, 9).flatmap(
    lambda n: st.lists(st.lists(st.floats(-100, 100, width=32), min_size=4, max_size=4), min_size=n, max_size=n)
)


def reduced(reducer: Reducer, values: list[Any]) -> Any:
    reducing = reducer.start()
    for client, value in enumerate(values):
        reducing.add(client, value, 7.0)
    return reducing.result()


def tensors(values: list[list[float]]) -> list[torch.Tensor]:
    return [torch.tensor(value) for value in values]


@given(rows, st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_a_trimmed_mean_is_the_mean_of_the_sorted_middle(values: list[list[float]], trim: int) -> None:
    if len(values) <= 2 * trim:
        with pytest.raises(TooFewReplies, match=str(trim)):
            reduced(TrimmedMean(trim), tensors(values))
        return
    expected = np.sort(np.array(values), axis=0)[trim:-trim].mean(axis=0)
    assert torch.allclose(reduced(TrimmedMean(trim), tensors(values)), torch.tensor(expected).float(), atol=1e-4)


@given(rows)
@settings(max_examples=50, deadline=None)
def test_a_median_is_numpy_s(values: list[list[float]]) -> None:
    expected = torch.tensor(np.median(np.array(values), axis=0)).float()
    assert torch.allclose(reduced(Median(), tensors(values)), expected, atol=1e-5)


def test_a_median_over_several_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everfed.methods.aggregate.robust._AT_ONCE", 10)
    values = [torch.randn(7, 3) for _ in range(5)]
    assert torch.equal(reduced(Median(), values), torch.stack(values).median(dim=0).values)


def test_clipping_scales_long_updates_down_and_leaves_short_ones() -> None:
    long, short = torch.tensor([30.0, 40.0]), torch.tensor([0.3, 0.4])
    assert torch.allclose(reduced(ClippedMean(5.0), [long]), torch.tensor([3.0, 4.0]))
    assert torch.equal(reduced(ClippedMean(5.0), [short]), short)
    assert torch.allclose(reduced(ClippedMean(5.0), [long, short]), torch.tensor([1.65, 2.2]))
    assert torch.equal(reduced(ClippedMean(5.0), [torch.zeros(2)]), torch.zeros(2))


@pytest.mark.parametrize(
    "reducer", [TrimmedMean(1), Median(), ClippedMean(1.0), ClippedMean(), GeometricMedian(), GeometricMedian(1)]
)
def test_nothing_integers_numbers_and_empty_tensors(reducer: Reducer) -> None:
    assert reduced(reducer, []) is None
    assert reduced(reducer, [torch.zeros(0)] * 3).shape == (0,)
    counts = reduced(reducer, [torch.tensor([0, 1])] * 3)
    assert counts.dtype == torch.int64 and counts.tolist() == [0, 1]
    assert reducer.secure is False


def test_a_trimmed_mean_keeps_few_vectors_however_many_reply() -> None:
    reducing = TrimmedMean(2).start()
    assert isinstance(reducing, Trimming)
    for client in range(50):
        reducing.add(client, torch.randn(10), 1.0)
    assert reducing.low is not None and reducing.high is not None
    assert reducing.low.shape == reducing.high.shape == (2, 10)


@given(
    rows,
    st.integers(1, 4),
    st.sampled_from(
        [TrimmedMean(1), Median(), ClippedMean(50.0), ClippedMean(), GeometricMedian(), GeometricMedian(1)]
    ),
)
@settings(max_examples=60, deadline=None)
def test_several_processes_reduce_together(values: list[list[float]], ranks: int, reducer: Reducer) -> None:
    """Each has some of the clients, one perhaps none; all end with what one process would have."""
    parts = [reducer.start() for _ in range(ranks)]
    for client, value in enumerate(tensors(values)):
        parts[client % ranks].add(client, value, 1.0)
    assert all(isinstance(part, Shared) for part in parts)
    exported = [tree.from_bytes(tree.to_bytes(part.export())) for part in parts if isinstance(part, Shared)]
    expected = reduced(reducer, tensors(values))
    for part in parts:
        part.merge(exported)  # type: ignore[attr-defined]
        found = part.result()
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "reducer", [TrimmedMean(1), Median(), ClippedMean(1.0), ClippedMean(), GeometricMedian(), GeometricMedian(1)]
)
def test_processes_none_of_which_had_a_reply(reducer: Reducer) -> None:
    part = reducer.start()
    assert isinstance(part, Shared)
    part.merge([part.export(), {}])
    assert part.result() is None


@given(rows, st.integers(0, 2), st.floats(-1e6, 1e6))
@settings(max_examples=60, deadline=None)
def test_one_attacker_cannot_leave_the_honest_range(values: list[list[float]], at: int, lie: float) -> None:
    honest = [row for index, row in enumerate(values) if index != at]
    sent = [*honest[:at], [lie] * 4, *honest[at:]]
    low, high = np.min(honest, axis=0) - 1e-3, np.max(honest, axis=0) + 1e-3
    for reducer in (TrimmedMean(1), Median()):
        found = reduced(reducer, tensors(sent)).numpy()
        assert np.all(found >= low) and np.all(found <= high)


def test_clipping_to_the_median_of_the_norms_follows_the_honest() -> None:
    """Norms 5, 10 and 5e8: the median is 10, so the last is scaled to 10 and the others are untouched."""
    values = [torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0]), torch.tensor([3e8, -4e8])]
    expected = (torch.tensor([3.0, 4.0]) + torch.tensor([6.0, 8.0]) + torch.tensor([6.0, -8.0])) / 3
    assert torch.allclose(reduced(ClippedMean(), values), expected)
    assert torch.equal(reduced(ClippedMean(), [torch.zeros(2)] * 3), torch.zeros(2))


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([[0.0], [1.0], [7.0], [50.0], [1e8]], [7.0]),  # on a line it is the median
        ([[0.0, 0.0], [4.0, 0.0], [2.0, 12**0.5]], [2.0, 2 / 3**0.5]),  # Fermat's point of an equal triangle
        ([[0.0, 0.0], [2.0, 0.5], [-2.0, 0.5]], [0.0, 0.0]),  # an angle above 120 degrees: its corner
        ([[0.0, 0.0], [3.0, 0.0], [3.0, 2.0], [0.0, 2.0]], [1.5, 1.0]),  # of four corners: where diagonals cross
        ([[2.0, 3.0]], [2.0, 3.0]),
        ([[2.0, 3.0]] * 3, [2.0, 3.0]),
    ],
)
def test_the_geometric_median_of_known_figures(points: list[list[float]], expected: list[float]) -> None:
    assert reduced(GeometricMedian(), tensors(points)).tolist() == pytest.approx(expected, abs=2e-5)


@given(
    st.integers(0, 2**32 - 1), st.floats(0, 9.9e7), st.sampled_from(["flip", "noise", "same"]), st.sampled_from([0, 2])
)
@settings(max_examples=100, deadline=None)
def test_two_of_seven_liars_move_the_geometric_median_by_a_bounded_way(
    seed: int, scale: float, lie: str, liars: int
) -> None:
    """By 2 (n - f) / (n - 2 f) = 10 / 3 honest radii at most (Minsker, 2015, Lemma 2.1). Mixed with neighbours, honest
    updates are means of five of which three are honest and two no farther than the fifth honest one: 0.8 diameters."""
    rng = np.random.default_rng(seed)
    honest = rng.normal(size=(5, 20)) + rng.normal(size=20) * 5
    drawn = rng.normal(size=(2, 20))
    lies = {"flip": -honest[:2] * scale, "noise": drawn * scale, "same": np.repeat(drawn[:1], 2, 0) * scale}[lie]
    found = reduced(GeometricMedian(liars), [torch.from_numpy(row) for row in [*honest, *lies]]).numpy()
    centre = honest.mean(0)
    radius = np.linalg.norm(honest - centre, axis=1).max()
    assert np.linalg.norm(found - centre) <= 10 / 3 * radius * (1 + 1e-6)


def test_mixing_replaces_each_by_the_mean_of_its_nearest() -> None:
    """On a line: 0, 1, 2, 3 and a liar at 100. The means of the four nearest are 1.5 for all but the liar's, 26.5;
    the median of 1.5 (four times) and 26.5 is 1.5."""
    points = tensors([[0.0], [1.0], [2.0], [3.0], [100.0]])
    gram = gram_matrix(points)
    rows = nearest_means(gram, 4) @ torch.stack(points).double()
    assert rows.flatten().tolist() == [1.5, 1.5, 1.5, 1.5, 26.5]
    assert reduced(GeometricMedian(1), points).tolist() == pytest.approx([1.5], abs=1e-4)
    with pytest.raises(TooFewReplies, match="lower liars"):
        reduced(GeometricMedian(2), points[:4])


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_no_other_point_is_nearer_to_all_than_the_geometric_median(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(6, 8)) * rng.choice([1.0, 30.0], size=(6, 1))

    def far(point: np.ndarray) -> float:
        return float(np.linalg.norm(points - point, axis=1).sum())

    found = reduced(GeometricMedian(), [torch.from_numpy(row) for row in points]).numpy()
    for step in (1e-3, 0.1, 3.0):
        assert far(found) <= far(found + step * rng.normal(size=8)) + 1e-6


# in a run ------------------------------------------------------------------------------------------------------------
def run(bench: Bench, **options: Any) -> torch.Tensor:
    def build() -> Method:
        return compose(FedAvg(**options), name="fedavg")

    return Bench(build, stream=bench.stream, module=bench.module, train=bench.train).run().params


FOUR = Bench(stream=Toy(clients=4), module=Norm)


def test_with_equal_clients_all_reducers_are_the_mean() -> None:
    class Same(Toy):
        def data(self, client: int, task: int) -> Any:
            return super().data(0, task)

    whole = TrainOptions(1, 1000, Optimizer(lr=0.1))  # in one batch, so that the order does not differ either
    bench = Bench(stream=Same(clients=3, rounds_per_task=1, tasks=1), train=whole)
    mean = run(bench)
    wide = {"reducer": "norm-clipping", "norm": 1e6}
    others = [{"reducer": name} for name in ("trimmed-mean", "median", "norm-clipping", "geometric-median")]
    for options in (wide, *others):
        assert torch.allclose(run(bench, **options), mean, atol=1e-6)


def test_loose_clipping_is_fedavg_and_tight_clipping_bounds_the_way() -> None:
    assert torch.allclose(run(FOUR, reducer="norm-clipping", norm=1e6), run(FOUR), atol=1e-5)
    way = run(FOUR, reducer="norm-clipping", norm=0.01) - FOUR.model()["params"]
    assert float(way.norm()) <= 4 * 0.01 + 1e-6  # four rounds


@pytest.mark.parametrize("reducer", ["trimmed-mean", "median", "norm-clipping", "geometric-median"])
def test_robust_reducers_are_refused_under_secure_aggregation(reducer: str) -> None:
    method = methods.build("fedavg", {"fedavg": {"reducer": reducer}})
    assert method.reveals() == {"train": ["fedavg"]}
    with pytest.raises(CompositionError, match="needs every client's own reply to fedavg"):
        secured(method)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"reducer": "krum"}, "method.fedavg.reducer must be one of mean, trimmed-mean, median, norm-clipping"),
        ({"reducer": "median", "weighting": "samples"}, "weights are clients' claims"),
        ({"trim": 0}, "method.fedavg.trim"),
        ({"norm": -1.0}, "method.fedavg.norm"),
        ({"liars": -1}, "method.fedavg.liars"),
    ],
)
def test_options_are_checked(options: dict[str, Any], match: str) -> None:
    with pytest.raises(CompositionError, match=match):
        methods.build("fedavg", {"fedavg": options})
