"""Checks of a part's options."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from everfed.methods.common.checks import at_least, one_of, positive

NAN = float("nan")


@pytest.mark.parametrize("value", [0, 0.0, 3, None])
def test_what_is_allowed_passes(value: float | None) -> None:
    at_least(SimpleNamespace(a=value), 0, "a")


@pytest.mark.parametrize(("value", "given"), [(-1, "got -1"), (NAN, "got nan")])
def test_the_first_that_is_too_small_is_named(value: float, given: str) -> None:
    with pytest.raises(ValueError, match=f"^b must be at least 0.5; {given}$"):
        at_least(SimpleNamespace(a=1, b=value), 0.5, "a", "b")


@pytest.mark.parametrize("value", [0, -1, NAN])
def test_positive_means_above_zero(value: float) -> None:
    positive(SimpleNamespace(a=1e-9), "a")
    with pytest.raises(ValueError, match=f"^a must be positive; got {value}$"):
        positive(SimpleNamespace(a=value), "a")


def test_choices_are_listed() -> None:
    one_of(SimpleNamespace(a="x"), a=("x", "y"))
    with pytest.raises(ValueError, match="^b must be one of x, y; got 'z'$"):
        one_of(SimpleNamespace(a="x", b="z"), a=("x",), b=("x", "y"))
