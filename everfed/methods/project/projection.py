"""The projection that FedGP and A-GEM share: remove from a gradient what conflicts with a reference."""

from __future__ import annotations

import torch
from torch import Tensor

_TINY = 1e-30  # |reference|^2 at or below this counts as zero


def project(gradient: Tensor, reference: Tensor | None, norm: Tensor | None = None) -> Tensor:
    """`gradient` when <gradient, reference> >= 0 or there is no reference, else its part orthogonal to `reference`.

    Both are (P,) gradients, ascent directions of a loss. Without a conflict the coefficient is zero: arithmetic in
    place of a branch, which would wait for the device. Scalar products of long vectors are summed in float64.
    norm: `squared_norm(reference)`, when it is known already.
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


def check_finite(reference: Tensor, what: str) -> Tensor:
    """Raise FloatingPointError for a reference with NaN or Inf, which would spread to the parameters."""
    if not bool(torch.isfinite(reference).all()):
        raise FloatingPointError(f"{what} is not finite")
    return reference
