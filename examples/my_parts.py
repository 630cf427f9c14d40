"""A model and two parts of a user's own, which own_part_recipe.toml names as `my_parts:Name`. Nothing is registered.

A part is a frozen dataclass: its fields are the options of the recipe. It keeps no state of its own; what must be
remembered lies in slots that everfed checkpoints, pages to disk and hands to the hooks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from everfed import Part
from everfed.core.context import Context
from everfed.core.message import MODEL
from everfed.core.part import Model, State
from everfed.core.step import Step
from everfed.core.tree import Tree


class Net(nn.Sequential):
    """One hidden layer; `hidden` is an option of [model]."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, hidden: int = 64) -> None:
        inputs = nn.Linear(math.prod(input_shape), hidden)
        super().__init__(nn.Flatten(), inputs, nn.ReLU(), nn.Linear(hidden, classes))


@dataclass(frozen=True)
class Clip(Part):
    """On the clients, in every step: no gradient is longer than `norm`."""

    norm: float = 1.0

    name: ClassVar[str] = "clip"

    def __post_init__(self) -> None:
        if not self.norm > 0:
            raise ValueError(f"norm must be above 0; got {self.norm}")

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        return gradient * (self.norm / gradient.norm()).clamp(max=1.0)


@dataclass(frozen=True)
class ServerMomentum(Part):
    """On the server, after averaging: w_{t+1} = average + beta (w_t - w_{t-1})."""

    beta: float = 0.5

    name: ClassVar[str] = "server-momentum"

    def transform(self, server: State, model: Model, ctx: Context) -> Model:
        before = server.get(self.name, {}).get("before")
        if before is None:
            return model
        return {**model, "params": model["params"] + self.beta * (server[MODEL]["params"] - before)}

    def update(self, server: State, phase: str, reduced: Tree, ctx: Context) -> Tree:
        """The slots: the model of this round, and of the one before."""
        now = server[MODEL]["params"]
        return {"now": now, "before": server.get(self.name, {}).get("now", now)}
