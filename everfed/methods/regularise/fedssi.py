"""FedSSI: synergistic synaptic intelligence (rehearsal-free continual federated learning, ICML 2025).

Importance comes from a personalised surrogate model v that each client trains on the task that ends, between its own
data and the global model w:

    v <- v - eta * (grad L(v) + q (v - w)),   q = (1 - lambda) / (2 lambda),   v = w at first      (Eq. 5)

The contribution s is accumulated along the path of v, with the gradient of the data loss alone; v is then thrown away.
The objective and the rule for the importance are those of `si.py`. Nothing but models crosses the network, and no data
is kept: the surrogate needs a task's data at its very end and never afterwards.

The two displacements react to lambda in opposite ways; choose on validation data. Under "psm" Omega D is the drop of
the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from everfed.method import Client, Gradient, Optimizer, Part, Step, option
from everfed.methods.regularise.si import PathRegulariser, begin_step, end_step, scratch


@dataclass(frozen=True)
class FedSSI(PathRegulariser):
    lam: float = option(
        0.5, above=0, below=1, about="lambda, from the global model (near 0) to purely local training (near 1)"
    )
    displacement: str = option(
        "global",
        one_of=("global", "psm"),
        about="D: how far the global model moved in the task (Eq. 3), or the surrogate",
    )
    psm_epochs: int | None = option(
        None,
        at_least=0,
        about="epochs of the surrogate over the task's data; unset: as local training; 0: none",
    )
    psm_lr: float = option(0.0, at_least=0, about="eta; 0: the local learning rate at the beginning of a task")
    psm_grad_reduction: str = option("mean", one_of=("mean", "sum"), about="over a minibatch; Eq. 5 writes a sum")
    psm_participation: str = option(
        "all",
        one_of=("all", "selected"),
        about="who updates its importance at a task's end: all, or those selected for the next round",
    )

    name = "fedssi"

    def gradient(self, step: Step, gradient: Gradient) -> Gradient | Tensor:
        return self.penalty(step, gradient)

    def path(self, client: Client) -> tuple[Tensor, Tensor]:
        w = client.model["params"]
        moved = w - client.state["anchor"]
        if len(client.data) == 0 or self.psm_epochs == 0 or not self._takes_part(client):
            return torch.zeros_like(w), moved.square()
        v, contribution = self.train_surrogate(client)
        return contribution, (v - w if self.displacement == "psm" else moved).square()

    def _takes_part(self, client: Client) -> bool:
        """Does this client update its importance now?"""
        return self.psm_participation == "all" or client.trainer.stream.takes_part(client.id, client.round + 1)

    def train_surrogate(self, client: Client) -> tuple[Tensor, Tensor]:
        """(v, s): the surrogate's parameters after training and the contribution along its path."""
        rate, w = self.psm_lr or client.options.optimizer.lr, client.model["params"]
        check_rate("fedssi.lam", self.lam, rate, "fedssi.psm_lr")
        part = _surrogate(proximity(self.lam), self.psm_grad_reduction)
        fitted = client.fit(
            (part,),
            state={part.name: {"contribution": torch.zeros_like(w), **scratch(w)}},
            rate=rate,
            epochs=self.psm_epochs,
            optimizer=Optimizer("sgd", lr=rate),
            tag="surrogate",
        )
        return fitted.model["params"], fitted.state[part.name]["contribution"]


def proximity(lam: float) -> float:
    """q(lambda): how strongly a model between the local and the global one is drawn to the global one."""
    return (1.0 - lam) / (2.0 * lam)


def check_rate(option: str, lam: float, rate: float, remedy: str) -> None:
    """Refuse a rate at which the pull q alone makes such a model diverge. option, remedy: the names of lambda and of
    the rate."""
    if rate * proximity(lam) >= 2.0:
        raise ValueError(
            f"{option} = {lam}: the surrogate diverges at learning rate {rate}; it must exceed "
            f"{rate / (4.0 + rate):.6g}, or lower {remedy}"
        )


@dataclass(frozen=True)
class Surrogate(Part):
    """Eq. 5 as a gradient rule, and the sum of Eq. 6 beside it. The global model is `step.received`."""

    q: float = 0.5
    reduction: str = "mean"

    name = "surrogate"

    def gradient(self, step: Step, gradient: Gradient) -> Tensor:
        vector = gradient.vector * len(step.y) if self.reduction == "sum" else gradient.vector
        begin_step(step.state, step.params, vector)
        return vector.add(step.params - step.received, alpha=self.q)  # Eq. 5

    def after(self, step: Step) -> None:
        end_step(step.state, step.params)


@cache
def _surrogate(q: float, reduction: str) -> Surrogate:
    """One object per setting, because engines keep captured steps by part."""
    return Surrogate(q, reduction)
