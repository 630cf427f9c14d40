"""Server optimisers: a round's mean update as a gradient (Reddi et al., 2021; FedAvgM: Hsu et al., 2019).

With Delta = aggregate - w of the shared parameters, once per round and element by element:

    FedAvgM       v <- beta v + Delta                                   w <- w + lr v
    the others    m <- beta1 m + (1 - beta1) Delta                      w <- w + lr m / (sqrt(v) + tau)
      FedAdagrad    v <- v + Delta^2
      FedAdam       v <- beta2 v + (1 - beta2) Delta^2
      FedYogi       v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)

m is 0 and v is tau^2 before the first round, and there is no bias correction (Reddi et al., Algorithm 2). BatchNorm
statistics stay those of the aggregate. A round in which no parameter changed, because no client trained, is left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everfed.core.legacy import (
    BEGIN,
    MODEL,
    Cohort,
    CompositionError,
    Context,
    Model,
    Optimizer,
    Part,
    Phase,
    Position,
    Slots,
    State,
    Tree,
    on_device,
)
from everfed.methods.common.checks import at_least, one_of


@dataclass(frozen=True)
class ServerOptimizer(Part, ABC):
    """lr: of the server. reset: begin anew with every task, so that momentum of an earlier one moves nothing."""

    lr: float = 1.0
    reset: bool = False

    def __post_init__(self) -> None:
        at_least(self, 0, "lr")

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        others = [part.name for part in parts if isinstance(part, ServerOptimizer)]
        if len(others) > 1:
            raise CompositionError(f"a method has one server optimiser at most; got {', '.join(others)}")
        return ()

    def phases(self) -> tuple[Phase, ...]:
        begin = Phase("reset-moments", cohort=Cohort.SERVER, when=BEGIN, position=Position.BEFORE, update=self._forget)
        return (begin,) if self.reset else ()

    def _forget(self, server: State, reduced: Tree, ctx: Context) -> Tree:
        return {}

    def update_model(self, server: State, model: Model, ctx: Context) -> tuple[Slots, Model]:
        aggregate = model["params"]
        delta = aggregate - server[MODEL]["params"].to(aggregate.device)
        if not delta.any():
            return None, model
        slots, step = self.step(on_device(server.get(self.name, {}), aggregate.device), delta)
        # w + step, written so that a step of Delta gives the aggregate to the bit
        return slots, {**model, "params": aggregate + (step - delta)}

    @abstractmethod
    def step(self, slots: Tree, delta: Tensor) -> tuple[Tree, Tensor]:
        """(slots, what is added to the parameters); `slots` is empty at first."""


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """momentum: beta."""

    momentum: float = 0.9

    name = "fedavgm"

    def __post_init__(self) -> None:
        super().__post_init__()
        _fraction(self, "momentum")

    def step(self, slots: Tree, delta: Tensor) -> tuple[Tree, Tensor]:
        v = self.momentum * slots["v"] + delta if slots else delta
        return {"v": v}, self.lr * v


@dataclass(frozen=True)
class Adaptive(ServerOptimizer):
    """tau: added to the root, in units of Delta; the larger, the less adaptive. initial: v before the first round,
    "tau2" (tau squared, as published) or "zero"."""

    beta1: float = 0.9
    tau: float = 0.1
    initial: str = "tau2"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "tau")
        _fraction(self, "beta1")
        one_of(self, initial=("tau2", "zero"))

    def step(self, slots: Tree, delta: Tensor) -> tuple[Tree, Tensor]:
        first = self.tau**2 if self.initial == "tau2" else 0.0
        m = self.beta1 * slots.get("m", torch.zeros_like(delta)) + (1.0 - self.beta1) * delta
        v = self.second(slots.get("v", torch.full_like(delta, first)), delta.square())
        root = v.sqrt() + self.tau
        return {"m": m, "v": v}, self.lr * torch.where(root > 0, m / root, m)  # both are 0 where tau and all Delta are

    @abstractmethod
    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """v after a round with Delta^2."""


@dataclass(frozen=True)
class FedAdagrad(Adaptive):
    """Its rate falls with the sum of all squared updates."""

    lr: float = 0.1
    beta1: float = 0.0
    tau: float = 0.01

    name = "fedadagrad"

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@dataclass(frozen=True)
class FedAdam(Adaptive):
    """beta2: of the running mean of squared updates."""

    beta2: float = 0.99

    name = "fedadam"

    def __post_init__(self) -> None:
        super().__post_init__()
        _fraction(self, "beta2")

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1.0 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """As FedAdam, but v falls slowly: by a share of the squared update, not of itself."""

    name = "fedyogi"

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1.0 - self.beta2) * square * (v - square).sign()


def _fraction(part: ServerOptimizer, name: str) -> None:
    if not 0.0 <= getattr(part, name) < 1.0:
        raise ValueError(f"{name} must be in [0, 1); got {getattr(part, name)}")
