"""A model and two parts of a user's own, which own_part_recipe.toml names as `my_parts:Name`. Nothing is registered.

A part is a frozen dataclass: its fields are the options of the recipe. It has no state of its own. What it keeps on the
server or a client is a dict, `server.state` or `client.state`, which everfed checkpoints, pages to disk and hands back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from everfed.method import Gradient, Part, Server, Step, option


class Net(nn.Sequential):
    """One hidden layer; `hidden` is an option of [model]."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, hidden: int = 64) -> None:
        inputs = nn.Linear(math.prod(input_shape), hidden)
        super().__init__(nn.Flatten(), inputs, nn.ReLU(), nn.Linear(hidden, classes))


@dataclass(frozen=True)
class Clip(Part):
    """On the clients, in every step: no gradient is longer than `norm`."""

    norm: float = option(1.0, above=0, about="the greatest length")

    name = "clip"

    def gradient(self, step: Step, gradient: Gradient) -> Tensor:
        return gradient.vector * (self.norm / gradient.vector.norm()).clamp(max=1.0)


@dataclass(frozen=True)
class ServerMomentum(Part):
    """On the server, after averaging: w_{t+1} = average + beta (w_t - w_{t-1})."""

    beta: float = option(0.5, about="how much of the last move is repeated")

    name = "server-momentum"

    def update(self, server: Server) -> None:
        """`server.model` is the average, `server.before` w_t; the state holds w_{t-1}."""
        now = server.before["params"]
        earlier = server.state.get("before", now)
        server.model = {**server.model, "params": server.model["params"] + self.beta * (now - earlier)}
        server.state["before"] = now
