"""Learned prompts of a frozen Vision Transformer: a pool chosen by keys (L2P), general and expert ones (DualPrompt),
weighted sums of components (CODA-Prompt), and one for all samples and tasks (HGP).

All but the last ask the network without prompts first: the query is its class token. Prompts of several tasks lie
along the first axis of a parameter, and which task is current is a parameter of the network itself (`task`), one
number, so that a model vector says all that is needed to use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed.models.vit import Prefix, Prompts, ViT

CLOCK = "prompts.task"  # the name of the current task's number


class TaskPrompts(Prompts):
    """Prompts that know their current task. pull: how far the keys in use are from the queries, of the last forward
    pass in training; a term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.task = nn.Parameter(torch.zeros(1))
        self.pull: Tensor | None = None

    def query(self, vit: ViT, tokens: Tensor) -> Tensor:
        """(n, width): the class token without prompts; no gradient."""
        with torch.no_grad():
            return vit.class_token(tokens).float()


# HGP ------------------------------------------------------------------------------------------------------------------
class SharedPrompts(Prompts):
    """HGP's (Salami et al., 2024): one prompt of keys and values in every chosen block, for all samples and tasks."""

    def __init__(self, blocks: Sequence[int], length: int, width: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.blocks = nn.ParameterDict({str(block): _uniform(generator, 1, 2, length, width) for block in blocks})

    def forward(self, vit: ViT, tokens: Tensor) -> Tensor:
        return vit.class_token(tokens, _for_all(self.blocks, tokens.shape[0]))


# CODA-Prompt ----------------------------------------------------------------------------------------------------------
class Components(nn.Module):
    """The components of one block: prompts P (tasks, m, length, width), attention A and keys K (tasks, m, width).
    softmax: a component's attention is used as the softmax over its entries."""

    def __init__(
        self, tasks: int, count: int, length: int, width: int, generator: torch.Generator, softmax: bool = False
    ) -> None:
        super().__init__()
        self.softmax = softmax
        self.P = nn.Parameter(torch.randn(tasks, count, length, width, generator=generator))
        self.A = nn.Parameter(torch.randn(tasks, count, width, generator=generator))
        self.K = nn.Parameter(torch.randn(tasks, count, width, generator=generator))

    def weights(self, query: Tensor) -> Tensor:
        """(n, tasks, m): cos(q * A_m, K_m)."""
        attention = self.A.float().flatten(0, 1)
        seen = query.unsqueeze(1) * (attention.softmax(-1) if self.softmax else attention)
        cosines = functional.cosine_similarity(seen, self.K.float().flatten(0, 1), dim=-1)
        return cosines.unflatten(1, self.K.shape[:2])

    def prompt(self, query: Tensor, used: Tensor) -> Prefix:
        """Keys and values, half of the length each: the weighted sum of the components of the tasks in `used`."""
        weights = self.weights(query) * used.unsqueeze(-1)
        mixed = torch.einsum("ntm,tmld->nld", weights, self.P.float())
        keys, values = mixed.chunk(2, dim=1)
        return keys, values


class CodaPrompts(TaskPrompts):
    """CODA-Prompt (Smith et al., 2023): in every chosen block a weighted sum of all components of the tasks so far."""

    def __init__(
        self,
        blocks: Sequence[int],
        tasks: int,
        count: int,
        length: int,
        width: int,
        seed: int,
        softmax: bool = False,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.blocks = nn.ModuleDict(
            {str(block): Components(tasks, count, length, width, generator, softmax) for block in blocks}
        )
        self.tasks = tasks

    def forward(self, vit: ViT, tokens: Tensor) -> Tensor:
        query = self.query(vit, tokens)
        used = (torch.arange(self.tasks, device=query.device) <= self.task.detach()).to(query.dtype)
        blocks = ((int(name), cast(Components, components)) for name, components in self.blocks.items())
        prefixes = {block: components.prompt(query, used) for block, components in blocks}
        return vit.class_token(tokens, prefixes)


# DualPrompt -----------------------------------------------------------------------------------------------------------
class DualPrompts(TaskPrompts):
    """DualPrompt (Wang et al., 2022): general prompts for all tasks in some blocks, and in others expert prompts for
    every task: the current one in training, otherwise that of the key nearest to the query, for each sample."""

    def __init__(
        self, general: Sequence[int], expert: Sequence[int], tasks: int, length: int, width: int, seed: int
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.general = nn.ParameterDict({str(block): _uniform(generator, 1, 2, length, width) for block in general})
        self.expert = nn.ParameterDict({str(block): _uniform(generator, tasks, 2, length, width) for block in expert})
        self.key = _uniform(generator, tasks, 1, width)
        self.tasks = tasks

    def forward(self, vit: ViT, tokens: Tensor) -> Tensor:
        query = self.query(vit, tokens)
        cosines = functional.cosine_similarity(query.unsqueeze(1), self.key.float().squeeze(1), dim=-1)  # (n, tasks)
        chosen = self._chosen(cosines)
        if self.training:
            self.pull = (1.0 - cosines.gather(1, chosen.unsqueeze(1))).mean()
        prefixes = _for_all(self.general, query.shape[0])
        prefixes |= {int(name): _halves(p.index_select(0, chosen)) for name, p in self.expert.items()}
        return vit.class_token(tokens, prefixes)

    def _chosen(self, cosines: Tensor) -> Tensor:
        """(n,) the task whose expert each sample uses."""
        task = self.task.detach()
        if self.training:
            return task.long().expand(cosines.shape[0])
        later = torch.arange(self.tasks, device=task.device) > task
        return cosines.masked_fill(later, -torch.inf).argmax(1)


def _uniform(generator: torch.Generator, *shape: int) -> nn.Parameter:
    """Drawn from -1 to 1."""
    return nn.Parameter(torch.rand(shape, generator=generator) * 2.0 - 1.0)


def _for_all(prompts: nn.ParameterDict, count: int) -> dict[int, Prefix]:
    """Prompts (1, 2, length, width) by block, for `count` samples."""
    return {int(name): _halves(p.expand(count, -1, -1, -1)) for name, p in prompts.items()}


def _halves(prompts: Tensor) -> Prefix:
    """(n, 2, length, width) -> keys and values."""
    keys, values = prompts.unbind(1)
    return keys, values


# L2P ------------------------------------------------------------------------------------------------------------------
class PoolPrompts(TaskPrompts):
    """L2P (Wang et al., 2022): the `top` prompts of a pool whose keys are nearest to the query, chosen for each sample,
    stand between class token and patches; features are the mean of the outputs at their places."""

    def __init__(self, pool: int, length: int, top: int, width: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.prompt = _uniform(generator, pool, 1, length, width)
        self.key = _uniform(generator, pool, 1, width)
        self.top = top

    def forward(self, vit: ViT, tokens: Tensor) -> Tensor:
        cosines = functional.cosine_similarity(
            self.query(vit, tokens).unsqueeze(1), self.key.float().squeeze(1), dim=-1
        )
        nearest, chosen = cosines.topk(self.top, dim=1)
        if self.training:
            self.pull = -nearest.sum(1).mean()
        prompts = self.prompt.squeeze(1)[chosen].flatten(1, 2).to(tokens.dtype)
        out = vit.norm(vit.run_blocks(torch.cat([tokens[:, :1], prompts, tokens[:, 1:]], 1)))
        return out[:, 1 : 1 + prompts.shape[1]].mean(1)
