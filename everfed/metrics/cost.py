"""What a run cost, in the forms that papers compare: bytes per round, and seconds split by first and later tasks.

Costs of different machines compare only as ratios to a baseline run on the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from everfed.metrics.numbers import Entry, mean

if TYPE_CHECKING:
    from torch import Tensor


def payload_bytes(tensors: Iterable[Tensor]) -> int:
    """numel x itemsize over all tensors, buffers included, headers not."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def amortised_bytes(per_round: float, once_per_task: float, rounds_per_task: int) -> float:
    """Bytes per round when messages sent once per task are spread over its rounds."""
    if rounds_per_task < 1:
        raise ValueError(f"rounds_per_task is {rounds_per_task}; allowed: 1 or more")
    return per_round + once_per_task / rounds_per_task


def cost_ratio(ours: float, baseline: float) -> float:
    """Cost relative to the baseline, usually FedAvg on the same machine."""
    if not baseline > 0:
        raise ValueError(f"the baseline's cost must be positive, got {baseline}")
    return ours / baseline


def first_and_later(seconds: Sequence[Sequence[float]]) -> tuple[Entry, Entry]:
    """Mean seconds in the first task and in all later ones; `seconds[t]` holds every client's every round of task t."""
    first, later = seconds[0], [value for task in seconds[1:] for value in task]
    return mean(first), mean(later)
