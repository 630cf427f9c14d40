"""What PILoRA (Guo et al., 2024) changes in a Vision Transformer: factors of queries and values, prototypes as head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed.core import random
from everfed.models.lora import LoRALinear


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
