"""Prompts of a frozen Vision Transformer, averaged: L2P, DualPrompt, CODA-Prompt, Fed-CPrompt and HGP's own prompt as
federated methods.

Trained and averaged are the prompts and keys of the current task, and the head's rows of its classes; those of earlier
tasks stay as they are. L2P has one pool for all tasks and needs no boundaries.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from everfed.core import random
from everfed.core.legacy import (
    BEGIN,
    MODEL,
    AddsParameters,
    Batch,
    Cohort,
    CompositionError,
    Context,
    Layout,
    Model,
    Optimizer,
    Part,
    Phase,
    Position,
    Server,
    Slots,
    State,
    Step,
    refuse_personal,
)
from everfed.core.pieces import Spans
from everfed.methods.common.checks import at_least
from everfed.methods.common.features import keep_features, kept_features
from everfed.methods.common.teacher import frozen_pass, refuse_changed_forward
from everfed.methods.pretrained.lora import at_task, row_of
from everfed.methods.pretrained.piecewise import Piecewise, head_pieces, of_task, task_of
from everfed.models import lora
from everfed.models.prompts import CLOCK, CodaPrompts, DualPrompts, PoolPrompts, SharedPrompts, TaskPrompts
from everfed.models.vit import Prompts, ViT

PREFIX = "prompts."  # what the names of all prompt parameters begin with


def adopt(part: Part, module: ViT, prompts: Prompts) -> None:
    """Freeze the network but for its head, and give it prompts. CompositionError where it has other adapters, which
    would be frozen, too."""
    if module.prompts is not None or lora.layers(module):
        there = "prompts of another part" if module.prompts is not None else "LoRA layers (model.lora)"
        raise CompositionError(f"part {part.name!r} freezes all but its prompts and the head, but there are {there}")
    module.requires_grad_(False)
    module.head.requires_grad_(True)
    module.prompts = prompts


def require_vit(part: Part, module: nn.Module) -> ViT:
    """The network itself; CompositionError for one that is not everfed's own Vision Transformer."""
    if not isinstance(module, ViT):
        raise CompositionError(
            f"part {part.name!r} changes the attention of everfed's own Vision Transformer; set "
            f"model.kind = 'vit' (it reads weights of timm and Hugging Face); got a {type(module).__name__}"
        )
    return module


def existing(part: Part, vit: ViT, option: str) -> list[int]:
    """The blocks that an option names; CompositionError for those that the network has not."""
    depth, wanted = len(vit.blocks), getattr(part, option)
    if any(block not in range(depth) for block in wanted):
        raise CompositionError(f"method.{part.name}.{option} must be below the network's depth, {depth}; got {wanted}")
    return list(wanted)


def pull_term(step: Step, weight: float) -> Tensor | None:
    """weight times how far the keys in use are from the queries, in the step's forward pass."""
    prompts = cast(TaskPrompts, step.replica.module.prompts)
    return weight * prompts.pull if weight and prompts.pull is not None else None


@dataclass(frozen=True)
class TaskPrompted(AddsParameters, Piecewise):
    """Prompts of its own for every task."""

    def adapt(self, module: nn.Module, server: Server) -> None:
        ctx = server.context
        vit = require_vit(self, module)
        adopt(self, vit, self.build(vit, ctx))

    @abstractmethod
    def build(self, vit: ViT, ctx: Context) -> Prompts:
        """The prompts of all tasks, the same in every process."""

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("prompts", cohort=Cohort.SERVER, when=BEGIN, position=Position.BEFORE, update_model=self._next),)

    def _next(self, server: State, model: Model, ctx: Context) -> tuple[Slots, Model]:
        model = at_task(model, ctx, CLOCK)
        params = model["params"].clone()
        self.begin(ctx.facts.layout.named(params), task_of(ctx))
        return None, {**model, "params": params}

    def begin(self, named: Mapping[str, Tensor], task: int) -> None:
        """Give the prompts of a task that begins their first values, in place; `named`: all tensors by name."""

    def pieces(self, layout: Layout, labels: Sequence[tuple[int, ...]]) -> Mapping[str, Spans]:
        found: dict[str, list[slice]] = {}
        for entry in layout.params:
            if not entry.name.startswith(PREFIX) or self.for_all_tasks(entry.name):
                continue
            kind = "task " if entry.name == CLOCK else "prompt/"
            for row in range(entry.shape[0]):
                found.setdefault(f"{kind}{row}", []).append(row_of(entry, row))
        return {**{name: tuple(spans) for name, spans in found.items()}, **head_pieces(layout, labels)}

    def for_all_tasks(self, parameter: str) -> bool:
        """Is it trained in every task?"""
        return False

    def trained(self, piece: str, server: State, ctx: Context) -> bool:
        return of_task(piece, task_of(ctx))


@dataclass(frozen=True)
class PromptCODA(TaskPrompted):
    """components: of every task and block. length: of a prompt, half keys and half values. blocks: that get one."""

    components: int = 10
    length: int = 8
    blocks: tuple[int, ...] = (0, 1, 2, 3, 4)

    name = "prompt-coda"
    softmax: ClassVar[bool] = False  # over the entries of a component's attention

    def __post_init__(self) -> None:
        at_least(self, 1, "components")
        if self.length < 2 or self.length % 2:
            raise ValueError(f"length must be even and at least 2; got {self.length}")
        object.__setattr__(self, "blocks", tuple(self.blocks))

    def build(self, vit: ViT, ctx: Context) -> Prompts:
        tasks, pool = ctx.facts.tasks, ctx.facts.tasks * self.components
        if pool > vit.width:
            raise CompositionError(
                f"method.{self.name}.components must be at most {vit.width // tasks}: the components of {tasks} tasks "
                f"are orthogonal vectors of {vit.width} numbers; got {self.components}"
            )
        blocks, key = existing(self, vit, "blocks"), random.key(ctx.seed, self.name)
        return CodaPrompts(blocks, tasks, self.components, self.length, vit.width, key, self.softmax)

    def begin(self, named: Mapping[str, Tensor], task: int) -> None:
        for name, tensor in named.items():
            if name.startswith(PREFIX) and name != CLOCK:
                rows = tensor.flatten(2) if tensor.dim() > 3 else tensor
                fresh = orthonormal(rows[task], rows[:task].flatten(0, 1))
                tensor[task] = fresh.reshape(tensor[task].shape)


def orthonormal(rows: Tensor, earlier: Tensor) -> Tensor:
    """Rows (m, n) made orthogonal to the span of `earlier` (k, n) and to each other, of unit length. Earlier rows need
    not be orthogonal: trained ones are not."""
    basis = torch.linalg.qr(torch.cat([earlier, rows]).double().T).Q  # signs are arbitrary
    found = basis[:, len(earlier) :].T
    signs = torch.where((found * rows).sum(1, keepdim=True) < 0, -1.0, 1.0)
    return (signs * found).to(rows.dtype)


@dataclass(frozen=True)
class FedCPrompt(PromptCODA):
    """Fed-CPrompt (Bagwe et al., 2023): CODA-Prompt with a contrastive term on the features z of a minibatch,

        max(0, sum(near |z - z_g|^2 - far |z - z_p|^2) + 1),        in the first task near sum |z - z_g|^2

    z_g: under the model that was received in this round, z_p: under the global model at the end of the last task.
    near, far: weights. Other options as those of CODA-Prompt."""

    near: float = 1000.0
    far: float = 10.0

    name = "fed-cprompt"
    softmax = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "near", "far")

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        refuse_personal(self, parts)
        refuse_changed_forward(self, parts)
        return ()

    def broadcast(self, server: State, ctx: Context) -> dict[str, Any]:
        return {"contrast": 1} if ctx.current_task else {}

    def batches(self, step: Step) -> dict[str, Batch]:
        keep_features(step, self.name)
        return {}

    def loss(self, step: Step) -> Tensor:
        received, inputs = step.message[MODEL], step.inputs(step.x)
        models = [received, *([before_task(received, step.layout)] if self.name in step.message else [])]
        frozen = [frozen_pass(step, model, inputs)[1] for model in models]
        return contrast(kept_features(step, self.name), *frozen, near=self.near, far=self.far)


def contrast(z: Tensor, received: Tensor, previous: Tensor | None = None, *, near: float, far: float) -> Tensor:
    """Fed-CPrompt's term for features (n, F); `previous` is None in the first task."""
    drift = near * (z - received).square().sum()
    if previous is None:
        return drift
    return (drift - far * (z - previous).square().sum() + 1.0).clamp(min=0.0)


def before_task(model: Model, layout: Layout) -> Model:
    """A model whose features are those that the global model had at the end of the last task: components of earlier
    tasks never change, and those of the current one are not used."""
    params = model["params"].clone()
    layout.param(CLOCK).view(params).sub_(1.0)
    return {**model, "params": params}


@dataclass(frozen=True)
class PromptDual(TaskPrompted):
    """length: keys, and as many values, of a prompt. general, expert: the blocks with prompts for all tasks, and with
    prompts for each. weight: of the term that pulls the task's key towards its queries."""

    length: int = 5
    general: tuple[int, ...] = (0, 1)
    expert: tuple[int, ...] = (2, 3, 4)
    weight: float = 1.0

    name = "prompt-dual"

    def __post_init__(self) -> None:
        at_least(self, 1, "length")
        at_least(self, 0, "weight")
        for option in ("general", "expert"):
            object.__setattr__(self, option, tuple(getattr(self, option)))
        if set(self.general) & set(self.expert):
            raise ValueError(f"general and expert must be different blocks; got {self.general} and {self.expert}")

    def build(self, vit: ViT, ctx: Context) -> Prompts:
        general, expert = (existing(self, vit, option) for option in ("general", "expert"))
        key = random.key(ctx.seed, self.name)
        return DualPrompts(general, expert, ctx.facts.tasks, self.length, vit.width, key)

    def for_all_tasks(self, parameter: str) -> bool:
        return parameter.startswith(f"{PREFIX}general.")

    def begin(self, named: Mapping[str, Tensor], task: int) -> None:
        """A new expert and its key start as copies of the last ones."""
        for name, tensor in named.items():
            if task and name.startswith(PREFIX) and name != CLOCK and not self.for_all_tasks(name):
                tensor[task] = tensor[task - 1]

    def loss(self, step: Step) -> Tensor | None:
        return pull_term(step, self.weight)


@dataclass(frozen=True)
class PromptShared(TaskPrompted):
    """The prompt of HGP: one for all samples and tasks. length: keys, and as many values, in every one of `blocks`."""

    length: int = 100
    blocks: tuple[int, ...] = (0, 1, 2, 3, 4)

    name = "prompt-shared"

    def __post_init__(self) -> None:
        at_least(self, 1, "length")
        object.__setattr__(self, "blocks", tuple(self.blocks))

    def build(self, vit: ViT, ctx: Context) -> Prompts:
        return SharedPrompts(existing(self, vit, "blocks"), self.length, vit.width, random.key(ctx.seed, self.name))

    def phases(self) -> tuple[Phase, ...]:
        """Nothing begins with a task."""
        return ()

    def for_all_tasks(self, parameter: str) -> bool:
        return True


@dataclass(frozen=True)
class PromptL2P(AddsParameters, Part):
    """pool: prompts with a key each. length: tokens of a prompt. top: prompts that a sample uses. weight: of the term
    that pulls chosen keys towards the queries."""

    pool: int = 10
    length: int = 5
    top: int = 5
    weight: float = 0.1

    name = "prompt-l2p"

    def __post_init__(self) -> None:
        at_least(self, 1, "pool", "length", "top")
        at_least(self, 0, "weight")
        if self.top > self.pool:
            raise ValueError(f"top must be at most pool; got {self.top} of {self.pool}")

    def adapt(self, module: nn.Module, server: Server) -> None:
        ctx = server.context
        vit = require_vit(self, module)
        prompts = PoolPrompts(self.pool, self.length, self.top, vit.width, random.key(ctx.seed, self.name))
        prompts.task.requires_grad_(False)
        adopt(self, vit, prompts)

    def loss(self, step: Step) -> Tensor | None:
        return pull_term(step, self.weight)
