"""For tests of kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def maps(*shape: int) -> Tensor:
    """Random activations, channels-last."""
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def error(got: Tensor, truth: Tensor) -> float:
    """Relative to the truth's norm."""
    return ((got.double() - truth).norm() / truth.norm()).item()
