"""Draws are named by what they are for: equal names give equal draws everywhere, different names unrelated ones."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everfed.core.random import generator, key
from tests.support.toy import Bench

parts = st.none() | st.integers(-(2**70), 2**70) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
names = st.lists(parts, max_size=4).map(tuple)


@pytest.mark.parametrize("again", [False, True])
def test_global_generators_do_not_depend_on_the_tests_before(again: bool) -> None:
    """The first numbers of Python, NumPy and PyTorch after a seed of 0; drawn twice, so that one moves the other."""
    assert random.random() == 0.8444218515250481
    assert np.random.random() == 0.5488135039273248
    assert torch.rand(1).item() == pytest.approx(0.4962566, abs=1e-7)


def test_keys_are_the_same_on_every_machine() -> None:
    assert key(0, 1, "train", 0, 3, "order") == 4008803134106356240
    assert generator(0, "x").integers(0, 1000, 5).tolist() == [710, 51, 879, 531, 849]


@given(names)
def test_keys_fit_in_63_bits(name: tuple[int | str | None, ...]) -> None:
    assert 0 <= key(*name) < 2**63


@given(names, names)
def test_different_names_have_different_keys(a: tuple[int | str | None, ...], b: tuple[int | str | None, ...]) -> None:
    assert (key(*a) == key(*b)) == (a == b)


def test_a_number_is_not_its_text_and_names_do_not_run_together() -> None:
    assert key(1) != key("1") != key(None)
    assert key("a", "b") != key("ab") != key("a b")


def test_drawing_for_one_purpose_does_not_move_another() -> None:
    expected = generator(0, "b").random(3)
    generator(0, "a").random(1000)
    np.random.seed(1)
    assert np.array_equal(generator(0, "b").random(3), expected)


def test_a_context_draws_by_round_phase_repeat_client_and_tag() -> None:
    ctx = Bench().context(client=1, round_index=2)
    same = ctx.at(rate=0.7).rng("order").random(4)
    assert np.array_equal(same, ctx.rng("order").random(4))
    others = [ctx.at(round=3), ctx.at(phase="reference"), ctx.at(repeat=1), ctx.at(client=0), ctx.at(seed=5)]
    draws = [tuple(other.rng("order").random(4)) for other in others] + [tuple(ctx.rng("reservoir").random(4))]
    assert len({*draws, tuple(same)}) == 7
    assert len({*(other.key("order") for other in (ctx, *others)), ctx.key("reservoir")}) == 7


def test_draws_look_uniform() -> None:
    """One draw from each of many generators is as good as many draws from one."""
    firsts = np.array([generator(0, client, "first").random() for client in range(4000)])
    counts = np.histogram(firsts, bins=20, range=(0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 43.82  # chi-square, 19 degrees of freedom, 0.001
