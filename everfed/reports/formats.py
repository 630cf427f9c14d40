"""Formats numbers for reading, and finds round numbers for axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime


def percent(fraction: float, digits: int = 2) -> str:
    """0.4535 -> "45.35"; the sign % belongs in the heading."""
    return f"{100 * fraction:.{digits}f}"


def size(count: float) -> str:
    """Bytes in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.95:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def clock(seconds: float) -> str:
    """M:SS, or H:MM:SS from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """With its unit: below a minute in seconds, else as `clock`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    return f"{clock(seconds)} {'h' if round(seconds) >= 3600 else 'min'}"


def count(value: float) -> str:
    """1234567 -> "1,234,567"."""
    return f"{value:,.0f}"


def plain(value: float) -> str:
    """About four digits."""
    return f"{value:.4g}"


def listed(names: Sequence[str], most: int = 6) -> str:
    """As "a, b and c"; of more than `most` the first ones and how many more there are."""
    shown = [*names] if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}" if shown else ""


def moment(seconds: float) -> str:
    """A time since the epoch as UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`, in steps of 1, 2 or 5 times a power of ten.

    Values that are nearly equal stand in the middle, with a tenth of their size on either side.
    """
    if not high - low > 1e-6 * max(abs(low), abs(high)):
        around = 0.1 * max(abs(low), abs(high)) or 0.5
        low, high = low - around, high + around
    raw = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Logarithms of 1, 2 and 5 times powers of ten within [low, high], logarithms too; of powers of ten alone where
    these are enough; the ends themselves where there are fewer than two."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    for factors in ((1, 2, 5), (1,)):
        found = [p + math.log10(factor) for p in powers for factor in factors]
        inside = [tick for tick in found if low - 1e-9 <= tick <= high + 1e-9]
        if 2 <= len(inside) <= about:
            return inside
    every = -(-len(inside) // about) if inside else 1
    return inside[::every] if len(inside) > 1 else [low, high] if high > low else [low - 0.1, high + 0.1]


def whole_ticks(first: int, last: int, about: int = 8) -> list[int]:
    """Whole round numbers within [first, last]."""
    if last - first + 1 <= about:
        return list(range(first, last + 1))
    return [int(value) for value in ticks(first, last, about) if first <= value <= last and value == int(value)]
