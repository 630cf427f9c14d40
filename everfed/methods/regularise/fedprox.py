"""FedProx: local training stays near the received model (Li et al., 2020)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from everfed.core.legacy import Optimizer, Part, Step
from everfed.methods.common.checks import at_least


@dataclass(frozen=True)
class FedProx(Part):
    """mu: weight of (mu/2) ||w - w_global||^2. The papers that compare with FedProx do not give it; tune it in
    {0.001, 0.01, 0.1, 0.5, 1}."""

    mu: float = 0.01

    name = "fedprox"

    def __post_init__(self) -> None:
        at_least(self, 0, "mu")

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        if optimizer.lr * self.mu >= 2:
            return (f"fedprox.mu = {self.mu}: plain SGD diverges when lr * mu reaches 2; lr is {optimizer.lr}",)
        return ()

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        # the term's gradient, added before momentum: the same as adding the term to the loss under plain SGD
        return gradient.add(step.params - step.received, alpha=self.mu) if self.mu else gradient
