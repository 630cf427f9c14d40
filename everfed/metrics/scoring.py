"""From logits and labels to counts of correct answers: class-IL and task-IL from one forward pass.

Which classes may answer is a rule: `full` (all outputs), `seen` (classes seen so far), `task` (the classes of the
sample's own task, task-IL). Everything is batched, has static shapes and stays on the device of the logits, so that
counts can be added up there and read once. A label that the rule excludes is wrong, and so is a NaN logit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

RULES = ("full", "seen", "task")


def class_mask(labels: Iterable[int], classes: int) -> Tensor:
    """(classes,) bool on the host, true at `labels`; move it to the device once, before the loop."""
    import torch

    chosen = sorted(set(labels))
    if chosen and not 0 <= chosen[0] <= chosen[-1] < classes:
        raise ValueError(f"labels {chosen} do not fit a head with {classes} classes; allowed: 0 to {classes - 1}")
    mask = torch.zeros(classes, dtype=torch.bool)
    mask[chosen] = True
    return mask


def task_masks(labels_by_task: Sequence[Iterable[int]], classes: int) -> Tensor:
    """(tasks, classes) bool; `task_masks(...)[task_ids]` serves a batch that mixes tasks."""
    import torch

    return torch.stack([class_mask(labels, classes) for labels in labels_by_task])


def label_rank(logits: Tensor, labels: Tensor, allowed: Tensor | None = None) -> Tensor:
    """(...,) int64: how many allowed classes come before the label's. Ties go to the lower class, as in argmax.

    logits: (..., C). labels: (...) int64. allowed: bool, broadcast against the logits; None allows all.
    """
    import torch

    own = logits.gather(-1, labels.unsqueeze(-1))
    lower = torch.arange(logits.shape[-1], device=logits.device) < labels.unsqueeze(-1)
    # "not <=" instead of ">": a comparison with NaN is false, and a model that diverged must not score.
    before = ~(logits <= own) | ((logits == own) & lower)
    return (before if allowed is None else before & allowed).sum(-1)


def hits(logits: Tensor, labels: Tensor, allowed: Tensor | None = None, k: int = 1) -> Tensor:
    """(...,) bool: is the label among the k highest allowed logits? Shapes as in `label_rank`."""
    if k < 1:
        raise ValueError(f"top-k needs k of 1 or more, got {k}")
    within = label_rank(logits, labels, allowed) < k
    if allowed is None:
        return within
    return within & allowed.expand_as(logits).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def correct_counts(logits: Tensor, labels: Tensor, seen: Tensor, task: Tensor, k: int = 1) -> dict[str, Tensor]:
    """Rule -> 0-d int64 count of correct samples, all three rules from the same logits.

    seen, task: bool masks, (C,) for the whole batch or (..., C) per sample.
    """
    masks = dict(zip(RULES, (None, seen, task), strict=True))
    return {rule: hits(logits, labels, mask, k).sum() for rule, mask in masks.items()}


def counts_by_task(hit: Tensor, task_ids: Tensor, tasks: int) -> Tensor:
    """(tasks, 2) int64, columns correct and scored: a row of the accuracy matrix from a batch that mixes tasks.

    hit: (n,) bool. task_ids: (n,) int64. Add the counts of batches and clients, then divide: that is the LTP rule.
    """
    import torch

    member = task_ids.unsqueeze(-1) == torch.arange(tasks, device=task_ids.device)
    return torch.stack([(member & hit.unsqueeze(-1)).sum(0), member.sum(0)], dim=-1)


def accuracies_from_counts(counts: Iterable[tuple[int, int]]) -> list[float | None]:
    """One row of the accuracy matrix from (correct, scored) pairs on the host; None where nothing was scored."""
    return [correct / scored if scored else None for correct, scored in counts]
