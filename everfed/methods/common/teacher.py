"""A frozen teacher inside a training step, and distillation losses.

Classes are given as masks (C,) and not as lists, so that shapes, and with them captured steps, stay the same from task
to task.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from everfed.core.handle import Handle
from everfed.core.replica import frozen_forward
from everfed.method import Model, Server, Step, Tree
from everfed.methods.common.layers import head_inputs, in_precision

OUT = -1e9  # the logit of an excluded class: softmax gives it exactly 0, and 0 times it is 0


def frozen_outputs(step: Step, model: Model, x: Tensor) -> Tensor:
    """(n, classes) outputs of another model on samples in storage form: eval mode, no gradient.

    The step's own module computes them with the other model's tensors, which stay as they are.
    """
    with in_precision(step.trainer):
        outputs: Tensor = frozen_forward(step.replica, model, step.inputs(x))
    return outputs.float()


def frozen_pass(step: Step, model: Model, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """(outputs (n, classes), features (n, F)) of another model on network inputs, in the same way."""
    with in_precision(step.trainer), head_inputs(step.module) as seen:
        outputs: Tensor = frozen_forward(step.replica, model, inputs)
    return outputs.float(), seen[0].float()


def soft_cross_entropy(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Mean over samples of - sum_c softmax(teacher / T)_c log softmax(student / T)_c; no factor T^2."""
    targets = functional.softmax(teacher / temperature, dim=1)
    return -(targets * functional.log_softmax(student / temperature, dim=1)).sum(1).mean()


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Mean over samples of KL(softmax(teacher / T) || softmax(student / T)); no factor T^2."""
    student, teacher = (functional.log_softmax(z / temperature, dim=1) for z in (student, teacher))
    return functional.kl_div(student, teacher, reduction="batchmean", log_target=True)


def binary(outputs: Tensor, targets: Tensor, classes: Tensor) -> Tensor:
    """(n,) mean binary cross-entropy of every sample's logits (n, C) against targets (n, C), over a mask's classes."""
    each = functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    return (each * classes).sum(1) / classes.sum()


def among(outputs: Tensor, classes: Tensor) -> Tensor:
    """Logits (n, C) in which only the classes of a mask (C,) compete; no gradient reaches the others."""
    return outputs.masked_fill(~classes, OUT)


def mask_of(side: Handle, classes: Tensor) -> Tensor:
    """(C,) bool, true at these classes."""
    mask = torch.zeros(side.facts.classes, dtype=torch.bool)
    mask[classes] = True
    return mask


def classes_of(side: Handle, tasks: Iterable[int], everyone: bool = False) -> Tensor:
    """The classes of some tasks together, ascending; on a client those of its own tasks, or those that any client has
    in them (everyone)."""
    stream, client = side.trainer.stream, None if everyone else side.context.client
    found = (stream.labels(task) if client is None else stream.labels_of(client, task) for task in tasks)
    return torch.tensor(sorted({label for labels in found for label in labels}), dtype=torch.int64)


def tasks_before(side: Handle) -> range:
    """The tasks that are finished, on a client those of its own."""
    return range(side.task or 0)


def competing(side: Handle) -> Tensor:
    """The outputs that the shared head, grown class by class, would have now: of all tasks so far, with the classes of
    every client; all, when tasks are hidden."""
    if side.task is None:
        return torch.arange(side.facts.classes)
    return classes_of(side, range(side.task + 1), everyone=True)


def knowing(server: Server) -> Tree:
    """A copy of the shared model with the mask of the classes it has been trained on, `known`."""
    return {**server.model, "known": mask_of(server, competing(server))}
