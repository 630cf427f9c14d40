"""FedSSI: synergistic synaptic intelligence (rehearsal-free continual federated learning, ICML 2025).

Importance comes from a personalised surrogate model v that each client trains on the task that ends, between its own
data and the global model w:

    v <- v - eta * (grad L(v) + q (v - w)),   q = (1 - lambda) / (2 lambda),   v = w at first      (Eq. 5)

The contribution s is accumulated along the path of v, with the gradient of the data loss alone; v is then thrown away.
The objective and the rule for the importance are those of `path.py`. Nothing but models crosses the network, and no
data is kept: the surrogate needs a task's data at its very end and never afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from everfed.core.legacy import Context, Data, Model, Optimizer, Part, Step, Tree
from everfed.methods.common.checks import at_least, one_of
from everfed.methods.regularise.path import PathRegulariser, begin_step, end_step, scratch

DISPLACEMENTS = ("global", "psm")


def proximity(lam: float) -> float:
    """q(lambda): how strongly the surrogate is drawn to the global model; 0 < lambda < 1."""
    if not 0.0 < lam < 1.0:
        raise ValueError(f"lam must lie between 0 and 1, both excluded; got {lam}")
    return (1.0 - lam) / (2.0 * lam)


@dataclass(frozen=True)
class FedSSI(PathRegulariser):
    """lam: lambda, from the global model (near 0) to purely local training (near 1). displacement: what s is divided
    by: how far the "global" model moved in the task (the paper's Eq. 3) or the surrogate ("psm": Omega D is then the
    drop of the loss). They react to lambda in opposite ways; choose on validation data.

    psm_epochs: passes of the surrogate over the task's data (None: as many as local training; 0: no surrogate).
    psm_lr: eta (0: the local learning rate at the beginning of a task). psm_grad_reduction: "mean" or "sum" over a
    minibatch (Eq. 5 writes a sum). psm_participation: "all" clients update their importance at a task's end, or only
    those "selected" for the next round; every client gets the new anchor.
    """

    lam: float = 0.5
    displacement: str = "global"
    psm_epochs: int | None = None
    psm_lr: float = 0.0
    psm_grad_reduction: str = "mean"
    psm_participation: str = "all"

    name = "fedssi"

    def __post_init__(self) -> None:
        super().__post_init__()
        proximity(self.lam)
        one_of(self, displacement=DISPLACEMENTS, psm_grad_reduction=("mean", "sum"))
        one_of(self, psm_participation=("all", "selected"))
        at_least(self, 0, "psm_epochs", "psm_lr")

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        return self.penalty(step, gradient)

    def path(self, own: Tree, model: Model, data: Data, ctx: Context) -> tuple[Tensor, Tensor]:
        w = model["params"]
        moved = w - own["anchor"]
        if len(data) == 0 or self.psm_epochs == 0 or not self._takes_part(ctx):
            return torch.zeros_like(w), moved.square()
        v, contribution = self.train_surrogate(model, data, ctx)
        return contribution, (v - w if self.displacement == "psm" else moved).square()

    def train_surrogate(self, model: Model, data: Data, ctx: Context) -> tuple[Tensor, Tensor]:
        """(v, s): the surrogate's parameters after training and the contribution along its path."""
        rate = self.psm_lr or ctx.options.optimizer.lr
        self._check_rate(rate)
        inner = _surrogate(proximity(self.lam), self.psm_grad_reduction)
        slots = {"contribution": torch.zeros_like(model["params"]), **scratch(model["params"])}
        fitted = ctx.train.fit(
            ctx.at(rate=rate),
            (inner,),
            model,
            model["params"],
            {inner.name: slots},
            {},
            data,
            epochs=self.psm_epochs,
            optimizer=Optimizer("sgd", lr=rate),
            tag="surrogate",
        )
        return fitted.model["params"], fitted.state[inner.name]["contribution"]

    def _check_rate(self, rate: float) -> None:
        if rate * proximity(self.lam) >= 2.0:
            raise ValueError(
                f"fedssi.lam = {self.lam}: the surrogate diverges at learning rate {rate}; lam must exceed "
                f"{rate / (4.0 + rate):.6g}, or lower fedssi.psm_lr"
            )

    def _takes_part(self, ctx: Context) -> bool:
        """Does this client update its importance now?"""
        if self.psm_participation == "all":
            return True
        return ctx.train.stream.takes_part(ctx.client, ctx.round + 1)


@dataclass(frozen=True)
class Surrogate(Part):
    """Eq. 5 as a gradient rule, and the sum of Eq. 6 beside it. The global model is `step.received`."""

    q: float = 0.5
    reduction: str = "mean"

    name = "surrogate"

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        if self.reduction == "sum":
            gradient = gradient * len(step.y)
        begin_step(step.state[self.name], step.params, gradient)
        return gradient.add(step.params - step.received, alpha=self.q)  # Eq. 5

    def after(self, step: Step) -> None:
        end_step(step.state[self.name], step.params)


@cache
def _surrogate(q: float, reduction: str) -> Surrogate:
    """One object per setting, because engines keep captured steps by part."""
    return Surrogate(q, reduction)
