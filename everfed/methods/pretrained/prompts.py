"""Prompts of a frozen Vision Transformer, averaged: L2P, DualPrompt, CODA-Prompt, Fed-CPrompt and HGP's own prompt as
federated methods.

Trained and averaged are the prompts and keys of the current task, and the head's rows of its classes; those of earlier
tasks stay as they are. L2P has one pool for all tasks and needs no boundaries.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from everfed.core import random
from everfed.core.layout import Spans
from everfed.method import (
    BEGIN,
    PLAIN,
    SHARED,
    AddsParameters,
    Batch,
    Cohort,
    CompositionError,
    Layout,
    Model,
    Part,
    Phase,
    Server,
    Step,
    When,
    option,
)
from everfed.methods.common.layers import keep_features, kept_features
from everfed.methods.common.teacher import frozen_pass
from everfed.methods.pretrained.piecewise import Piecewise, at_task, head_pieces, of_task, row_of, task_of
from everfed.models import lora
from everfed.models.prompts import CLOCK, CodaPrompts, DualPrompts, PoolPrompts, SharedPrompts, TaskPrompts
from everfed.models.vit import Prompts, ViT, as_vit

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


def require_vit(part: Part, module: nn.Module, server: Server) -> ViT:
    """The network as everfed's Vision Transformer: itself, or the same network of transformers or timm made into one.
    CompositionError for any other."""
    found = as_vit(module, server.facts.input_shape, server.facts.classes)
    if found is None:
        raise CompositionError(
            f"part {part.name!r} changes the attention of a Vision Transformer; set model.kind = 'vit' (it reads "
            f"weights of timm and Hugging Face), or take one of theirs that computes the same; got a "
            f"{type(getattr(module, 'base', module)).__name__}"
        )
    return found


def existing(part: Part, vit: ViT, option: str) -> list[int]:
    """The blocks that an option names; CompositionError for those that the network has not."""
    depth, wanted = len(vit.blocks), getattr(part, option)
    if any(block not in range(depth) for block in wanted):
        raise CompositionError(f"method.{part.name}.{option} must be below the network's depth, {depth}; got {wanted}")
    return list(wanted)


def pull_term(step: Step, weight: float) -> Tensor | None:
    """weight times how far the keys in use are from the queries, in the step's forward pass."""
    prompts = cast(TaskPrompts, step.module.prompts)
    return weight * prompts.pull if weight and prompts.pull is not None else None


@dataclass(frozen=True)
class TaskPrompted(AddsParameters, Piecewise):
    """Prompts of its own for every task."""

    def adapt(self, module: nn.Module, server: Server) -> nn.Module:
        vit = require_vit(self, module, server)
        adopt(self, vit, self.build(vit, server))
        return vit

    @abstractmethod
    def build(self, vit: ViT, server: Server) -> Prompts:
        """The prompts of all tasks, the same in every process."""

    def phases(self):
        return (Phase("prompts", cohort=Cohort.SERVER, rounds=BEGIN, when=When.BEFORE, update=self._next),)

    def _next(self, server: Server) -> None:
        model = at_task(server, CLOCK)
        params = model["params"].clone()
        self.begin(server.layout.named(params), task_of(server))
        server.model = {**model, "params": params}

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

    def trained(self, piece: str, server: Server) -> bool:
        return of_task(piece, task_of(server))


@dataclass(frozen=True)
class PromptCODA(TaskPrompted):
    components: int = option(10, at_least=1, about="components of every task and block")
    length: int = option(8, at_least=2, about="length of a prompt, half keys and half values")
    blocks: tuple[int, ...] = option((0, 1, 2, 3, 4), about="blocks that get a prompt")

    name = "prompt-coda"
    softmax: ClassVar[bool] = False  # over the entries of a component's attention

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length % 2:
            raise ValueError(f"length must be even; got {self.length}")

    def build(self, vit: ViT, server: Server) -> Prompts:
        tasks, pool = server.facts.tasks, server.facts.tasks * self.components
        if pool > vit.width:
            raise CompositionError(
                f"method.{self.name}.components must be at most {vit.width // tasks}: the components of {tasks} tasks "
                f"are orthogonal vectors of {vit.width} numbers; got {self.components}"
            )
        blocks, key = existing(self, vit, "blocks"), random.key(server.seed, self.name)
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
    Other options as those of CODA-Prompt."""

    near: float = option(1000.0, at_least=0, about="weight of the distance from the received model's features")
    far: float = option(10.0, at_least=0, about="weight of the distance from the last task's features")

    name = "fed-cprompt"
    softmax = True

    def needs(self):
        return {*super().needs(), SHARED, PLAIN}

    def broadcast(self, server: Server):
        return {"contrast": 1} if server.task else {}

    def batches(self, step: Step) -> dict[str, Batch]:
        keep_features(step)
        return {}

    def loss(self, step: Step) -> Tensor:
        received, inputs = step.received_model, step.inputs(step.x)
        models = [received, *([before_task(received, step.layout)] if step.message else [])]
        frozen = [frozen_pass(step, model, inputs)[1] for model in models]
        return contrast(kept_features(step), *frozen, near=self.near, far=self.far)


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
    length: int = option(5, at_least=1, about="keys, and as many values, of a prompt")
    general: tuple[int, ...] = option((0, 1), about="blocks with prompts for all tasks")
    expert: tuple[int, ...] = option((2, 3, 4), about="blocks with prompts for each task")
    weight: float = option(1.0, at_least=0, about="weight of the term that pulls the task's key towards its queries")

    name = "prompt-dual"

    def __post_init__(self) -> None:
        super().__post_init__()
        if set(self.general) & set(self.expert):
            raise ValueError(f"general and expert must be different blocks; got {self.general} and {self.expert}")

    def build(self, vit: ViT, server: Server) -> Prompts:
        general, expert = existing(self, vit, "general"), existing(self, vit, "expert")
        key = random.key(server.seed, self.name)
        return DualPrompts(general, expert, server.facts.tasks, self.length, vit.width, key)

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
    """The prompt of HGP: one for all samples and tasks."""

    length: int = option(100, at_least=1, about="keys, and as many values, in every block")
    blocks: tuple[int, ...] = option((0, 1, 2, 3, 4), about="blocks that get the prompt")

    name = "prompt-shared"

    def build(self, vit: ViT, server: Server) -> Prompts:
        return SharedPrompts(existing(self, vit, "blocks"), self.length, vit.width, random.key(server.seed, self.name))

    def phases(self):
        """Nothing begins with a task."""
        return ()

    def for_all_tasks(self, parameter: str) -> bool:
        return True


@dataclass(frozen=True)
class PromptL2P(AddsParameters, Part):
    pool: int = option(10, at_least=1, about="prompts, with a key each")
    length: int = option(5, at_least=1, about="tokens of a prompt")
    top: int = option(5, at_least=1, about="prompts that a sample uses")
    weight: float = option(0.1, at_least=0, about="weight of the term that pulls chosen keys towards the queries")

    name = "prompt-l2p"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top > self.pool:
            raise ValueError(f"top must be at most pool; got {self.top} of {self.pool}")

    def adapt(self, module: nn.Module, server: Server) -> nn.Module:
        vit = require_vit(self, module, server)
        prompts = PoolPrompts(self.pool, self.length, self.top, vit.width, random.key(server.seed, self.name))
        prompts.task.requires_grad_(False)
        adopt(self, vit, prompts)
        return vit

    def loss(self, step: Step) -> Tensor | None:
        return pull_term(step, self.weight)
