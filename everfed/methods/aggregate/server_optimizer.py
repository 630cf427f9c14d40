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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everfed.core.tree import on_device
from everfed.method import BEGIN, Cohort, CompositionError, Part, Phase, Server, Tree, When, option


def _rate(default: float) -> Any:
    return option(default, at_least=0, about="learning rate of the server")


def _fraction(default: float, about: str) -> Any:
    return option(default, at_least=0, below=1, about=about)


def _tau(default: float) -> Any:
    return option(default, at_least=0, about="added to the root, in units of Delta; the larger, the less adaptive")


@dataclass(frozen=True)
class ServerOptimizer(Part, ABC):
    lr: float = _rate(1.0)
    reset: bool = option(False, about="begin anew with every task: momentum of an earlier one moves nothing")

    def check(self, parts, optimizer):
        others = [part.name for part in parts if isinstance(part, ServerOptimizer)]
        if len(others) > 1:
            raise CompositionError(f"a method has one server optimiser at most; got {', '.join(others)}")

    def phases(self):
        return [Phase("reset-moments", Cohort.SERVER, BEGIN, When.BEFORE, update=self.forget)] if self.reset else []

    def forget(self, server: Server) -> None:
        server.state = {}

    def update(self, server: Server) -> None:
        aggregate = server.model["params"]
        delta = aggregate - server.before["params"].to(aggregate.device)
        if not delta.any():
            return
        server.state, step = self.step(on_device(server.state, aggregate.device), delta)
        # w + step, written so that a step of Delta gives the aggregate to the bit
        server.model = {**server.model, "params": aggregate + (step - delta)}

    @abstractmethod
    def step(self, state: Tree, delta: Tensor) -> tuple[Tree, Tensor]:
        """(state, what is added to the parameters); `state` is empty at first."""


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    momentum: float = _fraction(0.9, "beta")

    name = "fedavgm"

    def step(self, state: Tree, delta: Tensor) -> tuple[Tree, Tensor]:
        v = self.momentum * state["v"] + delta if state else delta
        return {"v": v}, self.lr * v


@dataclass(frozen=True)
class Adaptive(ServerOptimizer):
    beta1: float = _fraction(0.9, "of the running mean of updates")
    tau: float = _tau(0.1)
    initial: str = option(
        "tau2", one_of=("tau2", "zero"), about="v before the first round: tau2 (tau squared, as published) or zero"
    )

    def step(self, state: Tree, delta: Tensor) -> tuple[Tree, Tensor]:
        first = self.tau**2 if self.initial == "tau2" else 0.0
        m = self.beta1 * state.get("m", torch.zeros_like(delta)) + (1.0 - self.beta1) * delta
        v = self.second(state.get("v", torch.full_like(delta, first)), delta.square())
        root = v.sqrt() + self.tau
        return {"m": m, "v": v}, self.lr * torch.where(root > 0, m / root, m)  # both are 0 where tau and all Delta are

    @abstractmethod
    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """v after a round with Delta^2."""


@dataclass(frozen=True)
class FedAdagrad(Adaptive):
    """Its rate falls with the sum of all squared updates."""

    lr: float = _rate(0.1)
    beta1: float = _fraction(0.0, "of the running mean of updates")
    tau: float = _tau(0.01)

    name = "fedadagrad"

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@dataclass(frozen=True)
class FedAdam(Adaptive):
    beta2: float = _fraction(0.99, "of the running mean of squared updates")

    name = "fedadam"

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1.0 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """As FedAdam, but v falls slowly: by a share of the squared update, not of itself."""

    name = "fedyogi"

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1.0 - self.beta2) * square * (v - square).sign()
