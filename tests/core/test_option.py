"""Options: what their declarations refuse, and with which words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from everfed.core.option import HasOptions, declared_options, option

NAN = float("nan")


@dataclass(frozen=True)
class Bounded(HasOptions):
    least: float | None = option(1, at_least=0.5)
    above: float = option(1.0, above=0)
    most: float = option(0.5, at_most=1)
    below: float = option(0.5, above=0.25, below=1)
    word: str = option("x", one_of=("x", "y"), about="a word")
    free: int = 3


@pytest.mark.parametrize("value", [0.5, 3, None])
def test_what_is_allowed_passes(value: float | None) -> None:
    assert Bounded(least=value, above=1e-9, most=1, below=0.999, word="y", free=-1).least == value


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("least", -1, "must be at least 0.5; got -1"),
        ("least", NAN, "must be at least 0.5; got nan"),
        ("above", 0, "must be positive; got 0"),
        ("above", NAN, "must be positive; got nan"),
        ("most", 1.5, "must be at most 1; got 1.5"),
        ("most", NAN, "must be at most 1; got nan"),
        ("below", 0.25, "must be above 0.25; got 0.25"),
        ("below", 1, "must be below 1; got 1"),
        ("word", "z", "must be one of x, y; got 'z'"),
        ("word", None, "must be one of x, y; got None"),
    ],
)
def test_what_is_refused_is_named_with_the_bound(name: str, value: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} {problem}$"):
        Bounded(**{name: value})


def test_the_first_problem_is_named() -> None:
    with pytest.raises(ValueError, match="^least must be at least"):
        Bounded(least=0, above=0)


def test_declarations_say_what_is_allowed() -> None:
    allowed = {name: (declared.allowed, declared.about) for name, declared in declared_options(Bounded)}
    assert allowed == {
        "least": ("at least 0.5", ""),
        "above": ("above 0", ""),
        "most": ("at most 1", ""),
        "below": ("above 0.25, below 1", ""),
        "word": ("one of x, y", "a word"),
        "free": ("", ""),
    }
