"""A model and two parts of a user's own, which own_part_recipe.toml names as `my_parts:Name`. Nothing is registered.

A part is a frozen dataclass: its fields are the options of the recipe. It has no state of its own. State lives in slots
that everfed checkpoints, pages to disk and passes to the hooks, which return the new slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from everfed.core.legacy import MODEL, Context, Model, Part, State, Step, Tree


class Net(nn.Sequential):
    """One hidden layer; `hidden` is an option of [model]."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, hidden: int = 64) -> None:
        inputs = nn.Linear(math.prod(input_shape), hidden)
        super().__init__(nn.Flatten(), inputs, nn.ReLU(), nn.Linear(hidden, classes))


@dataclass(frozen=True)
class Clip(Part):
    """On the clients, in every step: no gradient is longer than `norm`."""

    norm: float = 1.0

    name = "clip"

    def __post_init__(self) -> None:
        if not self.norm > 0:
            raise ValueError(f"norm must be above 0; got {self.norm}")

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        return gradient * (self.norm / gradient.norm()).clamp(max=1.0)


@dataclass(frozen=True)
class ServerMomentum(Part):
    """On the server, after averaging: w_{t+1} = average + beta (w_t - w_{t-1})."""

    beta: float = 0.5

    name = "server-momentum"

    def update_model(self, server: State, model: Model, ctx: Context) -> tuple[Tree | None, Model]:
        """(slots, model): `server` still holds w_t, the slots w_{t-1}; `model` is the average."""
        now = server[MODEL]["params"]
        before = server.get(self.name, {}).get("before", now)
        return {"before": now}, {**model, "params": model["params"] + self.beta * (now - before)}
