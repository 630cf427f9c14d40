"""Low-rank adapters (LoRA; Hu et al., 2022): y = W x + b + (alpha / rank) B A x, with W and b frozen.

A layer may hold the factors of several tasks. In training it uses those of the current task alone, W + B_t A_t; in eval
mode it merges the tasks so far. Which task is current is a parameter of the network itself, one number, so that a model
vector says all that is needed to use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed.core import random

CLOCK = "lora_merge.task"  # what the name of the current task's number ends with


class Merge(nn.Module):
    """How the updates of a layer's tasks become one: their "mean", their "sum", or "grams", the mean weighed for every
    input by the sums of squares in `grams` (tasks, in) as soon as the current task has some."""

    def __init__(self, clock: nn.Parameter, kind: str, tasks: int, inputs: int) -> None:
        super().__init__()
        self.kind, self.tasks = kind, tasks
        self.task = clock  # (1,) the current one, the same parameter in all layers
        if kind == "grams":
            self.grams = nn.Parameter(torch.zeros(tasks, inputs))

    def shares(self) -> Tensor:
        """(tasks, 1 or in): by how much each task's product counts, for every input."""
        task = self.task.detach()
        begun = (torch.arange(self.tasks, device=task.device) <= task).to(task.dtype).unsqueeze(1)
        if self.kind == "sum":
            return begun
        mean = begun / (task + 1.0)
        if self.kind == "mean":
            return mean
        grams = self.grams.detach()
        total = grams.sum(0, keepdim=True)
        weighed = torch.where(total > 0, grams / torch.where(total > 0, total, 1.0), mean)
        finished = grams.index_select(0, task.long()).sum() > 0
        return torch.where(finished, weighed, mean)


def is_linear(layer: nn.Module) -> bool:
    """Is it a linear layer, of torch or GPT-2's Conv1D of transformers, whose weight is (in, out)?"""
    return type(layer) is nn.Linear or type(layer).__name__ == "Conv1D"


class LoRALinear(nn.Linear):
    """A frozen linear layer with factors lora_A (tasks, rank, in) and lora_B (tasks, out, rank), in float32 whatever
    the layer's own type.

    together: training adds the products of earlier tasks, too.
    """

    def __init__(self, base: Any, name: str, rank: int, alpha: float, seed: int) -> None:
        outputs, inputs = base.weight.shape if isinstance(base, nn.Linear) else base.weight.shape[::-1]
        super().__init__(inputs, outputs, base.bias is not None, device="meta")
        self.original: Callable[..., nn.Module] = type(base)
        self.weight, self.bias = base.weight, base.bias
        for parameter in base.parameters():
            parameter.requires_grad_(False)
        self.name, self.rank, self.scale = name, rank, alpha / rank
        self.together = False
        self.hold(1, seed)

    def hold(self, tasks: int, seed: int) -> None:
        """Factors for so many tasks: B is 0 and A uniform in +-1 / sqrt(in), drawn by seed, task and layer."""
        drawn = [self._draw(task, seed) for task in range(tasks)]
        self.lora_A = nn.Parameter(torch.stack(drawn).to(self.weight.device))
        self.lora_B = nn.Parameter(torch.zeros(tasks, self.out_features, self.rank, device=self.weight.device))

    def _draw(self, task: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(random.key(seed, "lora", task, self.name))
        limit = self.in_features**-0.5
        return (torch.rand(self.rank, self.in_features, generator=generator) * 2.0 - 1.0) * limit

    def follow(self, clock: nn.Parameter, kind: str) -> None:
        """Use the factors of the task that `clock` (1,) names, and merge the tasks so far in eval mode."""
        self.lora_merge = Merge(clock, kind, len(self.lora_A), self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        down, up = (factor.to(x.dtype) for factor in self.factors())
        weight = self.weight if self.original is nn.Linear else self.weight.T
        return functional.linear(x, weight, self.bias) + self.scale * functional.linear(functional.linear(x, down), up)

    def without_factors(self) -> nn.Module:
        """The frozen layer alone, with the same tensors."""
        if self.original is nn.Linear:
            plain: nn.Module = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        else:
            plain = self.original(self.out_features, self.in_features)
        plain.weight, plain.bias = self.weight, self.bias
        return plain

    def merged(self) -> nn.Module:
        """A layer whose weight has the update that is used now."""
        plain, (down, up) = self.without_factors(), self.factors()
        update = (self.scale * up @ down).detach()
        update = update if self.original is nn.Linear else update.T
        plain.weight = nn.Parameter((self.weight + update).to(self.weight.dtype), requires_grad=False)
        return plain

    def factors(self) -> tuple[Tensor, Tensor]:
        """(A, B) of the update that the layer uses now: of one task, or of several on top of each other."""
        if len(self.lora_A) == 1:
            return self.lora_A[0], self.lora_B[0]
        if self.training and not self.together:
            task = self.lora_merge.task.detach().long()
            return self.lora_A.index_select(0, task)[0], self.lora_B.index_select(0, task)[0]
        down = self.lora_A * self.lora_merge.shares().unsqueeze(1).to(self.lora_A.dtype)
        return down.flatten(0, 1), self.lora_B.transpose(0, 1).flatten(1)


def layers(module: nn.Module) -> dict[str, LoRALinear]:
    """All LoRA layers by name, in order."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoRALinear)}


def replace_layers(module: nn.Module, replacement: Callable[[LoRALinear], nn.Module]) -> None:
    """Put another layer in the place of every LoRA layer."""
    for name, layer in layers(module).items():
        _replace(module, name, replacement(layer))


class Float32Head(nn.Linear):
    """The trained head of a network of lower precision: trained parameters are float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def add(module: nn.Module, options: Mapping[str, Any], seed: int) -> None:
    """Freeze the network but for its head, the last linear layer, and give linear layers LoRA factors.

    options: rank; targets, the layers, by the ends of their names (none: all linear layers but the head); alpha, by
    default the rank, so that nothing is scaled; head, False where the head is frozen, too. Raises ValueError, which
    names the option.
    """
    rank, targets, alpha, trains_head = _checked(options)
    linear = {name: layer for name, layer in module.named_modules() if is_linear(layer)}
    if not linear:
        raise ValueError("lora needs a network with linear layers, and this one has none")
    *inner, head = linear
    chosen = [name for name in inner if not targets or any(_ends(name, target) for target in targets)]
    lost = [target for target in targets if not any(_ends(name, target) for name in inner)]
    if lost or not chosen:
        raise ValueError(
            f"lora.targets must be ends of names of linear layers ({_kinds(inner)}); got {lost or targets}"
        )
    module.requires_grad_(False)
    if trains_head:
        _train_head(module, head)
    for name in chosen:
        _replace(module, name, LoRALinear(linear[name], name, rank, alpha, seed))


def _train_head(module: nn.Module, name: str) -> None:
    head = module.get_submodule(name)
    owners = [one for one in module.modules() if getattr(one, "weight", None) is head.weight]
    if len(owners) > 1:
        raise ValueError(
            f"lora.head: the head {name} shares its weight with {type(owners[0]).__name__}, which would train with it; "
            "set lora.head = false"
        )
    if next(head.parameters()).dtype != torch.float32:
        head = head.float()
        head.__class__ = Float32Head
    head.requires_grad_(True)


def _replace(module: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, layer)


def _checked(options: Mapping[str, Any]) -> tuple[int, Sequence[str], float, bool]:
    allowed = ("rank", "targets", "alpha", "head")
    for key in options:
        if key not in allowed:
            raise ValueError(f"lora.{key} is not an option; it has {', '.join(allowed)}")
    rank, targets, head = options.get("rank", 8), options.get("targets") or (), options.get("head", True)
    alpha = options.get("alpha") or rank
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"lora.rank must be a whole number of at least 1; got {rank!r}")
    if isinstance(targets, str) or not all(isinstance(target, str) for target in targets):
        raise ValueError(f"lora.targets must be a list of names; got {targets!r}")
    if not isinstance(alpha, int | float) or alpha <= 0:
        raise ValueError(f"lora.alpha must be positive; got {alpha!r}")
    if not isinstance(head, bool):
        raise ValueError(f"lora.head must be true or false; got {head!r}")
    return rank, targets, float(alpha), head


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def _kinds(names: Sequence[str]) -> str:
    """The different last words of some names."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names)) or "it has none but the head"
