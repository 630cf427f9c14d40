"""A network whose parameters live in one vector, ready to be loaded with any client's weights; and its gradient.

A method's auxiliary networks beside the shared model (a generator, a discriminator, a flow) are here, too. In states,
messages and checkpoints an auxiliary network is a `Model`, the vectors params, stats and counters, like the shared one.
The module that computes with them is built from a blueprint, once per trainer (`Trainer.auxiliary`), and holds no state
that matters: to use a frozen network call `frozen_forward`, to train one load its replica, and read the vectors back.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from everfed.core.layout import Entry, Layout
from everfed.core.message import Model
from everfed.core.random import adopt_dropout
from everfed.kernels import load_kernels

sgd_kernel = load_kernels("everfed.kernels.sgd")
_LOW = (_ConvNd, nn.Linear)  # layers that run in bfloat16: matrix units do their work
_TINY = 1e-30  # |reference|^2 at or below this counts as zero

Gradients = tuple[Tensor, ...]  # one for each trainable parameter
Conflict = tuple[Tensor, Tensor]  # a reference (P,), and |reference|^2: 0-d, infinite where nothing is to be removed


@dataclass(frozen=True)
class GraphCut:
    """Where a graph of autograd is cut: what comes after is computed from `leaf`, a copy of `outputs` without history.
    The two sides are then differentiated one after the other, instead of adding up their gradients by one small
    operation for each parameter."""

    outputs: Tensor
    leaf: Tensor

    @staticmethod
    def at(outputs: Tensor) -> GraphCut:
        return GraphCut(outputs, outputs.detach().requires_grad_())


class Replica:
    """Module, its vectors and its dropout generator on one device. Reused for client after client.

    In bf16 the weights of convolutions and linear layers are bfloat16 copies of the float32 vector, made for all of
    them at once (`refresh`) instead of one by one in every forward pass; the vector stays the truth.

    mixes_samples: does a sample's output depend on the others in its forward pass, as with BatchNorm? A layer of your
    own that does so says it with an attribute of this name. normalises_apart: may several minibatches go through the
    network in one forward pass all the same, because its BatchNorm layers keep them apart (`normalised_apart`)? On
    a GPU only: on a CPU it is no faster, and would change the last bits of results.
    """

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device, precision: str = "fp32") -> None:
        self.device = device
        self.generator = torch.Generator(device)
        self.layout = layout
        vectors = layout.read(module)
        self.module = module.to(device)
        self.params, self.stats, self.counters = (vectors[k].to(device) for k in ("params", "stats", "counters"))
        layout.bind(self.module, self.params, self.stats, self.counters)
        adopt_dropout(self.module, self.generator)
        named = dict(self.module.named_parameters())
        self.trainable: list[Tensor] = [named[entry.name] for entry in layout.params]
        mixing_layers = any(getattr(m, "mixes_samples", False) for m in module.modules())
        self.mixes_samples = mixing_layers or any(isinstance(m, _BatchNorm) for m in module.modules())
        self.normalises_apart = (
            device.type == "cuda" and getattr(module, "normalises_apart", False) and not mixing_layers
        )
        self.low: Tensor | None = None
        self._lowered: list[Entry] = []  # the parameters that are views of it
        self._update: Any = None  # everfed.kernels.sgd.Update
        if precision == "bf16":
            self._lower()

    def _lower(self) -> None:
        low = torch.empty_like(self.params, dtype=torch.bfloat16)
        owners = [m for m in self.module.modules() if isinstance(m, _LOW)]
        lowered = {id(p) for owner in owners for p in owner.parameters(recurse=False)}
        for entry, parameter in zip(self.layout.params, self.trainable, strict=True):
            if id(parameter) in lowered:
                parameter.data = entry.view(low)
                self._lowered.append(entry)
        for parameter in (p for owner in owners for p in owner.parameters(recurse=False) if not p.requires_grad):
            parameter.data = parameter.data.to(torch.bfloat16)  # frozen: cast once instead of in every forward pass
        self.low = low
        self.refresh()

    def load(self, model: Model) -> None:
        """Copy a model's vectors in; the module sees them at once."""
        self.params.copy_(model["params"], non_blocking=True)
        self.stats.copy_(model["stats"], non_blocking=True)
        self.counters.copy_(model["counters"], non_blocking=True)
        self.refresh()

    def refresh(self) -> None:
        """Bring the module up to date after the vector changed."""
        if self.low is not None:
            self.low.copy_(self.params)

    def tensors(self, model: Model) -> dict[str, Tensor]:
        """Views of another model's vectors under the names that the module has for them; those that run in bfloat16
        are views of one copy."""
        found = tensors(self.layout, model)
        if self.low is not None:
            low = model["params"].to(torch.bfloat16)
            found |= {entry.name: entry.view(low) for entry in self._lowered}
        return found

    def vectors(self) -> list[Tensor]:
        """Every vector that training changes in place."""
        return [self.params, self.stats, self.counters, *([] if self.low is None else [self.low])]

    def gradient(self, loss: Tensor, span: slice | None = None) -> Tensor:
        """(P,) float32 gradient of `loss`, or the slice `span` of it; zeros where it does not depend on a parameter."""
        if span is None:
            return self.flatten(self.gradients(loss))
        chosen = {entry.name for entry in self.layout.within(span)}
        some = [p for e, p in zip(self.layout.params, self.trainable, strict=True) if e.name in chosen]
        return self.layout.flatten_gradient(torch.autograd.grad(loss, some, materialize_grads=True), span)

    def gradients(self, loss: Tensor, cuts: Sequence[GraphCut] = ()) -> list[Gradients]:
        """The gradients of `loss` by all trainable parameters, of every backward pass: their sum is the gradient. There
        is one pass for the loss and one for each cut that it depends on."""
        leaves = [*self.trainable, *(cut.leaf for cut in cuts)]
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        own, rest = found[: len(self.trainable)], found[len(self.trainable) :]
        passes = [tuple(torch.zeros_like(p) if g is None else g for p, g in zip(self.trainable, own, strict=True))]
        for cut, gradient in zip(cuts, rest, strict=True):
            if gradient is not None:
                passes.insert(0, torch.autograd.grad(cut.outputs, self.trainable, gradient, materialize_grads=True))
        return passes  # the last forward pass first, the order in which autograd would add them up

    def flatten(self, passes: Sequence[Gradients]) -> Tensor:
        """(P,) the sum over all backward passes, float32."""
        return self.layout.flatten_gradient(_sum(passes))

    @property
    def can_descend(self) -> bool:
        """Is there a kernel for `descend`?"""
        return (
            sgd_kernel is not None
            and self.params.is_cuda
            and 0 < len(self.trainable) <= sgd_kernel.MOST
            and self.layout.size < 2**31  # places in the vector are 32-bit numbers
        )

    def descend(
        self,
        passes: Sequence[Gradients],
        rate: Tensor,
        decay: float,
        momentum: float,
        velocity: Tensor | None,
        conflict: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """A step of SGD down the sum of the gradients, of which what opposes a reference is removed first (conflict:
        the reference and its squared norm); the module is up to date afterwards."""
        if self._update is None:
            self._update = sgd_kernel.Update(self.layout, self.device)
        if conflict is not None:
            if conflict[0].shape != self.params.shape:
                raise ValueError(f"a reference of shape {tuple(conflict[0].shape)} for {self.layout.size} parameters")
            conflict = (conflict[0].to(torch.float32).contiguous(), conflict[1])
        if len(passes) > 2 or len(passes) * len(self.trainable) > sgd_kernel.MOST:
            passes = [_sum(passes)]
        self._update(passes, self.params, self.low, velocity, rate, decay, momentum, conflict)

    def model(self) -> Model:
        """A copy of the vectors."""
        return {"params": self.params.clone(), "stats": self.stats.clone(), "counters": self.counters.clone()}


def _sum(passes: Sequence[Gradients]) -> Gradients:
    total = passes[0]
    for gradients in passes[1:]:
        total = tuple(torch._foreach_add(total, gradients))
    return total


# the gradient of a step ----------------------------------------------------------------------------------------------
class Gradient:
    """(P,) the sum of the gradients of all backward passes, after the rules so far. Immutable."""

    def __init__(self, replica: Replica, passes: Sequence[Gradients], conflict: Conflict | None = None) -> None:
        self._replica, self.passes, self.conflict = replica, passes, conflict
        self._vector: Tensor | None = None

    @staticmethod
    def of(replica: Replica, vector: Tensor) -> Gradient:
        """The gradient that a rule made."""
        made = Gradient(replica, ())
        made._vector = vector
        return made

    @property
    def lazy(self) -> bool:
        """Is it still the passes' own sum, but for one conflict?"""
        return self._vector is None

    @property
    def vector(self) -> Tensor:
        """(P,) float32."""
        if self._vector is None:
            vector = self._replica.flatten(self.passes)
            self._vector = vector if self.conflict is None else project(vector, *self.conflict)
        return self._vector

    def without_conflict(self, reference: Tensor | None, norm: Tensor | None = None) -> Gradient:
        """g - <g, r> / |r|^2 r where <g, r> < 0; unchanged elsewhere, and without a reference.

        norm: `squared_norm(reference)`, when it is known already."""
        if reference is None:
            return self
        norm = squared_norm(reference) if norm is None else norm
        if self.lazy and self.conflict is None:
            return Gradient(self._replica, self.passes, (reference, norm))
        return Gradient.of(self._replica, project(self.vector, reference, norm))


def project(gradient: Tensor, reference: Tensor | None, norm: Tensor | None = None) -> Tensor:
    """`gradient` when <gradient, reference> >= 0 or there is no reference, else its part orthogonal to `reference`.

    Both are (P,) gradients, ascent directions of a loss. Without a conflict the coefficient is zero: arithmetic in
    place of a branch, which would wait for the device. Scalar products of long vectors are summed in float64.
    """
    if reference is None:
        return gradient
    q = squared_norm(reference) if norm is None else norm
    coefficient = dot(gradient, reference).clamp(max=0.0) / q
    # g - (s/q) ref; subtracting an exact zero leaves g as it was, bit for bit
    return torch.addcmul(gradient, reference, coefficient.to(gradient.dtype), value=-1.0)


def squared_norm(reference: Tensor) -> Tensor:
    """|reference|^2 as a divisor: infinite for a zero reference, which then removes nothing."""
    q = dot(reference, reference)
    return torch.where(q > _TINY, q, torch.inf)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Scalar product (0-d); in float64 for long vectors."""
    return (a * b).sum(dtype=torch.float64) if a.numel() > 1_000_000 else torch.dot(a, b)


# minibatches in one forward pass, each with BatchNorm statistics of its own ------------------------------------------
# Convolutions treat every sample by itself, and on a GPU one call for two minibatches takes less time than two calls.
# BatchNorm would mix them: it has to be given their sizes. `core/step.py` sets them around a forward pass, and the
# BatchNorm layers of networks that say so (an attribute `normalises_apart`) read them in `models/fused.py`.
_sizes: ContextVar[tuple[int, ...] | None] = ContextVar("sizes", default=None)


@contextmanager
def normalised_apart(sizes: Sequence[int]) -> Iterator[None]:
    """Inside, the first sizes[0] samples of a forward pass are one minibatch, the next sizes[1] another, and so on."""
    token = _sizes.set(tuple(sizes))
    try:
        yield
    finally:
        _sizes.reset(token)


def minibatch_sizes(x: Tensor) -> tuple[int, ...]:
    """The sizes of the minibatches in an activation (n, ...). Raises ValueError where they do not add up to n."""
    sizes = _sizes.get()
    if sizes is None:
        return (len(x),)
    if sum(sizes) != len(x):
        raise ValueError(f"minibatches of {', '.join(map(str, sizes))} samples, but an activation of {len(x)}")
    return sizes


# auxiliary networks ---------------------------------------------------------------------------------------------------
class Blueprint(Hashable, Protocol):
    """What a network is built from; equal blueprints build networks of the same layout."""

    def build(self) -> nn.Module:
        """A network with weights drawn from torch's generator, as layers usually do."""


def initial_weights(blueprint: Blueprint, seed: int) -> Model:
    """The network's first weights, on the host; the same seed gives the same on every machine."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = blueprint.build()
    return Layout.of(module).read(module)


def tensors(layout: Layout, model: Model) -> dict[str, Tensor]:
    """Views of a model's vectors under the names that its module has for them."""
    named = (("params", layout.params), ("stats", layout.stats), ("counters", layout.counters))
    return {entry.name: entry.view(model[vector]) for vector, entries in named for entry in entries}


def frozen_forward(replica: Replica, model: Model, *inputs: Tensor) -> Any:
    """What the replica's module gives with `model`'s tensors in place of its own: eval mode, no gradient, neither the
    replica nor `model` is changed. May be part of a captured step: it reads the vectors where they lie."""
    with torch.no_grad(), in_eval_mode(replica.module):
        return functional_call(replica.module, replica.tensors(model), inputs)


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """The module in eval mode, and afterwards in the mode it was in."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
