"""The random projection against its definition, column by column, and in literal numbers: clients of two versions must
project equally."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everfed.methods.replay.sample_gradients import RandomProjection


def by_definition(rows: torch.Tensor, size: int, seed: int) -> torch.Tensor:
    """Coordinate i of run b is added to the slot of its random word's place in order, with the sign of its last bit."""
    projected = torch.zeros(len(rows), size, dtype=rows.dtype)
    for i in range(rows.shape[1]):
        words = np.random.PCG64(np.random.SeedSequence([seed, i // size])).random_raw(size)
        sign = 1 if int(words[i % size]) & 1 else -1
        projected[:, int(np.argsort(words, kind="stable")[i % size])] += sign * rows[:, i]
    return projected


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 3), st.integers(0, 2**20))
def test_it_is_the_sparse_sign_matrix_of_its_definition(size: int, d: int, n: int, seed: int) -> None:
    rows = torch.from_numpy(np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32))
    assert torch.equal(RandomProjection(size, seed).project(rows), by_definition(rows, size, seed))


def test_in_literal_numbers() -> None:
    """Ten coordinates to four, seed 7."""
    projected = RandomProjection(4, seed=7).project(torch.arange(1.0, 11.0)[None])
    assert projected.tolist() == [[1.0, 11.0, -10.0, -5.0]]


def test_up_to_its_size_lengths_are_kept_exactly() -> None:
    rows = torch.arange(1.0, 6.0)[None]
    projected = RandomProjection(8, seed=1).project(rows)
    assert sorted(projected.abs()[0].tolist()) == [0, 0, 0, 1, 2, 3, 4, 5]


def test_cosines_are_kept_within_the_stated_error() -> None:
    rows = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 50_000)))
    rows[1] += rows[0]
    both = (rows, RandomProjection(1024).project(rows))
    before, after = (torch.nn.functional.cosine_similarity(*m[:, None]).item() for m in both)
    assert abs(before - after) < 4 / 1024**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_type_of_the_rows_stays(dtype: torch.dtype) -> None:
    assert RandomProjection(3).project(torch.ones(2, 5, dtype=dtype)).dtype == dtype
