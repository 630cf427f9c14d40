"""The gradient of a step as rules see it: a flat vector that is not made before a rule asks for it.

A rule that only removes a conflict is remembered, so that on a GPU one kernel removes it together with the optimiser's
step; anything else flattens the gradients of all backward passes into one vector first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from everfed.core.replica import Gradients, Replica

_TINY = 1e-30  # |reference|^2 at or below this counts as zero
Conflict = tuple[Tensor, Tensor]  # a reference (P,), and |reference|^2: 0-d, infinite where nothing is to be removed


class Gradient:
    """(P,) the sum of the gradients of all backward passes, after the rules so far. Immutable."""

    def __init__(self, replica: Replica, passes: Sequence[Gradients], conflict: Conflict | None = None) -> None:
        self._replica, self.passes, self.conflict = replica, passes, conflict
        self._vector: Tensor | None = None

    @staticmethod
    def of(replica: Replica, vector: Tensor) -> Gradient:
        """The gradient that a rule made."""
        made = Gradient(replica, ())
        made._vector = vector
        return made

    @property
    def lazy(self) -> bool:
        """Is it still the passes' own sum, but for one conflict?"""
        return self._vector is None

    @property
    def vector(self) -> Tensor:
        """(P,) float32."""
        if self._vector is None:
            vector = self._replica.flatten(self.passes)
            self._vector = vector if self.conflict is None else project(vector, *self.conflict)
        return self._vector

    def without_conflict(self, reference: Tensor | None, norm: Tensor | None = None) -> Gradient:
        """g - <g, r> / |r|^2 r where <g, r> < 0; unchanged elsewhere, and without a reference.

        norm: `squared_norm(reference)`, when it is known already."""
        if reference is None:
            return self
        norm = squared_norm(reference) if norm is None else norm
        if self.lazy and self.conflict is None:
            return Gradient(self._replica, self.passes, (reference, norm))
        return Gradient.of(self._replica, project(self.vector, reference, norm))


def project(gradient: Tensor, reference: Tensor | None, norm: Tensor | None = None) -> Tensor:
    """`gradient` when <gradient, reference> >= 0 or there is no reference, else its part orthogonal to `reference`.

    Both are (P,) gradients, ascent directions of a loss. Without a conflict the coefficient is zero: arithmetic in
    place of a branch, which would wait for the device. Scalar products of long vectors are summed in float64.
    """
    if reference is None:
        return gradient
    q = squared_norm(reference) if norm is None else norm
    coefficient = dot(gradient, reference).clamp(max=0.0) / q
    # g - (s/q) ref; subtracting an exact zero leaves g as it was, bit for bit
    return torch.addcmul(gradient, reference, coefficient.to(gradient.dtype), value=-1.0)


def squared_norm(reference: Tensor) -> Tensor:
    """|reference|^2 as a divisor: infinite for a zero reference, which then removes nothing."""
    q = dot(reference, reference)
    return torch.where(q > _TINY, q, torch.inf)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Scalar product (0-d); in float64 for long vectors."""
    return (a * b).sum(dtype=torch.float64) if a.numel() > 1_000_000 else torch.dot(a, b)
