"""FedDBE: domain bias eliminator (Zhang et al., 2023).

Between base f and head h every client adds a vector of its own, which takes up what is peculiar to its data:

    prediction = h(f(x) + c_k)                                                                        (Eq. 4)

c_k is trained with the model, by plain SGD at the round's rate whatever the run's optimiser is (so the authors' code),
never sent, and used when the client is scored. Optionally the mean feature is drawn to a consensus m, fixed before the
first round: the data-weighted mean of the clients' running feature means after one local training without c_k. The term
is

    weight * mean_j (r_j - m_j)^2 / 2,   r <- (1 - momentum) r + momentum * (mean feature of the batch)  (Eq. 5)

with r reset at each local training. The published configurations have weight 0; then nothing reads m, and the
initialisation is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from everfed.core.layout import EXTRAS, Extras, registered
from everfed.method import (
    FIRST,
    AddsParameters,
    Cached,
    Client,
    Cohort,
    Entry,
    Gradient,
    Mean,
    Optimizer,
    Part,
    Phase,
    Server,
    Step,
    Tree,
    When,
    option,
)
from everfed.methods.common.layers import head_weight, through_head


@dataclass(frozen=True)
class DBE(AddsParameters, Part):
    weight: float = option(0.0, at_least=0, about="kappa_r, the weight of Eq. 5")
    momentum: float = option(0.1, above=0, at_most=1, about="of the running mean")

    name = "dbe"

    def is_personal(self, parameter: str) -> bool:
        return parameter == f"{EXTRAS}vector"

    def parameters(self, server: Server) -> dict[str, Tensor]:
        """c_k, as long as a feature vector."""
        return {"vector": torch.zeros(head_weight(server.layout).shape[1])}

    def forward(self, module: nn.Module, x: Tensor, state: Tree, message: Tree) -> Tensor:
        vector = cast(Extras, module.extras)[self.name]["vector"]
        outputs, features = through_head(module, x, None if "alone" in state else lambda f: f + vector)  # Eq. 4
        if module.training and "mean" in state:
            state.setdefault("batch", features.float().mean(0))  # for `loss`; the first of a step is the real batch
        return outputs

    # the consensus -----------------------------------------------------------------------------------------------
    def phases(self):
        consensus = Phase(
            "features",
            cohort=Cohort.ALL,
            rounds=FIRST,
            when=When.BEFORE,
            reduce={"mean": Mean(weighted=True)},
            run=self._features,
            update=self._consensus,
        )
        return (consensus,) if self.weight else ()

    def _features(self, client: Client):
        """One local training without c_k, of which only the running mean is kept."""
        if len(client.data) == 0:
            return {}
        mean = _zeros(client)
        fitted = client.fit((self,), state={self.name: {"mean": mean, "alone": torch.ones_like(mean)}}, tag="features")
        return {"mean": fitted.state[self.name]["mean"]}

    def _consensus(self, server: Server) -> None:
        if server.reduced.get("mean") is not None:
            server.state = {"mean": server.reduced["mean"]}

    def broadcast(self, server: Server):
        return {"mean": Cached("consensus", server.state["mean"])} if server.state else {}

    def receive(self, client: Client) -> None:
        """The running mean begins anew with every local training. rate: of c_k, unless the optimiser is plain SGD."""
        if self.weight:
            client.state["mean"] = _zeros(client)
        if not _plain_sgd(client.options.optimizer):
            client.state["rate"] = torch.tensor(client.rate, device=client.model["params"].device)

    # a step ------------------------------------------------------------------------------------------------------
    def loss(self, step: Step) -> Tensor | None:
        consensus = step.message.get("mean")
        if consensus is None or not self.weight:
            return None
        return self.weight * 0.5 * (self._running(step.state) - consensus).square().mean()  # Eq. 5

    def _running(self, own: Tree) -> Tensor:
        return (1.0 - self.momentum) * own["mean"] + self.momentum * own["batch"]

    def gradient(self, step: Step, gradient: Gradient) -> Gradient:
        if "rate" in step.state:
            vector = self._entry(step)
            step.handed["vector"] = vector.view(step.params) - step.state["rate"] * vector.view(gradient.vector)
        return gradient

    def _entry(self, step: Step) -> Entry:
        return step.layout.param(registered(self.name, "vector", personal=True))

    def after(self, step: Step) -> None:
        own = step.state
        if "vector" in step.handed:  # in place of what the run's optimiser made of c_k
            self._entry(step).view(step.params).copy_(step.handed["vector"])
        if "batch" in own:
            own["mean"].copy_(self._running(own).detach())
            del own["batch"]


def _zeros(client: Client) -> Tensor:
    return torch.zeros(head_weight(client.layout).shape[1], device=client.model["params"].device)


def _plain_sgd(optimizer: Optimizer) -> bool:
    further = (optimizer.momentum, optimizer.weight_decay, optimizer.clip, optimizer.groups)
    return optimizer.kind == "sgd" and optimizer.by == "round" and not any(further)
