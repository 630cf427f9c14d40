"""Numbers for people and for axes."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from everfed.reports import charts, formats


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_960, "1.0 MB"), (2.5e12, "2.5 TB")],
)
def test_sizes(count: float, said: str) -> None:
    assert formats.size(count) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (59.96, "1:00 min"), (61, "1:01 min"), (3661, "1:01:01 h")],
)
def test_durations(seconds: float, said: str) -> None:
    assert formats.duration(seconds) == said


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3723, "1:02:03")])
def test_a_clock_has_no_unit(seconds: float, text: str) -> None:
    assert formats.clock(seconds) == text


def test_ticks() -> None:
    assert charts.ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert charts.ticks(0.13, 0.87) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert charts.ticks(20, 20.000000004) == [18, 19, 20, 21, 22, 23]
    assert charts.ticks(0, 0) == [-0.6, -0.4, -0.2, 0, 0.2, 0.4, 0.6]
    assert charts.ticks(1e-15, 3e-15) == [1e-15, 1.5e-15, 2e-15, 2.5e-15, 3e-15]
    assert charts.whole_ticks(1, 5) == [1, 2, 3, 4, 5]
    assert charts.whole_ticks(1, 50) == [10, 20, 30, 40, 50]


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_ticks_enclose_what_they_are_for(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assume(high - low > 1e-6 * max(1.0, abs(low), abs(high)))
    found = charts.ticks(low, high)
    slack = 1e-6 * (high - low)
    assert found == sorted(set(found)) and 2 <= len(found) <= 13
    assert found[0] <= low + slack and found[-1] >= high - slack


def test_marks_of_a_logarithmic_axis() -> None:
    assert [round(10**tick, 6) for tick in charts.log_ticks(-1, 1)] == [0.1, 1, 10]
    assert [round(10**tick, 6) for tick in charts.log_ticks(0, 0.8)] == [1, 2, 5]
    assert charts.log_ticks(0.31, 0.32) == [0.31, 0.32] and len(charts.log_ticks(-9, 9)) <= 10


def test_names_in_a_sentence() -> None:
    assert [formats.listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "",
        "a",
        "a and b",
        "a, b and c",
    ]
    assert formats.listed(list("abcdefgh"), 3) == "a, b and 6 more"


@pytest.mark.parametrize(
    ("mean", "deviation", "text"),
    [
        (58.553, 5.5214, "58.6 ± 5.5"),
        (88.187, 0.3912, "88.19 ± 0.39"),
        (59.163, 0.0564, "59.16 ± 0.06"),
        (61.25, 12.31, "61 ± 12"),
        (75.0, 0.0, "75.00 ± 0.00"),
    ],
)
def test_a_mean_has_the_digits_of_its_deviation(mean: float, deviation: float, text: str) -> None:
    assert formats.with_deviation(mean, deviation) == text


def test_small_numbers_keep_their_deviation() -> None:
    assert formats.with_deviation(0.0012345, 0.00021, most=6) == "0.00123 ± 0.00021"
