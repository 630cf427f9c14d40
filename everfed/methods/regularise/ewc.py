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

from everfed.core.tree import on_device
from everfed.method import END, Client, Cohort, Gradient, Part, Phase, Step, option
from everfed.methods.regularise.fisher import FISHER, diagonal_fisher


@dataclass(frozen=True)
class EWC(Part):
    weight: float = option(
        100.0, at_least=0, about="beta; the FedSSI paper gives none, tune it in {1, 10, 100, 1000, 5000}"
    )
    gamma: float = option(
        1.0, at_least=0, at_most=1, about="how much of the Fisher information of earlier tasks is kept"
    )
    fisher: str = option("sample", **FISHER)
    fisher_samples: int = option(0, at_least=0, about="samples of a task that it is computed on, at most; 0: all")

    name = "ewc"

    def phases(self):
        return [Phase("fisher", Cohort.BOUNDARY, END, in_last_round=False, run=self.consolidate)]

    def consolidate(self, client: Client) -> None:
        """A client without data of this task keeps its Fisher information and gets the new anchor."""
        model, own = on_device(client.model, client.device), on_device(client.state, client.device)
        fisher = own.get("fisher", torch.zeros_like(model["params"]))
        if count := len(client.data):
            chosen = client.rng("fisher").permutation(count)[: self.fisher_samples or count]
            fisher = self.gamma * fisher + diagonal_fisher(client, model, client.data.take(chosen), self.fisher)
        client.state = {"fisher": fisher, "anchor": model["params"]}

    def gradient(self, step: Step, gradient: Gradient) -> Gradient | Tensor:
        own = step.state
        if "fisher" not in own or self.weight == 0:
            return gradient
        return gradient.vector.addcmul(own["fisher"], step.params - own["anchor"], value=self.weight)
