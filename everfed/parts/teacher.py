"""A frozen model inside a training step, and how a student is drawn to its outputs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from everfed.core.context import Context
from everfed.core.part import Model
from everfed.core.step import Step
from everfed.parts.layers import in_precision


def frozen_outputs(step: Step, model: Model, x: Tensor) -> Tensor:
    """(n, classes) outputs of another model on samples in storage form: eval mode, no gradient, nothing of it changes.

    The step's own module computes them with the other model's tensors in place of its own.
    """
    trainer, module = step.ctx.train, step.replica.module
    tensors = {
        entry.name: entry.view(vector)
        for entries, vector in (
            (step.layout.params, model["params"]),
            (step.layout.stats, model["stats"]),
            (step.layout.counters, model["counters"]),
        )
        for entry in entries
    }
    training = module.training
    module.eval()
    with torch.no_grad(), in_precision(trainer):
        outputs: Tensor = functional_call(module, tensors, (trainer.stream.inputs(x),)).float()
    module.train(training)
    return outputs


def soft_cross_entropy(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Mean over samples of - sum_c softmax(teacher / T)_c log softmax(student / T)_c; no factor T^2."""
    targets = functional.softmax(teacher / temperature, dim=1)
    return -(targets * functional.log_softmax(student / temperature, dim=1)).sum(1).mean()


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Mean over samples of KL(softmax(teacher / T) || softmax(student / T)); no factor T^2."""
    student, teacher = (functional.log_softmax(z / temperature, dim=1) for z in (student, teacher))
    return functional.kl_div(student, teacher, reduction="batchmean", log_target=True)


def classes_of(ctx: Context, tasks: Iterable[int]) -> Tensor:
    """The classes of some tasks together, ascending."""
    stream = ctx.train.stream
    return torch.tensor(sorted({label for task in tasks for label in stream.labels(task)}), dtype=torch.int64)


def tasks_before(ctx: Context) -> range:
    """The tasks that this client has behind it."""
    return range(ctx.current_task or 0)
