"""FL+EWC: elastic weight consolidation on every client (Kirkpatrick et al., 2017; online as in Schwarz et al., 2018;
federated as in the FedSSI paper).

At a task's end each client computes the diagonal Fisher information of its data at the global model w^t:

    F <- gamma F + mean over samples of (d log p(y|x) / d w_i)^2
    L(w) = L_data(w) + (beta / 2) sum_i F_i (w_i - w^{t-1}_i)^2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from everfed.core.legacy import END, MODEL, Cohort, Context, Data, Message, Part, Phase, State, Step, Tree, on_device
from everfed.methods.common.checks import at_least, one_of
from everfed.methods.regularise.fisher import FISHER_KINDS, diagonal_fisher


@dataclass(frozen=True)
class EWC(Part):
    """weight: beta (the FedSSI paper gives none; tune it in {1, 10, 100, 1000, 5000}). gamma: how much of the Fisher
    information of earlier tasks is kept. fisher: "sample" squares the gradient of each sample, "batch" that of
    minibatch means (cheaper, smaller by about the batch size). fisher_samples: at most so many samples, 0 for all."""

    weight: float = 100.0
    gamma: float = 1.0
    fisher: str = "sample"
    fisher_samples: int = 0

    name = "ewc"

    def __post_init__(self) -> None:
        at_least(self, 0, "weight", "fisher_samples")
        if not 0.0 <= self.gamma <= 1.0:
            raise ValueError(f"gamma must be in [0, 1]; got {self.gamma}")
        one_of(self, fisher=FISHER_KINDS)

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("fisher", Cohort.BOUNDARY, END, in_last_round=False, run=self._consolidate),)

    def _consolidate(self, client: State, message: Message, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        """A client without data of this task keeps its Fisher information and gets the new anchor."""
        model = on_device(message[MODEL], ctx.train.device)
        own = on_device(client.get(self.name, {}), ctx.train.device)
        fisher = own.get("fisher", torch.zeros_like(model["params"]))
        if len(data):
            chosen = ctx.rng("fisher").permutation(len(data))[: self.fisher_samples or len(data)]
            fisher = self.gamma * fisher + diagonal_fisher(ctx, model, data.take(chosen), self.fisher)
        return {"fisher": fisher, "anchor": model["params"]}, {}

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        own = step.state.get(self.name, {})
        if "fisher" not in own or self.weight == 0:
            return gradient
        return gradient.addcmul(own["fisher"], step.params - own["anchor"], value=self.weight)
