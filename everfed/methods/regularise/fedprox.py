"""FedProx: local training stays near the received model (Li et al., 2020).

The papers that compare with FedProx do not give mu; tune it in {0.001, 0.01, 0.1, 0.5, 1}.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from everfed.method import Gradient, Part, Step, option


@dataclass(frozen=True)
class FedProx(Part):
    mu: float = option(0.01, at_least=0, about="weight of (mu/2) ||w - w_global||^2")

    name = "fedprox"

    def check(self, parts, optimizer):
        if optimizer.lr * self.mu >= 2:
            return (f"fedprox.mu = {self.mu}: plain SGD diverges when lr * mu reaches 2; lr is {optimizer.lr}",)
        return ()

    def gradient(self, step: Step, gradient: Gradient) -> Gradient | Tensor:
        # the term's gradient, added before momentum: the same as adding the term to the loss under plain SGD
        return gradient.vector.add(step.params - step.received, alpha=self.mu) if self.mu else gradient
