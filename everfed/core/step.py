"""One training step, as the parts see it and as every engine runs it.

`train_step` is the only place where losses are added, gradients taken and rules applied. It uses tensors of shapes
known from the schedule, and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from everfed.core.context import Context
from everfed.core.layout import Layout
from everfed.core.optimizer import Optimizer
from everfed.core.part import Part, State, overrides
from everfed.core.replica import Replica
from everfed.core.substep import Course, Move
from everfed.core.tree import Tree


@dataclass
class Batch:
    """Samples a part brings into a step. joined: part of the task loss, forwarded together with the real batch;
    otherwise they have the outputs of a forward pass of their own, and the part's `loss` says what to do with them.
    ready: x are network inputs already (generated images, say), not samples in storage form."""

    x: Tensor
    y: Tensor
    joined: bool = False
    extra: dict[str, Tensor] = field(default_factory=dict)
    outputs: Tensor | None = None
    ready: bool = False


class Step:
    """The state of local training at one step. Built once per local training; `load` moves it to the next step."""

    def __init__(
        self,
        ctx: Context,
        replica: Replica,
        forward: Callable[[Tensor], Tensor],
        task_loss: Callable[[Tensor, Tensor], Tensor],
        state: State,
        message: dict[str, Tree],
        received: Tensor,
    ) -> None:
        self.ctx = ctx
        self.replica = replica
        self.forward = forward
        self.task_loss = task_loss
        self.state = state
        self.message = message
        self.received = received  # (P,) the model the server sent last
        self.rows: dict[str, dict[str, Tensor]] = {}
        self.x: Tensor = received
        self.y: Tensor = received
        self.outputs: Tensor = received  # of the real batch
        self.all_outputs: Tensor = received  # of the real batch and the joined ones
        self.all_y: Tensor = received
        self.batches: dict[str, Batch] = {}
        self.handed: dict[str, Tensor] = {}  # what a part's substeps hand on to what follows in the same step
        self._course: Course | None = None

    def course(self, parts: Sequence[Part]) -> Course:
        """Who moves what; the same in all steps of a local training."""
        if self._course is None:
            self._course = Course.of(parts, self.layout)
        return self._course

    @property
    def params(self) -> Tensor:
        """(P,) the live parameter vector; autograd does not see it, the module's parameters are views of it."""
        return self.replica.params

    @property
    def layout(self) -> Layout:
        return self.replica.layout

    def begin(self, x: Tensor, y: Tensor, rows: dict[str, dict[str, Tensor]]) -> None:
        """Take the next minibatch and the parts' planned rows."""
        self.x, self.y, self.rows = x, y, rows
        self.batches = {}
        self.handed = {}

    def inputs(self, x: Tensor) -> Tensor:
        """Samples in storage form as network inputs."""
        inputs: Tensor = self.ctx.train.stream.inputs(x)
        return inputs

    def forward_inputs(self, inputs: Tensor) -> Tensor:
        """Outputs for network inputs, as `forward` gives them for samples in storage form."""
        return self.ctx.train.forward_inputs(inputs, self.state, self.message)

    def grad(self, loss: Tensor) -> Tensor:
        """(P,) gradient of `loss` with respect to the trainable parameters; zeros where it does not depend on them."""
        return self.replica.gradient(loss)

    def task_gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """(P,) gradient of the task loss on other samples at the current parameters (A-GEM's second gradient)."""
        with torch.enable_grad():
            return self.grad(self.task_loss(self.forward(x), y))


def train_step(
    step: Step, parts: Sequence[Part], optimizer: Optimizer, moments: dict[str, Tensor], rate: Tensor
) -> Tensor:
    """Forward, loss terms, backward, gradient rules, optimiser, the parts' own updates; substeps before and after.
    Returns the loss of the step itself, detached."""
    course = step.course(parts)
    for move in course.before:
        _substep(step, move, optimizer, moments, rate)
    for part in parts:
        step.batches.update(part.batches(step))
    _forward(step)
    loss = _objective(step, parts)
    for part in parts:
        term = part.loss(step)
        loss = loss if term is None else loss + term
    gradient = step.grad(loss)
    with torch.no_grad():
        for part in parts:
            gradient = part.gradient(step, gradient)
        optimizer.apply(step.params[course.main], gradient[course.main], moments, rate)
        for part in parts:
            part.after(step)
        step.replica.refresh()
    for move in course.after:
        _substep(step, move, optimizer, moments, rate)
    return loss.detach()


def _substep(step: Step, move: Move, optimizer: Optimizer, moments: dict[str, Tensor], rate: Tensor) -> None:
    gradient = step.replica.gradient(move.part.substep(step, move.substep.name), move.span)
    with torch.no_grad():
        move.apply(step.params, gradient, moments, optimizer, rate)
        step.replica.refresh()


def _forward(step: Step) -> None:
    """One forward for the real batch and the joined ones together, one for each separate batch.

    A network that treats every sample by itself gives separate batches the same outputs in one forward with the rest,
    and is spared the others.
    """
    joined = [batch for batch in step.batches.values() if batch.joined]
    apart = [batch for batch in step.batches.values() if not batch.joined]
    together = joined if step.replica.mixes_samples else [*joined, *apart]
    step.all_y = step.y
    if together:
        outputs = _together(step, together)
        step.outputs, *rest = outputs.split([len(step.x), *(len(batch.x) for batch in together)])
        for batch, own in zip(together, rest, strict=True):
            batch.outputs = own
        counted = len(step.x) + sum(len(batch.x) for batch in joined)
        step.all_outputs = outputs[:counted]
        step.all_y = torch.cat([step.y, *(batch.y for batch in joined)]) if joined else step.y
    else:
        step.outputs = step.all_outputs = step.forward(step.x)
    for batch in apart:
        if step.replica.mixes_samples:
            batch.outputs = step.forward_inputs(batch.x) if batch.ready else step.forward(batch.x)


def _together(step: Step, batches: Sequence[Batch]) -> Tensor:
    """The outputs of the real batch and the others, in one forward pass."""
    if not any(batch.ready for batch in batches):
        return step.forward(torch.cat([step.x, *(batch.x for batch in batches)]))
    ready = (batch.x if batch.ready else step.inputs(batch.x) for batch in batches)
    return step.forward_inputs(torch.cat([step.inputs(step.x), *ready]))


def _objective(step: Step, parts: Sequence[Part]) -> Tensor:
    for part in parts:
        if overrides(part, "objective"):
            return part.objective(step)
    return step.task_loss(step.all_outputs, step.all_y)
