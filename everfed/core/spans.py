"""Many whole numbers as short text, for events: who took part among thousands, and in which task each of them is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

NAMED = 100  # lists up to this length are written out
MOST = 10_000_000  # numbers that a text may stand for: what claims more is damaged


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: (0, 1, 2, 5, 7, 8) -> "0-2,5,7-8"."""
    pieces = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        pieces.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ",".join(pieces)


def from_spans(text: str) -> tuple[int, ...]:
    """The numbers that `spans` wrote. Raises ValueError."""
    numbers: list[int] = []
    for piece in text.split(",") if text else ():
        first, dash, last = piece.partition("-")
        numbers += range(int(first), _within(int(last if dash else first) + 1))
    return tuple(numbers)


def repeats(values: Iterable[int]) -> str:
    """Values with how often each comes in a row: (0, 0, 1, 0) -> "0x2,1,0"."""
    counted = ((value, len(list(run))) for value, run in groupby(values))
    return ",".join(str(value) if count == 1 else f"{value}x{count}" for value, count in counted)


def from_repeats(text: str) -> tuple[int, ...]:
    """The values that `repeats` wrote. Raises ValueError."""
    values: list[int] = []
    for piece in text.split(",") if text else ():
        value, sign, count = piece.partition("x")
        values += [int(value)] * _within(int(count) if sign else 1)
    return tuple(values)


def _within(count: int) -> int:
    if count > MOST:
        raise ValueError(f"{count} clients are more than this text may stand for")
    return count
