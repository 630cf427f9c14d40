"""Optimisers on one flat vector, and how their learning rate moves over a task's rounds or steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.layout import Layout
from everfed.core.option import HasOptions, option
from everfed.kernels import load_kernels

kernel = load_kernels("everfed.kernels.adam")

KINDS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "linear", "exponential", "geometric", "cosine", "table")


@dataclass(frozen=True)
class ParameterGroup(HasOptions):
    """Parameters, by patterns of their names, with a rate or a weight decay of their own; None: the optimiser's."""

    match: Sequence[str]
    lr: float | None = option(None, at_least=0)
    weight_decay: float | None = option(None, at_least=0)

    option_prefix = "optimizer.groups."

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "match", tuple(self.match))
        if not self.match or not all(isinstance(pattern, str) for pattern in self.match):
            raise ValueError(f"optimizer.groups.match must be a list of patterns; got {list(self.match)}")

    def owns(self, parameter: str) -> bool:
        return any(fnmatchcase(parameter, pattern) for pattern in self.match)


@dataclass(frozen=True)
class Scales:
    """Per parameter of a vector, (P,): factor of the rate, and weight decay."""

    rate: Tensor
    decay: Tensor

    def within(self, span: slice) -> Scales:
        return Scales(self.rate[span], self.decay[span])


@dataclass(frozen=True)
class Optimizer(HasOptions):
    """Hyper-parameters only; the state is a dict of vectors that the caller keeps.

    kind: "sgd", "adam", or "adamw", whose weight decay is not part of the gradient. clip: the gradient's L2 norm over
    all parameters is cut to it, as torch.nn.utils.clip_grad_norm_ does; 0 for no limit. groups: parameters with a rate
    or weight decay of their own, by name; of several groups that match one the first counts.
    schedule: how lr moves over the rounds of a task: constant; linear, from lr towards 0
    (round i of R uses lr * (1 - i/R)); exponential, from lr at the first round to lr_end at the last; geometric
    and cosine, from lr to lr_end, which they would reach in round R; table, lr times the `factors`, which share the
    rounds of a task evenly among them: the last round always has the last one.
    warmup: in so many rounds of a task, or a share of one, lr rises linearly to its value; the schedule has the rest.
    by: "round", the rate is that of the round in all its steps, or "step": it moves with every local step.
    state: "fresh" starts anew every round, "kept" carries momentum and moments from round to round on the client,
    "task" does so within a task.
    """

    kind: str = option("sgd", one_of=KINDS)
    lr: float = option(0.1, at_least=0)
    momentum: float = option(0.0, at_least=0)
    weight_decay: float = option(0.0, at_least=0)
    beta1: float = option(0.9, at_least=0, below=1)
    beta2: float = option(0.999, at_least=0, below=1)
    eps: float = option(1e-8, above=0)
    schedule: str = option("constant", one_of=SCHEDULES)
    lr_end: float = option(1e-3, above=0)
    state: str = option("fresh", one_of=("fresh", "kept", "task"))
    factors: Sequence[float] = ()
    clip: float = option(0.0, at_least=0)
    warmup: float = option(0.0, at_least=0)
    by: str = option("round", one_of=("round", "step"))
    groups: Sequence[ParameterGroup] = ()

    option_prefix = "optimizer."

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "factors", tuple(self.factors))
        object.__setattr__(self, "groups", tuple(_as_group(group) for group in self.groups))
        if self.lr == 0 and any(group.lr for group in self.groups):
            raise ValueError("optimizer.groups: with lr = 0 no group can have a rate; give lr itself a value")
        if bool(self.factors) != (self.schedule == "table") or not all(factor >= 0 for factor in self.factors):
            raise ValueError(
                "optimizer.factors must be numbers of at least 0, some with schedule = 'table' and none otherwise; got "
                f"{list(self.factors)} with schedule = {self.schedule!r}"
            )

    def rate(self, index: float, rounds: float) -> float:
        """The learning rate of round `index` of a task of `rounds` rounds; a share of a round counts, too."""
        if index < self.warmup:
            done = index if self.by == "step" else index + 1  # a whole round is not spent at rate 0
            return self.lr * min(1.0, done / self.warmup)
        return self._scheduled(index - self.warmup, max(rounds - self.warmup, 1e-9))

    def _scheduled(self, index: float, rounds: float) -> float:
        if self.schedule == "linear":
            return self.lr * (1.0 - index / rounds)
        if self.schedule == "exponential" and self.lr > 0:
            return float(self.lr * (self.lr_end / self.lr) ** min(index / max(rounds - 1, 1), 1.0))
        if self.schedule == "geometric" and self.lr > 0:
            return float(self.lr * (self.lr_end / self.lr) ** (index / rounds))
        if self.schedule == "cosine":
            return self.lr_end + (self.lr - self.lr_end) * (1.0 + math.cos(math.pi * index / rounds)) / 2.0
        if self.schedule == "table":
            return self.lr * self.factors[-(-(math.floor(index) + 1) * len(self.factors) // math.ceil(rounds)) - 1]
        return self.lr

    def round_rate(self, index: int, rounds: int) -> float:
        """One learning rate for the whole round: that of its middle where it moves with the steps."""
        return self.rate(index + 0.5 if self.by == "step" else index, rounds)

    def rates(self, index: int, rounds: int, steps: int) -> np.ndarray:
        """(steps,) the learning rate of every local step in round `index`."""
        places = [index + (step / steps if self.by == "step" else 0.0) for step in range(steps)]
        return np.array([self.rate(place, rounds) for place in places])

    def scales(self, layout: Layout, device: torch.device) -> Scales | None:
        """The groups' factors and decays for every parameter; None without groups. Raises ValueError for a pattern that
        matches none."""
        if not self.groups:
            return None
        for group in self.groups:
            for pattern in group.match:
                if not any(fnmatchcase(entry.name, pattern) for entry in layout.params):
                    known = ", ".join(entry.name for entry in layout.params)
                    raise ValueError(f"optimizer.groups: {pattern!r} matches no parameter that trains: {known}")
        rate, decay = torch.ones(layout.size), torch.full((layout.size,), self.weight_decay)
        for entry in layout.params:
            own = slice(entry.start, entry.start + entry.size)
            found = next((group for group in self.groups if group.owns(entry.name)), None)
            if found is not None and found.lr is not None:
                rate[own] = found.lr / self.lr if self.lr else 1.0
            if found is not None and found.weight_decay is not None:
                decay[own] = found.weight_decay
        return Scales(rate.to(device), decay.to(device))

    def init(self, params: Tensor) -> dict[str, Tensor]:
        """Fresh state for a parameter vector."""
        if self.kind in ("adam", "adamw"):
            zero = torch.zeros_like(params)
            return {"m": zero, "v": zero.clone(), "t": torch.zeros((), dtype=torch.float64, device=params.device)}
        return {"momentum": torch.zeros_like(params)} if self.momentum else {}

    def apply(
        self, params: Tensor, gradient: Tensor, state: dict[str, Tensor], rate: Tensor, scales: Scales | None = None
    ) -> None:
        """One step in place. `rate` is a 0-d tensor, so that a captured step can be replayed with another."""
        pace = rate if scales is None else rate * scales.rate
        decay: float | Tensor = self.weight_decay if scales is None else scales.decay
        decays = bool(self.weight_decay) or scales is not None
        if self.clip:
            gradient = gradient * (self.clip / (torch.linalg.vector_norm(gradient) + 1e-6)).clamp(max=1.0)
        if decays and self.kind == "adamw":
            params.mul_(1.0 - pace * decay)
        elif decays:
            gradient = gradient + decay * params
        if self.kind != "sgd":
            self._adam(params, gradient, state, pace)
            return
        if self.momentum:
            gradient = state["momentum"].mul_(self.momentum).add_(gradient)
        params.addcmul_(gradient, pace, value=-1.0)

    def _adam(self, params: Tensor, gradient: Tensor, state: dict[str, Tensor], rate: Tensor) -> None:
        state["t"].add_(1.0)
        if self._has_kernel(params, gradient, state, rate):
            kernel.adam(params, gradient, state, rate, (self.beta1, self.beta2), self.eps)
            return
        m = state["m"].mul_(self.beta1).add_(gradient, alpha=1.0 - self.beta1)
        v = state["v"].mul_(self.beta2).addcmul_(gradient, gradient, value=1.0 - self.beta2)
        m_hat = m / (1.0 - self.beta1 ** state["t"])
        v_hat = v / (1.0 - self.beta2 ** state["t"])
        params.addcmul_(m_hat / (v_hat.sqrt() + self.eps), rate, value=-1.0)

    def _has_kernel(self, params: Tensor, gradient: Tensor, state: dict[str, Tensor], rate: Tensor) -> bool:
        vectors = (params, gradient, state["m"], state["v"])
        return (
            kernel is not None
            and params.is_cuda
            and all(v.dtype == torch.float32 and v.dim() == 1 and v.is_contiguous() for v in vectors)
            and rate.dtype == torch.float32
            and rate.dim() == 0  # without groups
            and 0.0 < self.beta1 < 1.0
            and 0.0 < self.beta2 < 1.0
        )


def _as_group(group: ParameterGroup | Mapping[str, Any]) -> ParameterGroup:
    return group if isinstance(group, ParameterGroup) else ParameterGroup(**group)
