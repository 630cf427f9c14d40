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

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed.core import random
from everfed.core.layout import Spans, cut, joined, pasted
from everfed.method import (
    CLASSES,
    SHARED,
    AddsParameters,
    Aggregator,
    Cached,
    Client,
    Collect,
    CompositionError,
    Layout,
    Mean,
    Model,
    Server,
    Step,
    Tells,
    option,
)
from everfed.methods.common.layers import head_weight
from everfed.methods.features.statistics import ReplacesHead, class_moments
from everfed.methods.pretrained.lora import TaskAdapted, factor_pieces
from everfed.methods.pretrained.piecewise import task_of
from everfed.methods.pretrained.prompts import existing, require_vit
from everfed.models import lora
from everfed.models.lora import LoRALinear
from everfed.models.vit import Attention


@dataclass(frozen=True)
class PILoRA(AddsParameters, TaskAdapted, Aggregator):
    rank: int = option(4, at_least=1, about="rank of the factors")
    blocks: tuple[int, ...] = option((0,), about="blocks whose queries and values have factors")
    pull: float = option(0.001, at_least=0, about="weight of the distance to the own class's prototype")
    sparsity: float = option(0.01, at_least=0, about="weight of |A_t|_1")
    orthogonality: float = option(0.5, at_least=0, about="weight of sum_{j < t} |A_j A_t^T|_1")
    temperature: float = option(0.2, above=0, about="temperature of the softmax over clients")

    name = "pilora"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.blocks:
            raise ValueError("blocks must name at least one block; got none")

    def needs(self):
        return super().needs() | {CLASSES, SHARED}

    def check(self, parts, optimizer):
        for part in parts:
            if isinstance(part, ReplacesHead):
                raise CompositionError(f"part {self.name!r} has prototypes in place of the head of {part.name!r}")

    def adapt(self, module: nn.Module, server: Server) -> nn.Module:
        """Freeze the network, give blocks factors for all tasks, and put prototypes in the place of the head."""
        vit, facts, seed = require_vit(self, module, server), server.facts, server.seed
        if lora.layers(vit):
            raise CompositionError(f"part {self.name!r} adds its own LoRA layers; leave model.lora out")
        vit.requires_grad_(False)
        clock = nn.Parameter(torch.zeros(1))
        for block in existing(self, vit, "blocks"):
            attention = cast(Attention, vit.blocks[block].attn)
            layer = QueryValueLoRA(attention.qkv, f"blocks.{block}.attn.qkv", self.rank, self.rank, seed)
            layer.hold(facts.tasks, seed)
            layer.follow(clock, "sum")
            attention.qkv = layer
        vit.head = Prototypes(facts.classes, vit.width, random.key(seed, self.name))
        return vit

    # the task's classes ----------------------------------------------------------------------------------------------
    def begin(self, server: Server) -> None:
        super().begin(server)
        server.state = {"classes": torch.tensor(server.trainer.stream.labels(task_of(server)))}

    def broadcast(self, server: Server):
        if not server.state:  # before the first task began
            return {}
        return {"classes": Cached(task_of(server), server.state["classes"])}

    # clients ---------------------------------------------------------------------------------------------------------
    def loss(self, step: Step) -> Tensor:
        layers = [layer for layer in lora.layers(step.module).values() if isinstance(layer, QueryValueLoRA)]
        near = -step.outputs.gather(1, step.y.unsqueeze(1)).mean()
        penalties = (self.sparsity * layer.size() + self.orthogonality * layer.overlap() for layer in layers)
        return self.pull * near + sum(penalties, torch.zeros_like(near))

    def reply(self, client: Client):
        """Mean features of the task's classes that the client has, in one pass after training."""
        super().reply(client)
        if not client.message or not client.synchronises:
            return None
        counts, sums, _ = class_moments(client)
        classes = client.message["classes"].cpu()
        labels = classes[counts[classes] > 0]
        return {"labels": labels, "features": (sums / counts.clamp(min=1).unsqueeze(1))[labels].float()}

    def upload(self, client: Client):
        if not client.message:
            return {}
        layout, params = client.layout, client.model["params"]
        prototypes = head_weight(layout).view(params)
        adapter = cut(params, adapter_of(layout, task_of(client)))
        return {"adapter": adapter, "prototypes": prototypes[client.message["classes"].to(params.device)]}

    # the server ------------------------------------------------------------------------------------------------------
    def reducers(self):
        single = {"prototypes": Tells.SUMS, "labels": Tells.COUNTS, "features": Tells.SUMS}
        collected = {key: Collect(tells=about) for key, about in single.items()}
        return {"adapter": Mean(weighted=True, tells=Tells.GRADIENTS), **collected}

    def aggregate(self, server: Server) -> Model:
        model, layout, reduced = server.model, server.layout, server.reduced
        if reduced.get("adapter") is None:
            return model
        params = pasted(model["params"], adapter_of(layout, task_of(server)), reduced["adapter"])
        sent = torch.stack([one.to(params.device) for one in reduced["prototypes"].values()])  # (clients, classes, F)
        labels, features = (
            torch.cat([one.to(params.device) for one in reduced[k].values()]) for k in ("labels", "features")
        )
        rows = head_weight(layout).view(params)
        for place, label in enumerate(server.state["classes"].tolist()):
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


# what changes in the Vision Transformer -------------------------------------------------------------------------------
class QueryValueLoRA(LoRALinear):
    """Attention's projection to queries, keys and values, with factors of its queries and its values alone:
    lora_A (tasks, 2, rank, in) and lora_B (tasks, 2, out / 3, rank). Training, too, uses all tasks so far."""

    def hold(self, tasks: int, seed: int) -> None:
        super().hold(tasks, seed)
        self.lora_B = nn.Parameter(self.weight.new_zeros(tasks, 2, self.out_features // 3, self.rank))

    def _draw(self, task: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(random.key(seed, "lora", task, self.name))
        limit = self.in_features**-0.5
        return (torch.rand(2, self.rank, self.in_features, generator=generator) * 2.0 - 1.0) * limit

    def forward(self, x: Tensor) -> Tensor:
        downs, ups = self.factors()
        queries, values = (
            functional.linear(functional.linear(x, a), b) for a, b in zip(downs.unbind(), ups.unbind(), strict=True)
        )
        update = torch.cat([queries, torch.zeros_like(queries), values], -1)
        return functional.linear(x, self.weight, self.bias) + self.scale * update

    def factors(self) -> tuple[Tensor, Tensor]:
        """A (2, tasks * rank, in) and B (2, out / 3, tasks * rank) of all tasks on top of each other."""
        begun = self.lora_merge.shares().reshape(-1, 1, 1, 1).to(self.lora_A.dtype)
        down = (self.lora_A * begun).transpose(0, 1).flatten(1, 2)
        return down, self.lora_B.permute(1, 2, 0, 3).flatten(2)

    def current(self) -> Tensor:
        """(2, rank, in): A of the current task."""
        return self.lora_A.index_select(0, self.lora_merge.task.detach().long())[0]

    def size(self) -> Tensor:
        """The sum of the absolute values of the current task's A, of queries and values together."""
        return self.current().abs().sum()

    def overlap(self) -> Tensor:
        """sum_{j < t} |A_j A_t^T|, entry by entry, of queries and values together: 0 where the rows are orthogonal."""
        task = self.lora_merge.task.detach()
        earlier = (torch.arange(len(self.lora_A), device=task.device) < task).reshape(-1, 1, 1, 1)
        products = self.lora_A.detach() @ self.current().transpose(1, 2)  # (tasks, 2, rank, rank)
        return (products.abs() * earlier).sum()


class Prototypes(nn.Module):
    """A head whose outputs are -|f - p_c| / sqrt(width), so that the nearest prototype p_c has the largest. Its weight
    (classes, width) holds the prototypes, first 0.1 times normal draws."""

    def __init__(self, classes: int, width: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(0.1 * torch.randn(classes, width, generator=generator))

    def forward(self, features: Tensor) -> Tensor:
        apart = features.float().unsqueeze(1) - self.weight.float()
        return -torch.linalg.vector_norm(apart, dim=2) / features.shape[1] ** 0.5
