"""iCaRL's herding against the formula, evaluated plainly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everfed.methods.replay.herding import herd, quota


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def plain_herding(features: np.ndarray, m: int) -> list[int]:
    phi, chosen = unit(features), []
    mean = phi.mean(axis=0)
    for k in range(1, m + 1):
        left = [i for i in range(len(phi)) if i not in chosen]
        chosen.append(min(left, key=lambda i: np.linalg.norm(mean - (phi[i] + phi[chosen].sum(axis=0)) / k)))
    return chosen


@pytest.mark.parametrize("seed", range(10))
def test_equals_the_formula(seed: int) -> None:
    features = np.random.default_rng(seed).standard_normal((20, 6)) + 1
    assert herd(features, 12).tolist() == plain_herding(features, 12)


def test_first_is_nearest_to_the_class_mean() -> None:
    features = np.random.default_rng(1).standard_normal((30, 4)) + 1
    phi = unit(features)
    assert herd(features, 1)[0] == np.argmin(np.linalg.norm(phi - phi.mean(axis=0), axis=1))


@given(st.integers(0, 1000), st.integers(1, 12), st.integers(0, 20))
def test_prefixes_and_uniqueness(seed: int, n: int, m: int) -> None:
    features = np.random.default_rng(seed).integers(-1, 2, (n, 3)).astype(float)  # duplicates and zeros
    chosen = herd(features, m)
    assert len(chosen) == min(m, n) == len(set(chosen.tolist()))
    assert (herd(features, m // 2) == chosen[: m // 2]).all()


def test_more_than_there_are_keeps_each_once() -> None:
    features = np.random.default_rng(2).standard_normal((7, 3))
    assert sorted(herd(features, 100)) == list(range(7))
    assert herd(np.array([[3.0, 4.0]]), 5).tolist() == [0]
    assert herd(np.zeros((0, 4)), 5).tolist() == []
    assert herd(np.zeros((3, 4)), 2).tolist() == [0, 1]


def test_herded_mean_is_nearer_than_a_random_one() -> None:
    rng = np.random.default_rng(3)
    herded, drawn = [], []
    for _ in range(200):
        features = rng.standard_normal((40, 8)) + 0.5
        phi = unit(features)
        mean = phi.mean(axis=0)
        herded.append(np.linalg.norm(phi[herd(features, 5)].mean(axis=0) - mean))
        drawn.append(np.linalg.norm(phi[rng.choice(40, 5, replace=False)].mean(axis=0) - mean))
    assert np.mean(herded) < 0.7 * np.mean(drawn)


def test_quota_shares_the_budget_by_classes_seen() -> None:
    assert [quota(20, classes) for classes in (0, 1, 3, 7, 21)] == [0, 20, 6, 2, 0]
