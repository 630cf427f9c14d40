"""PILoRA: prototypes of classes and one LoRA for every task, kept orthogonal to earlier ones (Guo et al., 2024).

A class is a prototype p_c in feature space, and dist(f, p) = |f - p| / sqrt(width). In task t clients train the
factors of queries and values, A_t and B_t, in some blocks of a frozen Vision Transformer (the first one, in the
authors' code), on top of those of earlier tasks, and the prototypes of the task's classes, with the loss

    CE(-dist(f, p), y) + pull mean dist(f, p_y) + sparsity |A_t|_1 + orthogonality sum_{j < t} |A_j A_t^T|_1

The server averages factors by samples. It weighs the prototypes p_k of class c that clients k send by how near they
are to the mean features f_j of all clients j that have the class:

    u_k = 1 / sum_j |p_k - f_j|,   v = (u - min u) / (max u - min u),   p_c = sum_k softmax(v / temperature)_k p_k

Where all u are equal, or no client has the class, p_c is the plain mean. Scored are the products of all tasks added up,
and the nearest prototype; the authors' code scores later tasks with the first one's factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from everfed.core import random
from everfed.core.client import synchronises
from everfed.core.legacy import (
    CLASSES,
    MODEL,
    Client,
    AddsParameters,
    Aggregator,
    Collect,
    CompositionError,
    Context,
    Data,
    Fitted,
    Layout,
    Mean,
    Message,
    Model,
    Once,
    Optimizer,
    Part,
    Reducer,
    Server,
    Slots,
    State,
    Step,
    Tree,
    refuse_personal,
)
from everfed.core.pieces import Spans, cut, joined, pasted
from everfed.methods.common.checks import at_least, positive
from everfed.methods.common.features import head_weight
from everfed.methods.features.statistics import ReplacesHead, class_moments
from everfed.methods.pretrained.lora import TaskAdapted, factor_pieces
from everfed.methods.pretrained.piecewise import task_of
from everfed.methods.pretrained.prompts import existing, require_vit
from everfed.models import lora
from everfed.models.pilora import Prototypes, QueryValueLoRA
from everfed.models.vit import Attention


@dataclass(frozen=True)
class PILoRA(AddsParameters, TaskAdapted, Aggregator):
    """rank: of the factors. blocks: whose queries and values have some. pull, sparsity, orthogonality: weights of the
    loss. temperature: of the softmax over clients."""

    rank: int = 4
    blocks: tuple[int, ...] = (0,)
    pull: float = 0.001
    sparsity: float = 0.01
    orthogonality: float = 0.5
    temperature: float = 0.2

    name = "pilora"
    needs = TaskAdapted.needs | {CLASSES}

    def __post_init__(self) -> None:
        at_least(self, 1, "rank")
        at_least(self, 0, "pull", "sparsity", "orthogonality")
        positive(self, "temperature")
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if not self.blocks:
            raise ValueError("blocks must name at least one block; got none")

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        refuse_personal(self, parts)
        for part in parts:
            if isinstance(part, ReplacesHead):
                raise CompositionError(f"part {self.name!r} has prototypes in place of the head of {part.name!r}")
        return ()

    def adapt(self, module: nn.Module, server: Server) -> None:
        """Freeze the network, give blocks factors for all tasks, and put prototypes in the place of the head."""
        ctx = server.context
        vit = require_vit(self, module)
        if lora.layers(vit):
            raise CompositionError(f"part {self.name!r} adds its own LoRA layers; leave model.lora out")
        vit.requires_grad_(False)
        clock = nn.Parameter(torch.zeros(1))
        for block in existing(self, vit, "blocks"):
            attention = cast(Attention, vit.blocks[block].attn)
            layer = QueryValueLoRA(attention.qkv, f"blocks.{block}.attn.qkv", self.rank, self.rank, ctx.seed)
            layer.hold(ctx.facts.tasks, ctx.seed)
            layer.follow(clock, "sum")
            attention.qkv = layer
        vit.head = Prototypes(ctx.facts.classes, vit.width, random.key(ctx.seed, self.name))

    # the task's classes ----------------------------------------------------------------------------------------------
    def _begin(self, server: State, reduced: Tree, ctx: Context) -> Tree:
        return {"classes": torch.tensor(ctx.train.stream.labels(task_of(ctx)))}

    def broadcast(self, server: State, ctx: Context) -> dict[str, Any]:
        own = server.get(self.name)  # empty before the first task began
        return {"classes": Once(task_of(ctx), own["classes"])} if own else {}

    # clients ---------------------------------------------------------------------------------------------------------
    def loss(self, step: Step) -> Tensor:
        layers = [layer for layer in lora.layers(step.replica.module).values() if isinstance(layer, QueryValueLoRA)]
        near = -step.outputs.gather(1, step.y.unsqueeze(1)).mean()
        penalties = (self.sparsity * layer.size() + self.orthogonality * layer.overlap() for layer in layers)
        return self.pull * near + sum(penalties, torch.zeros_like(near))

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Slots, Tree]:
        """Mean features of the task's classes that the client has, in one pass after training."""
        slots, _ = super().reply(client, message, fitted, data, ctx)
        if self.name not in message or not synchronises(ctx):
            return slots, {}
        counts, sums, _ = class_moments(Client(self.name, client, ctx, message, fitted.model, data))
        classes = message[self.name]["classes"].cpu()
        labels = classes[counts[classes] > 0]
        return slots, {"labels": labels, "features": (sums / counts.clamp(min=1).unsqueeze(1))[labels].float()}

    def upload(self, model: Model, message: Message, ctx: Context) -> Tree:
        if self.name not in message:
            return {}
        layout, params = ctx.facts.layout, model["params"]
        prototypes = head_weight(layout).view(params)
        adapter = cut(params, adapter_of(layout, task_of(ctx)))
        return {"adapter": adapter, "prototypes": prototypes[message[self.name]["classes"].to(params.device)]}

    # the server ------------------------------------------------------------------------------------------------------
    def reducers(self) -> Mapping[str, Reducer]:
        single = ("prototypes", "labels", "features")
        return {"adapter": Mean(weighted=True), **{key: Collect() for key in single}}

    def aggregate(self, server: State, reduced: Tree, ctx: Context) -> Model:
        model, layout = server[MODEL], ctx.facts.layout
        if reduced.get("adapter") is None:
            return model
        params = pasted(model["params"], adapter_of(layout, task_of(ctx)), reduced["adapter"])
        sent = torch.stack([one.to(params.device) for one in reduced["prototypes"].values()])  # (clients, classes, F)
        labels, features = (
            torch.cat([one.to(params.device) for one in reduced[k].values()]) for k in ("labels", "features")
        )
        rows = head_weight(layout).view(params)
        for place, label in enumerate(server[self.name]["classes"].tolist()):
            own = sent[:, place].double()
            shares = prototype_weights(own, features[labels == label].double(), self.temperature)
            rows[label] = (shares @ own).to(params.dtype)
        return {**model, "params": params}


def prototype_weights(prototypes: Tensor, features: Tensor, temperature: float) -> Tensor:
    """(clients,) the weight of every client's prototype (clients, F) of a class, by the mean features (m, F) of the
    clients that have it."""
    distances = torch.linalg.vector_norm(prototypes.unsqueeze(1) - features, dim=2).sum(1)
    near = 1.0 / distances.clamp(min=1e-12)
    return nearness_weights(near, temperature)


def nearness_weights(near: Tensor, temperature: float) -> Tensor:
    """Softmax of `near` (clients,), scaled to 0 to 1; uniform where all are equal."""
    lowest, width = near.min(), near.max() - near.min()
    scaled = torch.where(width > 0, (near - lowest) / torch.where(width > 0, width, 1.0), 0.0)
    return torch.softmax(scaled / temperature, 0)


def adapter_of(layout: Layout, task: int) -> Spans:
    """Where the factors of a task lie in the vector."""
    pieces = factor_pieces(layout)
    return joined([*pieces[f"A/{task}"], *pieces[f"B/{task}"]])
