"""The two verdicts, on numbers made by hand: t(0.95, 4) = 2.1318, t(0.975, 4) = 2.7764, t(0.9875, 4) = 3.4954."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everfed.metrics import covers, effect, gap, levels, mean_and_deviation, paired_difference
from everfed.metrics.statistics import Spread

# the mean of three values with a sample deviation of 1 has an error of sqrt(1/3); that of two such means 0.8165
OF_ONE = math.sqrt(2 / 3)


def level(*differences: float) -> list[str]:
    """Of cells whose sample deviations are 1, over three seeds on both sides."""
    return levels([gap(Spread(50 + d, OF_ONE, 3), Spread(50, OF_ONE, 3)) for d in differences])


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [
        (0.0, "equivalent"),
        (1.25, "equivalent"),  # 1.25 + 2.1318 x 0.8165 = 2.991 < 3
        (1.27, "unresolved"),
        (2.26, "unresolved"),  # 2.7764 x 0.8165 = 2.267
        (2.28, "differs"),
    ],
)
def test_a_level_is_equivalent_differs_or_stays_open(difference: float, verdict: str) -> None:
    assert level(difference) == level(-difference) == [verdict]


def test_a_sure_difference_within_three_points_is_equivalent() -> None:
    assert levels([gap(Spread(52, 0.1, 5), Spread(50, 0.1, 5))]) == ["equivalent"]


def test_many_cells_are_corrected_for_as_holm_does() -> None:
    """Of two, the surer needs 3.4954 x 0.8165 = 2.854; then the other needs 2.267 as if it were alone."""
    assert level(2.84, 0.0) == ["unresolved", "equivalent"]
    assert level(2.87, 0.0) == ["differs", "equivalent"]
    assert level(2.87, 2.28) == ["differs", "differs"]
    assert level(2.84, 2.28) == ["unresolved", "unresolved"]


def test_the_side_with_the_larger_spread_decides_the_freedom() -> None:
    """Variances of the means 1 and 1/4 over three and five seeds: Welch has 1.25^2 / (1/2 + 1/64) = 3.03 degrees."""
    found = gap(Spread(60, math.sqrt(2), 3), Spread(50, 1.0, 5))
    assert (found.difference, found.error) == (10.0, pytest.approx(math.sqrt(1.25)))
    assert found.freedom == pytest.approx(1.25**2 / (1 / 2 + 1 / 64))


@pytest.mark.parametrize(("difference", "verdict"), [(0.0, "equivalent"), (2.9, "equivalent"), (3.1, "differs")])
def test_without_any_spread_the_difference_decides(difference: float, verdict: str) -> None:
    assert levels([gap(Spread(50 + difference, 0.0, 3), Spread(50, 0.0, 3))]) == [verdict]


@given(st.lists(st.floats(0, 100), min_size=2, max_size=6), st.floats(0, 100), st.floats(0.1, 10))
def test_both_sides_are_alike(values: list[float], mean: float, deviation: float) -> None:
    ours, paper = mean_and_deviation(values), Spread(mean, deviation, 5)
    assert levels([gap(ours, paper)]) == levels([gap(paper, ours)])


@pytest.mark.parametrize("side", [Spread(50, 0.0, 1), Spread(50, -1.0, 5), Spread(50, math.nan, 5)])
def test_one_seed_has_no_level(side: Spread) -> None:
    with pytest.raises(ValueError, match="paper: a level needs two or more seeds"):
        gap(Spread(50, 1.0, 3), side)


@pytest.mark.parametrize(
    ("differences", "claimed", "verdict", "covered"),
    [
        ((3, 4, 5), 5.0, "confirmed", True),  # 4 +- 4.3027 / sqrt(3) = [1.52, 6.48]
        ((3, 4, 5), 7.0, "confirmed", False),
        ((3, 4, 5), -5.0, "contradicted", False),
        ((-3, -4, -5), -5.0, "confirmed", True),
        ((2, 4, 6), 8.0, "unresolved", True),  # 4 +- 4.97
        ((2, 4, 6), 10.0, "unresolved", False),
        ((3, 4, 5), 1.9, "not in the paper", True),
        ((3, 4, 5), 0.0, "not in the paper", False),
        ((0.9, 1.0, 1.1), 0.0, "none claimed", False),  # sure, but no more than 2 points
        ((2, 4, 6), 0.0, "none claimed", True),
    ],
)
def test_an_effect_has_the_papers_sign_or_not(
    differences: tuple[float, ...], claimed: float, verdict: str, covered: bool
) -> None:
    ours = paired_difference([50 + d for d in differences], [50.0] * len(differences))
    assert (effect(ours, claimed), covers(ours, claimed)) == (verdict, covered)


def test_two_points_exactly_are_no_claim() -> None:
    assert 8.05 - 6.05 > 2  # in binary
    ours = paired_difference([53.0, 54.0, 55.0], [50.0] * 3)
    assert effect(ours, 8.05 - 6.05) == "not in the paper" and effect(ours, 8.06 - 6.05) == "confirmed"


def test_one_seed_has_no_effect() -> None:
    alone = paired_difference([54.0], [50.0])
    assert not covers(alone, 4.0)
    with pytest.raises(ValueError, match="an effect needs two or more seeds"):
        effect(alone, 4.0)
