"""Optimisers on one flat vector, and how their learning rate moves over a task's rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SCHEDULES = ("constant", "linear", "exponential", "geometric", "cosine", "table")


@dataclass(frozen=True)
class Optimizer:
    """Hyper-parameters only; the state is a dict of vectors that the caller keeps.

    kind: "sgd" or "adam". schedule: how lr moves over the rounds of a task: constant; linear, from lr towards 0
    (round i of R uses lr * (1 - i/R)); exponential, from lr at the first round to lr_end at the last; geometric
    and cosine, from lr to lr_end, which they would reach in round R; table, lr times the `factors`, which share the
    rounds of a task evenly among them: the last round always has the last one.
    state: "fresh" starts anew every round, "kept" carries momentum and moments from round to round on the client,
    "task" does so within a task.
    """

    kind: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    schedule: str = "constant"
    lr_end: float = 1e-3
    state: str = "fresh"
    factors: Sequence[float] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))
        for name, value, allowed in (
            ("kind", self.kind, ("sgd", "adam")),
            ("schedule", self.schedule, SCHEDULES),
            ("state", self.state, ("fresh", "kept", "task")),
        ):
            if value not in allowed:
                raise ValueError(f"optimizer.{name} must be one of {', '.join(allowed)}; got {value!r}")
        for name in ("lr", "momentum", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"optimizer.{name} must be at least 0; got {getattr(self, name)}")
        if bool(self.factors) != (self.schedule == "table") or not all(factor >= 0 for factor in self.factors):
            raise ValueError(
                "optimizer.factors must be numbers of at least 0, some with schedule = 'table' and none otherwise; got "
                f"{list(self.factors)} with schedule = {self.schedule!r}"
            )

    def rate(self, index: int, rounds: int) -> float:
        """The learning rate of round `index` of a task of `rounds` rounds."""
        if self.schedule == "linear":
            return self.lr * (1.0 - index / rounds)
        if self.schedule == "exponential" and self.lr > 0:
            return float(self.lr * (self.lr_end / self.lr) ** (index / max(rounds - 1, 1)))
        if self.schedule == "geometric" and self.lr > 0:
            return float(self.lr * (self.lr_end / self.lr) ** (index / rounds))
        if self.schedule == "cosine":
            return self.lr_end + (self.lr - self.lr_end) * (1.0 + math.cos(math.pi * index / rounds)) / 2.0
        if self.schedule == "table":
            return self.lr * self.factors[-(-(index + 1) * len(self.factors) // rounds) - 1]
        return self.lr

    def init(self, params: Tensor) -> dict[str, Tensor]:
        """Fresh state for a parameter vector."""
        if self.kind == "adam":
            zero = torch.zeros_like(params)
            return {"m": zero, "v": zero.clone(), "t": torch.zeros((), dtype=torch.float64, device=params.device)}
        return {"momentum": torch.zeros_like(params)} if self.momentum else {}

    def apply(self, params: Tensor, gradient: Tensor, state: dict[str, Tensor], rate: Tensor) -> None:
        """One step in place. `rate` is a 0-d tensor, so that a captured step can be replayed with another."""
        if self.weight_decay:
            gradient = gradient + self.weight_decay * params
        if self.kind == "adam":
            self._adam(params, gradient, state, rate)
            return
        if self.momentum:
            gradient = state["momentum"].mul_(self.momentum).add_(gradient)
        params.addcmul_(gradient, rate, value=-1.0)

    def _adam(self, params: Tensor, gradient: Tensor, state: dict[str, Tensor], rate: Tensor) -> None:
        state["t"].add_(1.0)
        m = state["m"].mul_(self.beta1).add_(gradient, alpha=1.0 - self.beta1)
        v = state["v"].mul_(self.beta2).addcmul_(gradient, gradient, value=1.0 - self.beta2)
        m_hat = m / (1.0 - self.beta1 ** state["t"])
        v_hat = v / (1.0 - self.beta2 ** state["t"])
        params.addcmul_(m_hat / (v_hat.sqrt() + self.eps), rate, value=-1.0)
