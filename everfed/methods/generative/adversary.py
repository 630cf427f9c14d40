"""Losses of data-free synthesis with a student as adversary (TARGET, LANDER; after Fast-DFKD and NAYER).

Nothing here waits for the device or branches on data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

MASKS = ("agree", "disagree")
HINGES = ("batch", "sample")


def statistics_distance(stored: Sequence[tuple[Tensor, Tensor]], seen: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """L_bn: sum over layers of ||variance - v|| + ||mean - m||, each pair (mean, variance) of (C,)."""
    terms = [
        torch.linalg.vector_norm(variance - v) + torch.linalg.vector_norm(mean - m)
        for (mean, variance), (m, v) in zip(stored, seen, strict=True)
    ]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def divergences(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """(n,) T^2 KL(softmax(teacher / T) || softmax(student / T)) of every sample."""
    student, teacher = (functional.log_softmax(z / temperature, dim=1) for z in (student, teacher))
    return temperature**2 * (teacher.exp() * (teacher - student)).sum(1)


def adversarial(student: Tensor, teacher: Tensor, mask: str) -> Tensor:
    """L_adv = - mean_i [w_i KL(teacher_i || student_i)], w_i = 1 where their predictions agree (or disagree)."""
    agree = student.argmax(1) == teacher.argmax(1)
    chosen = agree if mask == "agree" else ~agree
    return -(chosen * divergences(student, teacher)).mean()


def bound(projected: Tensor, anchors: Tensor, radius: float, hinge: str = "batch") -> Tensor:
    """relu(MSE(projected, anchors) - radius), both (n, d); the mean is over all entries, or over each sample's own
    before the hinge."""
    errors = (projected - anchors).square()
    if hinge == "sample":
        return functional.relu(errors.mean(1) - radius).mean()
    return functional.relu(errors.mean() - radius)
