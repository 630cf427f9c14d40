"""Losses, read once per phase, and what is said when they are no longer finite."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from everfed.core.intake import Trained
from everfed.core.phase import Phase
from everfed.core.world import Moment


class Diverged(RuntimeError):
    """A loss is no longer finite."""


def mean_losses(phase: Phase, moment: Moment, trained: list[Trained]) -> Tensor:
    """(clients,) float64, each client's mean step loss; reads the device once. Raises Diverged."""
    sums = torch.stack([torch.as_tensor(one.loss).detach() for one in trained]).cpu().double()
    steps = torch.tensor([one.steps for one in trained], dtype=torch.float64)
    bad = [one.client for one, total in zip(trained, sums.tolist(), strict=True) if not math.isfinite(total)]
    if bad:
        raise Diverged(
            f"the loss of client {bad[0]} is not finite in phase {phase.name!r} of round {moment.round} "
            f"({len(bad)} of {len(trained)} clients); lower train.optimizer.lr or the method's weights"
        )
    return sums / steps


def check_work(phase: Phase, moment: Moment, measured: Mapping[str, float]) -> None:
    """Raises Diverged when something measured of the server's own work is not finite."""
    bad = [name for name, value in measured.items() if not math.isfinite(value)]
    if bad:
        raise Diverged(
            f"{bad[0]} is not finite in the server's phase {phase.name!r} of round {moment.round}, repeat "
            f"{moment.repeat}; lower the learning rate of part {phase.owner!r}, or its weights"
        )
