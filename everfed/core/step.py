"""One training step, as the parts see it and as every engine runs it; and the substeps that parts take around it: a
generator after its discriminator, a flow before a classifier.

`train_step` is the only place where losses are added, gradients taken and rules applied. It uses tensors of shapes
known from the schedule, and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from everfed.core.context import Context
from everfed.core.layout import Entry, Layout
from everfed.core.normalisation import normalised_apart
from everfed.core.optimizer import Optimizer, Scales
from everfed.core.part import Part, State, overrides
from everfed.core.replica import Cut, Gradients, Replica
from everfed.core.tree import Tree

Moments = dict[str, Tensor]


@dataclass
class Batch:
    """Samples a part brings into a step. joined: part of the task loss, forwarded together with the real batch;
    otherwise they have the outputs of a forward pass of their own, and the part's `loss` says what to do with them.
    ready: x are network inputs already (generated images, say), not samples in storage form. only_outputs: losses
    depend on this batch's forward pass through `outputs` alone, and no part differentiates them by itself."""

    x: Tensor
    y: Tensor
    joined: bool = False
    extra: dict[str, Tensor] = field(default_factory=dict)
    outputs: Tensor | None = None
    ready: bool = False
    only_outputs: bool = False


class Step:
    """The state of local training at one step. Built once per local training; `begin` moves it to the next step."""

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
        self.cuts: list[Cut] = []  # between losses and the outputs of separate batches
        self.handed: dict[str, Tensor] = {}  # what a part's substeps hand on to what follows in the same step
        self._substeps: Substeps | None = None
        self._scales: tuple[Optimizer, Scales | None] | None = None

    def scales(self, optimizer: Optimizer) -> Scales | None:
        """The optimiser's own rates and decays for every parameter, made in the first step."""
        # equal ones share the tensors: a captured step reads them where they lie
        if self._scales is None or self._scales[0] != optimizer:
            self._scales = (optimizer, optimizer.scales(self.layout, self.params.device))
        return self._scales[1]

    def substeps(self, parts: Sequence[Part]) -> Substeps:
        """Which parameters each substep and the step itself move; the same in all steps of a local training."""
        if self._substeps is None:
            self._substeps = Substeps.of(parts, self.layout)
        return self._substeps

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
        self.cuts = []
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
        return self.replica.flatten(self.gradients(loss))

    def gradients(self, loss: Tensor) -> list[Gradients]:
        """The same by parameters, one tuple for each backward pass."""
        return self.replica.gradients(loss, self.cuts)

    def task_gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """(P,) gradient of the task loss on other samples at the current parameters (A-GEM's second gradient)."""
        with torch.enable_grad():
            return self.grad(self.task_loss(self.forward(x), y))


def train_step(
    step: Step, parts: Sequence[Part], optimizer: Optimizer, moments: dict[str, Tensor], rate: Tensor
) -> Tensor:
    """Forward, loss terms, backward, gradient rules, optimiser, the parts' own updates; substeps before and after.
    Returns the loss of the step itself, detached."""
    substeps = step.substeps(parts)
    for move in substeps.before:
        _substep(step, move, optimizer, moments, rate)
    for part in parts:
        step.batches.update(part.batches(step))
    _forward(step, parts)
    loss = _objective(step, parts)
    for part in parts:
        term = part.loss(step)
        loss = loss if term is None else loss + term
    gradients = step.gradients(loss)
    with torch.no_grad():
        _descend(step, parts, gradients, optimizer, moments, rate)
    for move in substeps.after:
        _substep(step, move, optimizer, moments, rate)
    return loss.detach()


def _descend(
    step: Step, parts: Sequence[Part], gradients: list[Gradients], optimizer: Optimizer, moments: Moments, rate: Tensor
) -> None:
    """Gradient rules, optimiser, the parts' own updates."""
    rules = [part for part in parts if overrides(part, "gradient")]
    plain = _plain_sgd(step, parts, rules, optimizer)
    if plain:
        conflict = next((part.conflicts_with(step) for part in rules if isinstance(part, RemovesConflict)), None)
        how = (rate, optimizer.weight_decay, optimizer.momentum, moments.get("momentum"))
        step.replica.descend(gradients, *how, conflict)
    else:
        main, scales = step.substeps(parts).main, step.scales(optimizer)
        gradient = step.replica.flatten(gradients)
        for part in rules:
            gradient = part.gradient(step, gradient)
        own = None if scales is None else scales.within(main)
        optimizer.apply(step.params[main], gradient[main], moments, rate, own)
    before = step.params._version
    for part in parts:
        part.after(step)
    if not plain or step.params._version != before:  # a part changed the parameters
        step.replica.refresh()


@runtime_checkable
class RemovesConflict(Protocol):
    """A part whose `gradient` does this and nothing else: g - <g, r> / |r|^2 r where <g, r> < 0, for a reference r. On
    a GPU a kernel does it together with the step of SGD."""

    def conflicts_with(self, step: Step) -> tuple[Tensor, Tensor] | None:
        """(r, |r|^2): (P,) float32 and 0-d, infinite where nothing is to be removed. None: no reference."""


def _only_removes_conflict(part: Part) -> bool:
    """Does `conflicts_with` say all that `gradient` does? Not in a subclass that changes `gradient` alone."""
    owners = {hook: owner for owner in reversed(type(part).__mro__) for hook in vars(owner)}
    return isinstance(part, RemovesConflict) and issubclass(owners["conflicts_with"], owners["gradient"])


def _plain_sgd(step: Step, parts: Sequence[Part], rules: Sequence[Part], optimizer: Optimizer) -> bool:
    """Is there nothing between the gradients and SGD's update but one projection, and a kernel for all of it?

    rules: the parts that change the gradient."""
    return (
        step.replica.can_descend
        and optimizer.kind == "sgd"
        and not (optimizer.clip or optimizer.groups)
        and not any(isinstance(part, HasSubsteps) for part in parts)
        and len(rules) <= 1
        and all(_only_removes_conflict(part) for part in rules)
    )


def _substep(step: Step, move: Move, optimizer: Optimizer, moments: dict[str, Tensor], rate: Tensor) -> None:
    gradient = step.replica.gradient(move.substep.loss(step), move.span)
    with torch.no_grad():
        move.apply(step.params, gradient, moments, optimizer, rate, step.scales(optimizer))
        step.replica.refresh()


def _forward(step: Step, parts: Sequence[Part]) -> None:
    """One forward for the real batch and the joined ones together, one for each separate batch.

    A network that treats every sample by itself gives separate batches the same outputs in one forward with the rest,
    so one is enough; as it is for a network whose BatchNorm layers can keep them apart.
    """
    joined = [batch for batch in step.batches.values() if batch.joined]
    apart = [batch for batch in step.batches.values() if not batch.joined]
    own_forward = any(overrides(part, "forward") for part in parts)
    one_pass = not step.replica.mixes_samples or (step.replica.normalises_apart and not own_forward)
    together = [*joined, *apart] if one_pass else joined
    step.all_y = step.y
    if together:
        counted = len(step.x) + sum(len(batch.x) for batch in joined)
        mixed = apart and one_pass and step.replica.mixes_samples
        with normalised_apart([counted, *(len(batch.x) for batch in apart)]) if mixed else nullcontext():
            outputs = _together(step, together)
        step.outputs, *rest = outputs.split([len(step.x), *(len(batch.x) for batch in together)])
        for batch, own in zip(together, rest, strict=True):
            batch.outputs = own
        step.all_outputs = outputs[:counted] if joined else step.outputs
        step.all_y = torch.cat([step.y, *(batch.y for batch in joined)]) if joined else step.y
    else:
        step.outputs = step.all_outputs = step.forward(step.x)
    for batch in () if one_pass else apart:
        batch.outputs = step.forward_inputs(batch.x) if batch.ready else step.forward(batch.x)
        # a part with a forward pass of its own may keep features of it, and have a loss of them
        if batch.only_outputs and batch.outputs.requires_grad and not own_forward:
            step.cuts.append(Cut.at(batch.outputs))
            batch.outputs = step.cuts[-1].leaf


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


# substeps -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Substep:
    """A step with a loss, parameters and an optimiser of its own, inside one training step, so that a captured step
    holds it too. Its moments travel with those of the run's optimiser, under "part/substep/...".

    parameters: which ones it moves, by name; they must lie together in the vector. loss: of the step as it is then.
    optimizer: its own, or None for the run's, with the round's rate. alone: nothing else moves these parameters, not
    even the training step itself. after: it comes after the training step; otherwise before."""

    name: str
    parameters: Callable[[str], bool]
    loss: Callable[[Step], Tensor]
    optimizer: Optimizer | None = None
    alone: bool = False
    after: bool = False


@runtime_checkable
class HasSubsteps(Protocol):
    """A part that takes steps of its own around every training step."""

    def substeps(self, layout: Layout) -> tuple[Substep, ...]:
        """The substeps, in order."""


@dataclass(frozen=True)
class Move:
    """A substep of a part, and where in the vector its parameters lie."""

    part: Part
    substep: Substep
    span: slice

    def moments(self, all_moments: Moments) -> Moments:
        """Its own of them, under plain names."""
        prefix = self._prefix
        return {name.removeprefix(prefix): value for name, value in all_moments.items() if name.startswith(prefix)}

    def first_moments(self, optimizer: Optimizer, params: Tensor) -> Moments:
        fresh = (self.substep.optimizer or optimizer).init(params[self.span])
        return {self._prefix + name: value for name, value in fresh.items()}

    def apply(
        self,
        params: Tensor,
        gradient: Tensor,
        moments: Moments,
        optimizer: Optimizer,
        rate: Tensor,
        scales: Scales | None = None,
    ) -> None:
        """Move the parameters by the gradient of this substep's loss, (span,). scales: of the run's optimiser."""
        own = self.substep.optimizer
        if own is not None:
            own.apply(params[self.span], gradient, self.moments(moments), torch.full_like(rate, own.lr))
            return
        some = None if scales is None else scales.within(self.span)
        optimizer.apply(params[self.span], gradient, self.moments(moments), rate, some)

    @property
    def _prefix(self) -> str:
        return f"{self.part.name}/{self.substep.name}/"


@dataclass(frozen=True)
class Substeps:
    """All substeps of a training step. main: the parameters that the step itself moves."""

    main: slice
    before: tuple[Move, ...] = ()
    after: tuple[Move, ...] = ()

    @staticmethod
    def of(parts: Sequence[Part], layout: Layout) -> Substeps:
        declared = [(p, s) for p in parts if isinstance(p, HasSubsteps) for s in p.substeps(layout)]
        moves = [Move(p, s, _parameters_span(layout, s.parameters, p, s.name)) for p, s in declared]
        if not moves:
            return Substeps(slice(0, layout.size))
        alone = [move.substep.parameters for move in moves if move.substep.alone]
        main = _span_of([e for e in layout.params if not any(owns(e.name) for owns in alone)], "the training step")
        before, after = ([m for m in moves if m.substep.after is late] for late in (False, True))
        return Substeps(main, tuple(before), tuple(after))

    def first_moments(self, optimizer: Optimizer, params: Tensor) -> Moments:
        """Fresh moments of the run's optimiser and of all substeps."""
        moments = optimizer.init(params[self.main])
        for move in (*self.before, *self.after):
            moments |= move.first_moments(optimizer, params)
        return moments


def _parameters_span(layout: Layout, owns: Callable[[str], bool], part: Part, name: str) -> slice:
    return _span_of([entry for entry in layout.params if owns(entry.name)], f"substep {name!r} of part {part.name!r}")


def _span_of(entries: Iterable[Entry], whose: str) -> slice:
    """Where entries that lie together lie in the vector."""
    listed = list(entries)
    if not listed:
        raise ValueError(f"{whose} moves no parameter of this model")
    span = slice(listed[0].start, listed[-1].start + listed[-1].size)
    if sum(entry.size for entry in listed) != span.stop - span.start:
        raise ValueError(f"the parameters that {whose} moves do not lie together in the model's vector")
    return span
