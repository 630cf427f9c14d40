"""Reducers that withstand a minority of malicious clients: coordinate-wise trimmed mean and median (Yin et al., 2018),
a mean of updates whose norms are clipped (Sun et al., 2019), and the geometric median (Pillutla et al., 2022), of
updates that are mixed with their nearest neighbours first (Allouah et al., 2023).

None is a sum, so none can run under secure aggregation. All clients weigh the same: weights would be claims of theirs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everfed.core.phase import Reducer, Reducing, Shared, Tells
from everfed.core.tree import Tree
from everfed.errors import Fault

_AT_ONCE = 1 << 22  # numbers of all replies that are worked on at a time
_ITERATIONS, _TOLERANCE = 1000, 1e-10  # of the geometric median; the second is the change of a weight at which it ends
_SMOOTHING = 1e-6  # the least distance, in units of the median norm: no division by zero at a client's own update


class TooFewReplies(Fault):
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


class Held(Shared):
    """Holds the replies by client, so that every process reduces them in the same order."""

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}

    def add(self, client: int, value: Any, weight: float) -> None:
        self.values[client] = torch.as_tensor(value)

    def export(self) -> Tree:
        return {str(client): value for client, value in self.values.items()}

    def merge(self, exported: Sequence[Tree]) -> None:
        found = {int(client): value for one in exported for client, value in one.items()}
        self.values = {client: found[client] for client in sorted(found)}

    def result(self) -> Any:
        if not self.values:
            return None
        rows = [value.reshape(-1) for value in self.values.values()]
        first = next(iter(self.values.values()))
        if first.numel() == 0:
            return first
        weights = self.weights(gram_matrix(rows))
        total = torch.zeros(rows[0].shape, dtype=torch.float64, device=rows[0].device)
        for weight, row in zip(weights.tolist(), rows, strict=True):
            total.add_(row.to(torch.float64), alpha=weight)
        return _typed(total, first.dtype).reshape(first.shape)

    @abstractmethod
    def weights(self, gram: Tensor) -> Tensor:
        """(K,) by which the replies are added up, from their inner products (K, K); float64 on the host."""


def gram_matrix(rows: Sequence[Tensor]) -> Tensor:
    """(K, K) inner products in float64 on the host, over a stretch of coordinates at a time."""
    total = torch.zeros((len(rows), len(rows)), dtype=torch.float64)
    stretch = max(1, _AT_ONCE // len(rows))
    for start in range(0, len(rows[0]), stretch):
        piece = torch.stack([row[start : start + stretch].to(torch.float64) for row in rows])
        total += (piece @ piece.T).cpu()
    return total


class MedianClipping(Held):
    """Scales the longer half of the updates down to the median of their norms."""

    def weights(self, gram: Tensor) -> Tensor:
        norms = gram.diagonal().sqrt()
        return (norms.quantile(0.5) / norms.clamp_min(1e-300)).clamp(max=1.0) / len(norms)


class Weiszfeld(Held):
    """Finds the point from which the sum of distances to all updates is smallest, as a weighted mean of them. liars:
    each update is replaced by the mean of the K - liars that are nearest to it first."""

    def __init__(self, liars: int = 0) -> None:
        super().__init__()
        self.liars = liars

    def weights(self, gram: Tensor) -> Tensor:
        if len(gram) <= 2 * self.liars:
            raise TooFewReplies(f"{len(gram)} replies, {self.liars} of which may be false; lower liars")
        if self.liars == 0:
            return geometric_median(gram)
        mixing = nearest_means(gram, len(gram) - self.liars)
        return geometric_median(mixing @ gram @ mixing.T) @ mixing


def nearest_means(gram: Tensor, count: int) -> Tensor:
    """(K, K), whose row i makes the mean of the `count` replies that are nearest to reply i, itself among them
    (nearest neighbour mixing: Allouah et al., 2023, "Fixing by Mixing", Algorithm 2)."""
    squares = gram.diagonal()
    nearest = (squares[:, None] + squares[None] - 2.0 * gram).argsort(dim=1, stable=True)[:, :count]
    return torch.zeros_like(gram).scatter_(1, nearest, 1.0 / count)


def geometric_median(gram: Tensor) -> Tensor:
    """(K,) weights, by the smoothed algorithm of Weiszfeld from the point 0 (Pillutla et al., 2022, Algorithm 2).
    Distances come from the inner products: |x_i - z|^2 = G_ii - 2 (G w)_i + w'Gw for z = sum of w_i x_i."""
    squares = gram.diagonal()
    least = max(float(squares.sqrt().quantile(0.5)) * _SMOOTHING, 1e-300)
    weights = _inverse(squares, least)
    for _ in range(_ITERATIONS):
        along = gram @ weights
        before, weights = weights, _inverse(squares - 2.0 * along + weights @ along, least)
        if float((weights - before).abs().max()) < _TOLERANCE:
            break
    return weights


def _inverse(squares: Tensor, least: float) -> Tensor:
    """1 / distance, with a sum of 1. squares: of the distances."""
    inverse = 1.0 / squares.clamp_min(0.0).sqrt().clamp_min(least)
    return inverse / inverse.sum()


@dataclass(frozen=True)
class GeometricMedian(Reducer):
    """The point with the smallest sum of distances to all updates; fewer than half of the clients cannot move it far,
    whatever they send: each pulls by the direction in which its update lies, not by how far away it is. liars: how many
    replies may be false; with any, it also holds where the honest ones differ much from each other."""

    liars: int = 0
    tells = Tells.GRADIENTS

    def start(self) -> Reducing:
        return Weiszfeld(self.liars)


@dataclass(frozen=True)
class ClippedMean(Reducer):
    """The mean of updates, each scaled down to an L2 norm of `norm` at most, so that a client moves it by norm / K.
    norm: 0 for the median of the phase's norms, which follows what honest updates look like (memory: all replies)."""

    norm: float = 0.0
    tells = Tells.GRADIENTS

    def start(self) -> Reducing:
        return Clipping(self.norm) if self.norm > 0 else MedianClipping()
