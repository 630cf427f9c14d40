"""Perplexity, RCP and the forgetting factor."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everfed import metrics

ppl = st.floats(1, 1e4)


def test_perplexity_is_the_exponential_of_the_mean() -> None:
    assert metrics.perplexity(0.0, 7) == 1
    assert metrics.perplexity(10 * math.log(50), 10) == pytest.approx(50)


def test_uniform_model_has_the_size_of_the_vocabulary() -> None:
    assert metrics.perplexity(1234 * math.log(30522), 1234) == pytest.approx(30522)


def test_perplexity_of_a_model_that_diverged() -> None:
    assert metrics.perplexity(1e6, 1) == math.inf
    assert metrics.perplexity(math.nan, 1) == math.inf
    assert math.isfinite(metrics.perplexity(709.7, 1))


def test_perplexity_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least one scored token"):
        metrics.perplexity(0.0, 0)
    with pytest.raises(ValueError, match="at least one scored token"):
        metrics.all_period_perplexity([3.0], [0])


def test_all_periods_pool_tokens_not_perplexities() -> None:
    nll, tokens = [30.0, 5.0], [10, 5]
    parts = [metrics.perplexity(a, n) for a, n in zip(nll, tokens, strict=True)]
    assert metrics.all_period_perplexity(parts, tokens) == pytest.approx(metrics.perplexity(35.0, 15))


def test_rcp() -> None:
    assert metrics.rcp(90, 100) == pytest.approx(-0.1)
    assert metrics.rcp(100, 100) == 0
    assert metrics.rcp(90, 100, denominator=200) == pytest.approx(-0.05)


@pytest.mark.parametrize("baseline", [0.0, -1.0, math.inf, math.nan])
def test_rcp_needs_a_baseline(baseline: float) -> None:
    with pytest.raises(ValueError, match="no-replay perplexity must be positive and finite"):
        metrics.rcp(90, baseline)


def test_forgetting_factor() -> None:
    assert metrics.forgetting_factor((100, 80), 85) == 5
    assert metrics.forgetting_factor((100, 80), 75) == -5
    assert metrics.forgetting_factor_relative((100, 80), 85, 100) == pytest.approx(0.05)


def test_forgetting_factor_without_a_past_model() -> None:
    assert metrics.forgetting_factor([], 85) is None
    assert metrics.forgetting_factor_relative([], 85, 100) is None
    assert metrics.forgetting_factor([math.inf], math.inf) is None


def test_a_perplexity_is_positive() -> None:
    with pytest.raises(ValueError, match="must be positive, got -3"):
        metrics.forgetting_factor([-3], 85)


@given(st.lists(ppl, min_size=2, max_size=8, unique=True))
def test_falling_perplexity_forgets_nothing(values: list[float]) -> None:
    *history, latest = sorted(values, reverse=True)
    assert metrics.forgetting_factor(history, latest) < 0


@given(ppl, st.integers(1, 8))
def test_constant_perplexity_forgets_nothing(value: float, periods: int) -> None:
    assert metrics.forgetting_factor([value] * periods, value) == 0


def test_summary() -> None:
    values = metrics.language_summary([[100, 100], [80, 80], [85, 85]], tokens=[3, 9], ppl_no_replay=100)
    assert values == {
        "perplexity": pytest.approx(85),
        "forgetting_factor": pytest.approx(5),
        "forgetting_factor_relative": pytest.approx(0.05),
        "rcp": pytest.approx(-0.15),
    }


def test_summary_of_one_period_without_a_baseline() -> None:
    values = metrics.language_summary([[100.0]], tokens=[3])
    assert values.pop("perplexity") == pytest.approx(100)
    assert set(values.values()) == {None}
    with pytest.raises(ValueError, match="no row"):
        metrics.language_summary([], tokens=[3])
