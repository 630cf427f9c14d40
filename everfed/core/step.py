"""One training step, as the parts see it and as every engine runs it; and the substeps that parts take around it: a
generator after its discriminator, a flow before a classifier.

`train_step` is the only place where losses are added, gradients taken and rules applied. It uses tensors of shapes
known from the plans, and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from everfed.core.context import Context, Facts
from everfed.core.layout import Entry, Layout
from everfed.core.message import MODEL, Model, State
from everfed.core.optimizer import Optimizer, Scales
from everfed.core.part import Part, Seen, changing, check_step, overrides, seen
from everfed.core.replica import Gradient, Gradients, GraphCut, Replica, normalised_apart
from everfed.core.tree import Tree
from everfed.errors import SettingError

if TYPE_CHECKING:
    from everfed.core.trainer import Trainer

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


# what a step looks up of its parts
_HOOKS = ("batches", "forward", "objective", "loss", "gradient", "after")


@dataclass(eq=False)
class Training:
    """A local training at one step. Built once per local training; `begin` moves it to the next step. Parts see it
    through a `Step` each. received: (P,) the model that the server sent last."""

    context: Context
    replica: Replica
    parts: Sequence[Part]
    optimizer: Optimizer
    moments: Moments
    forward: Callable[[Tensor], Tensor]
    task_loss: Callable[[Tensor, Tensor], Tensor]
    state: State
    message: Mapping[str, Tree]
    received: Tensor

    def __post_init__(self) -> None:
        layout = self.replica.layout
        self.defining = {hook: [part for part in self.parts if overrides(part, hook)] for hook in _HOOKS}
        self.substeps = Substeps.of(self.parts, layout)
        self.scales = self.optimizer.scales(layout, self.replica.params.device)
        self.checked = False  # did the first step keep to what steps may change?
        self._steps: dict[str, Step] = {}
        self.outputs = self.all_outputs = self.all_y = self.received  # of the minibatch; with the joined batches
        self.begin(self.received, self.received, {})

    def of(self, part: str) -> Step:
        """The step as this part sees it."""
        if part not in self._steps:
            self._steps[part] = Step(part, self)
        return self._steps[part]

    def begin(self, x: Tensor, y: Tensor, rows: dict[str, dict[str, Tensor]]) -> None:
        """Take the next minibatch and the parts' planned rows. cuts: between losses and outputs of separate batches."""
        self.x, self.y, self.rows = x, y, rows
        self.batches: dict[str, dict[str, Batch]] = {}
        self.handed: dict[str, dict[str, Tensor]] = {}
        self.cuts: list[GraphCut] = []

    def states(self) -> dict[str, Seen]:
        """The states of the parts, as they are before a step."""
        return {part.name: seen(self.of(part.name).state) for part in self.parts}

    def check(self, before: Mapping[str, Seen]) -> None:
        """Raises CompositionError for what a step did to a state that would be lost; looked at after the first."""
        allowed = changing(self.parts, self.state)
        for part in self.parts:
            check_step(part, before[part.name], self.of(part.name).state, allowed.get(part.name, {}))
        self.checked = True

    def inputs(self, x: Tensor) -> Tensor:
        """Samples in storage form as network inputs."""
        inputs: Tensor = self.context.train.stream.inputs(x)
        return inputs

    def forward_inputs(self, inputs: Tensor) -> Tensor:
        """Outputs for network inputs, as `forward` gives them for samples in storage form."""
        return self.context.train.forward_inputs(inputs, self.state, self.message)

    def gradients(self, loss: Tensor) -> list[Gradients]:
        """The gradients of `loss` by parameters, one tuple for each backward pass."""
        return self.replica.gradients(loss, self.cuts)


class Step:
    """A training step, as one part sees it.

    state, message: the part's own on the client; tensors of `state` that `after` changes are changed in place. rows:
    its planned rows, by table. batches: those that it brought. handed: what its substeps hand on within the step.
    x, y: the minibatch in storage form. outputs: of the minibatch; all_x, all_y, all_outputs: with the joined batches.
    """

    def __init__(self, part: str, training: Training) -> None:
        self.name, self.training = part, training
        self.state: Tree = training.state.get(part, {})
        self.message: Mapping[str, Any] = training.message.get(part, {})

    def of(self, part: str) -> Step:
        """The same step as another part sees it, to read."""
        return self.training.of(part)

    # the part's own ------------------------------------------------------------------------------------------------
    @property
    def rows(self) -> Mapping[str, Tensor]:
        return self.training.rows.get(self.name, {})

    @property
    def batches(self) -> dict[str, Batch]:
        return self.training.batches.get(self.name, {})

    @property
    def handed(self) -> dict[str, Tensor]:
        return self.training.handed.setdefault(self.name, {})

    # the minibatch -------------------------------------------------------------------------------------------------
    @property
    def x(self) -> Tensor:
        return self.training.x

    @property
    def y(self) -> Tensor:
        return self.training.y

    @property
    def all_x(self) -> Tensor:
        brought = (batch for own in self.training.batches.values() for batch in own.values())
        joined = [batch.x for batch in brought if batch.joined]
        return torch.cat([self.x, *joined]) if joined else self.x

    @property
    def outputs(self) -> Tensor:
        return self.training.outputs

    @property
    def all_outputs(self) -> Tensor:
        return self.training.all_outputs

    @property
    def all_y(self) -> Tensor:
        return self.training.all_y

    # the model -----------------------------------------------------------------------------------------------------
    @property
    def params(self) -> Tensor:
        """(P,) the live parameter vector; autograd does not see it, the module's parameters are views of it."""
        return self.training.replica.params

    @property
    def received(self) -> Tensor:
        """(P,) the parameters that the server sent last."""
        return self.training.received

    @property
    def received_model(self) -> Model:
        """The whole model that the server sent last, with what of it is the client's own: a teacher."""
        return {**self.training.message[MODEL], "params": self.received}

    @property
    def module(self) -> nn.Module:
        """The network in training."""
        return self.training.replica.module

    @property
    def replica(self) -> Replica:
        """The network, its vectors and its generator."""
        return self.training.replica

    @property
    def layout(self) -> Layout:
        return self.training.replica.layout

    @property
    def generator(self) -> torch.Generator:
        """For random numbers inside the step."""
        return self.training.replica.generator

    @property
    def facts(self) -> Facts:
        return self.training.context.facts

    @property
    def context(self) -> Context:
        return self.training.context

    @property
    def trainer(self) -> Trainer:
        return self.training.context.train

    # work ----------------------------------------------------------------------------------------------------------
    def inputs(self, x: Tensor) -> Tensor:
        """Samples in storage form as network inputs."""
        return self.training.inputs(x)

    def forward(self, x: Tensor) -> Tensor:
        """Network outputs for samples in storage form."""
        return self.training.forward(x)

    def forward_inputs(self, inputs: Tensor) -> Tensor:
        """Outputs for network inputs, as `forward` gives them for samples in storage form."""
        return self.training.forward_inputs(inputs)

    def task_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The stream's loss, on the logits that `train.logits` allows."""
        return self.training.task_loss(outputs, y)

    def grad(self, loss: Tensor) -> Tensor:
        """(P,) gradient of `loss` with respect to the trainable parameters; zeros where it does not depend on them."""
        return self.replica.flatten(self.training.gradients(loss))

    def task_gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """(P,) gradient of the task loss on other samples at the current parameters (A-GEM's second gradient)."""
        with torch.enable_grad():
            return self.grad(self.task_loss(self.forward(x), y))


def train_step(training: Training, rate: Tensor) -> Tensor:
    """Forward, loss terms, backward, gradient rules, optimiser, the parts' own updates; substeps before and after.
    Returns the loss of the step itself, detached."""
    before = None if training.checked else training.states()
    for move in training.substeps.before:
        _substep(training, move, rate)
    for part in training.defining["batches"]:
        training.batches[part.name] = part.batches(training.of(part.name))
    _forward(training)
    loss = _objective(training)
    for part in training.defining["loss"]:
        term = part.loss(training.of(part.name))
        loss = loss if term is None else loss + term
    passes = training.gradients(loss)
    with torch.no_grad():
        _descend(training, passes, rate)
    for move in training.substeps.after:
        _substep(training, move, rate)
    if before is not None:
        training.check(before)
    return loss.detach()


def _descend(training: Training, passes: Sequence[Gradients], rate: Tensor) -> None:
    """Gradient rules, optimiser, the parts' own updates."""
    replica, optimizer, moments = training.replica, training.optimizer, training.moments
    gradient = Gradient(replica, passes)
    for part in training.defining["gradient"]:
        changed = part.gradient(training.of(part.name), gradient)
        gradient = changed if isinstance(changed, Gradient) else Gradient.of(replica, _whole(changed, part, replica))
    kernel = gradient.lazy and _has_kernel(training)
    if kernel:
        velocity = moments.get("momentum")
        replica.descend(gradient.passes, rate, optimizer.weight_decay, optimizer.momentum, velocity, gradient.conflict)
    else:
        main = training.substeps.main
        own = None if training.scales is None else training.scales.within(main)
        optimizer.apply(replica.params[main], gradient.vector[main], moments, rate, own)
    before = replica.params._version
    for part in training.defining["after"]:
        part.after(training.of(part.name))
    if not kernel or replica.params._version != before:  # a part changed the parameters
        replica.refresh()


def _whole(changed: object, part: Part, replica: Replica) -> Tensor:
    """A gradient that a part returned as a vector, checked for its form."""
    if isinstance(changed, Tensor) and changed.shape == replica.params.shape:
        return changed
    found = f"a tensor of shape {tuple(changed.shape)}" if isinstance(changed, Tensor) else type(changed).__name__
    raise SettingError(
        f"part {part.name!r}: gradient() must return the gradient, or a vector of shape {tuple(replica.params.shape)} "
        f"made from gradient.vector, not {found}"
    )


def _has_kernel(training: Training) -> bool:
    """Is there one kernel for SGD's update and all that comes before it?"""
    optimizer = training.optimizer
    plain = optimizer.kind == "sgd" and not (optimizer.clip or optimizer.groups)
    return training.replica.can_descend and plain and not any(isinstance(part, HasSubsteps) for part in training.parts)


def _substep(training: Training, move: Move, rate: Tensor) -> None:
    replica = training.replica
    gradient = replica.gradient(move.substep.loss(training.of(move.part.name)), move.span)
    with torch.no_grad():
        move.apply(replica.params, gradient, training.moments, training.optimizer, rate, training.scales)
        replica.refresh()


def _forward(training: Training) -> None:
    """One forward for the real batch and the joined ones together, one for each separate batch.

    A network that treats every sample by itself gives separate batches the same outputs in one forward with the rest,
    so one is enough; as it is for a network whose BatchNorm layers can keep them apart.
    """
    replica = training.replica
    brought = [batch for batches in training.batches.values() for batch in batches.values()]
    joined = [batch for batch in brought if batch.joined]
    apart = [batch for batch in brought if not batch.joined]
    own_forward = bool(training.defining["forward"])
    one_pass = not replica.mixes_samples or (replica.normalises_apart and not own_forward)
    together = [*joined, *apart] if one_pass else joined
    training.all_y = training.y
    if together:
        counted = len(training.x) + sum(len(batch.x) for batch in joined)
        mixed = apart and one_pass and replica.mixes_samples
        with normalised_apart([counted, *(len(batch.x) for batch in apart)]) if mixed else nullcontext():
            outputs = _together(training, together)
        training.outputs, *rest = outputs.split([len(training.x), *(len(batch.x) for batch in together)])
        for batch, own in zip(together, rest, strict=True):
            batch.outputs = own
        training.all_outputs = outputs[:counted] if joined else training.outputs
        training.all_y = torch.cat([training.y, *(batch.y for batch in joined)]) if joined else training.y
    else:
        training.outputs = training.all_outputs = training.forward(training.x)
    for batch in () if one_pass else apart:
        batch.outputs = training.forward_inputs(batch.x) if batch.ready else training.forward(batch.x)
        # a part with a forward pass of its own may keep features of it, and have a loss of them
        if batch.only_outputs and batch.outputs.requires_grad and not own_forward:
            training.cuts.append(GraphCut.at(batch.outputs))
            batch.outputs = training.cuts[-1].leaf


def _together(step: Training, batches: Sequence[Batch]) -> Tensor:
    """The outputs of the real batch and the others, in one forward pass."""
    if not any(batch.ready for batch in batches):
        return step.forward(torch.cat([step.x, *(batch.x for batch in batches)]))
    ready = (batch.x if batch.ready else step.inputs(batch.x) for batch in batches)
    return step.forward_inputs(torch.cat([step.inputs(step.x), *ready]))


def _objective(training: Training) -> Tensor:
    for part in training.defining["objective"]:
        return part.objective(training.of(part.name))
    return training.task_loss(training.all_outputs, training.all_y)


# substeps -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Substep:
    """A step with a loss, parameters and an optimiser of its own, inside one training step, so that a captured step
    holds it too. Its moments travel with those of the run's optimiser, under "part/substep/...".

    parameters: which ones it moves, by name; they must lie together in the vector. loss: of the step as it is then, as
    its part sees it. optimizer: its own, or None for the run's, with the round's rate. alone: nothing else moves these
    parameters, not even the training step itself. after: it comes after the training step; otherwise before."""

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
