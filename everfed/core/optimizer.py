"""Optimisers on one flat vector, and how their learning rate moves over a task's rounds or steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor

from everfed.core.layout import Layout
from everfed.core.option import OptimizerOptions
from everfed.kernels import load_kernels

kernel = load_kernels("everfed.kernels.adam")


@dataclass(frozen=True)
class Scales:
    """Per parameter of a vector, (P,): factor of the rate, and weight decay."""

    rate: Tensor
    decay: Tensor

    def within(self, span: slice) -> Scales:
        return Scales(self.rate[span], self.decay[span])


@dataclass(frozen=True)
class Optimizer(OptimizerOptions):
    """Hyper-parameters only; the state is a dict of vectors that the caller keeps."""

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
