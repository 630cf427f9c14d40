"""Reducers that withstand a minority of malicious clients: coordinate-wise trimmed mean and median (Yin et al., 2018),
and a mean of updates whose norms are clipped (Sun et al., 2019).

None is a sum, so none can run under secure aggregation. All clients weigh the same: weights would be claims of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everfed import Reducer, Tree
from everfed.core.reduce import Reducing, Shared

_AT_ONCE = 1 << 22  # numbers that a median sorts at a time


class TooFewReplies(ValueError):
    """Not enough replies for what the reducer cuts off."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _typed(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if dtype.is_floating_point else value.round().to(dtype)


class Trimming(Shared):
    """Keeps a sum and, of every coordinate, the `trim` smallest and largest values: 2 trim + 1 vectors, however many
    clients reply."""

    def __init__(self, trim: int) -> None:
        self.trim, self.count = trim, 0
        self.total: Tensor | None = None
        self.low: Tensor | None = None  # (at most trim, *shape), ascending
        self.high: Tensor | None = None
        self.dtype = torch.float64

    def add(self, client: int, value: Any, weight: float) -> None:
        exact = torch.as_tensor(value)
        self.dtype, exact = exact.dtype, exact.to(torch.float64)
        row = exact.unsqueeze(0)
        self._take(exact, row, row, 1)

    def _take(self, total: Tensor, low: Tensor, high: Tensor, count: int) -> None:
        self.total = total.clone() if self.total is None else self.total.add_(total)
        low = low if self.low is None else torch.cat([self.low, low])
        high = high if self.high is None else torch.cat([self.high, high])
        self.low, self.high = low.sort(dim=0).values[: self.trim], high.sort(dim=0).values[-self.trim :]
        self.count += count

    def export(self) -> Tree:
        if self.total is None:
            return {}
        return {
            "total": self.total,
            "low": self.low,
            "high": self.high,
            "count": self.count,
            "dtype": _name(self.dtype),
        }

    def merge(self, exported: Sequence[Tree]) -> None:
        self.total, self.low, self.high, self.count = None, None, None, 0
        for one in filter(None, exported):
            self.dtype = getattr(torch, one["dtype"])
            self._take(one["total"], one["low"], one["high"], one["count"])

    def result(self) -> Any:
        if self.total is None or self.low is None or self.high is None:
            return None
        left = self.count - 2 * self.trim
        if left < 1:
            raise TooFewReplies(f"{self.count} replies, but {self.trim} are cut off at either end; lower trim")
        return _typed((self.total - self.low.sum(0) - self.high.sum(0)) / left, self.dtype)


@dataclass(frozen=True)
class TrimmedMean(Reducer):
    """The mean of every coordinate without its `trim` smallest and largest values; withstands `trim` attackers."""

    trim: int = 1

    def start(self) -> Reducing:
        return Trimming(self.trim)


class Middle(Shared):
    """Holds all replies, as an exact median must, and takes it over a stretch of coordinates at a time."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def add(self, client: int, value: Any, weight: float) -> None:
        self.values.append(torch.as_tensor(value))

    def export(self) -> Tree:
        return {str(index): value for index, value in enumerate(self.values)}

    def merge(self, exported: Sequence[Tree]) -> None:
        self.values = [value for one in exported for value in one.values()]

    def result(self) -> Any:
        if not self.values:
            return None
        first = self.values[0]
        if first.numel() == 0:
            return first
        flat = [value.reshape(-1) for value in self.values]
        stretch = max(1, _AT_ONCE // len(flat))
        parts = [
            torch.stack([row[start : start + stretch].to(torch.float64) for row in flat]).quantile(0.5, dim=0)
            for start in range(0, len(flat[0]), stretch)
        ]
        return _typed(torch.cat(parts), first.dtype).reshape(first.shape)


@dataclass(frozen=True)
class Median(Reducer):
    """The median of every coordinate (the mean of the middle two of an even number); withstands a minority."""

    def start(self) -> Reducing:
        return Middle()


class Clipping(Shared):
    """Sums clipped updates; holds one vector."""

    def __init__(self, norm: float) -> None:
        self.norm, self.count = norm, 0
        self.total: Tensor | None = None
        self.dtype = torch.float64

    def add(self, client: int, value: Any, weight: float) -> None:
        exact = torch.as_tensor(value)
        self.dtype, exact = exact.dtype, exact.to(torch.float64)
        clipped = exact * torch.clamp(self.norm / exact.norm().clamp_min(1e-300), max=1.0)
        self.total = clipped if self.total is None else self.total.add_(clipped)
        self.count += 1

    def export(self) -> Tree:
        return {} if self.total is None else {"total": self.total, "count": self.count, "dtype": _name(self.dtype)}

    def merge(self, exported: Sequence[Tree]) -> None:
        some = [one for one in exported if one]
        for one in some:
            self.dtype = getattr(torch, one["dtype"])
        self.count = sum(one["count"] for one in some)
        self.total = torch.stack([one["total"] for one in some]).sum(0) if some else None

    def result(self) -> Any:
        return None if self.total is None else _typed(self.total / self.count, self.dtype)


@dataclass(frozen=True)
class ClippedMean(Reducer):
    """The mean of updates, each scaled down to an L2 norm of `norm` at most, so that a client moves it by norm / K."""

    norm: float = 10.0

    def start(self) -> Reducing:
        return Clipping(self.norm)
