"""TIES-merging (Yadav et al., 2023): trim, elect signs, disjoint mean."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from everfed.core.message import MODEL
from everfed.methods.aggregate.ties import TIES, merge, trim
from tests.support.toy import Bench

Rows = list[list[float]]


def test_worked_by_hand() -> None:
    """The share 1/2 of four entries is two. Signs: 3 - 1, -4, 2 against -2 (none), 5."""
    updates = {
        0: torch.tensor([3.0, 0.1, 2.0, -1.0]),
        1: torch.tensor([-1.0, -4.0, 0.5, 0.2]),
        2: torch.tensor([0.3, 0.0, -2.0, 5.0]),
    }
    assert trim(updates[0], 0.5).tolist() == [3.0, 0.0, 2.0, 0.0]
    model = {"params": torch.ones(4), "stats": torch.zeros(0), "counters": torch.zeros(0)}
    server = Bench("ties").server("ties", {MODEL: model}, reduced={"update": updates})
    assert TIES(density=0.5, scale=2.0).aggregate(server)["params"].tolist() == [7.0, -7.0, 1.0, 11.0]


def from_the_paper(updates: np.ndarray, density: float) -> np.ndarray:
    """Algorithm 1, entry by entry."""
    trimmed = []
    for update in updates:
        least = np.sort(np.abs(update))[-max(1, round(density * len(update)))]
        trimmed.append([value if abs(value) >= least else 0.0 for value in update])
    merged = []
    for column in np.array(trimmed).T:
        gamma = np.sign(column[column > 0].sum() - np.abs(column[column < 0]).sum())
        agreeing = [value for value in column if np.sign(value) == gamma != 0]
        merged.append(np.mean(agreeing) if agreeing else 0.0)
    return np.array(merged)


rows = st.integers(1, 6).flatmap(
    lambda size: st.lists(
        st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=size, max_size=size), min_size=1, max_size=5
    )
)


@given(rows, st.sampled_from([0.1, 0.2, 0.5, 1.0]))
def test_equals_the_algorithm(updates: Rows, density: float) -> None:
    found = merge([trim(torch.tensor(update), density) for update in updates])
    assert np.abs(found.numpy() - from_the_paper(np.array(updates), density)).max() < 1e-6


@given(rows)
def test_order_sign_and_one_client(updates: Rows) -> None:
    tensors = [torch.tensor(update) for update in updates]
    merged = merge(tensors)
    assert torch.equal(merge(tensors[::-1]), merged)
    assert torch.equal(merge([-update for update in tensors]), -merged)
    assert torch.equal(merge(tensors[:1]), tensors[0])


def test_one_client_with_all_entries_is_taken_over() -> None:
    bench = Bench("ties", {"ties": {"density": 1.0}})
    plain = bench.change(method="fedavg", options={})
    for one in (bench, plain):
        assert one.stream.clients == 3
    alone = bench.change(stream=bench.stream.__class__(clients=1))
    assert torch.allclose(alone.run(rounds=2).params, plain.change(stream=alone.stream).run(rounds=2).params, atol=1e-6)


def test_few_entries_change_few_parameters() -> None:
    before = Bench("ties").model()["params"]
    after = Bench("ties", {"ties": {"density": 0.05}}).run(rounds=1).params
    assert 0 < (before != after).sum() <= 3 * round(0.05 * len(before))
