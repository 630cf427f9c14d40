"""Checks of a part's options. Error messages name the option, the allowed values and the given one.

An option of None stands for a default that is chosen later, and is not checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def at_least(options: Any, least: float, *names: str) -> None:
    """Raises ValueError for the first of the named options that is below `least`, or no number."""
    for name, value in _given(options, names):
        if not value >= least:
            raise ValueError(f"{name} must be at least {least:g}; got {value}")


def positive(options: Any, *names: str) -> None:
    """Raises ValueError for the first of the named options that is not above 0."""
    for name, value in _given(options, names):
        if not value > 0:
            raise ValueError(f"{name} must be positive; got {value}")


def one_of(options: Any, **choices: Iterable[str]) -> None:
    """Raises ValueError for the first option whose value is not among its choices."""
    for name, allowed in choices.items():
        if getattr(options, name) not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(options, name)!r}")


def _given(options: Any, names: Iterable[str]) -> Iterable[tuple[str, Any]]:
    return ((name, value) for name in names if (value := getattr(options, name)) is not None)
