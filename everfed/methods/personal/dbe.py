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
from typing import Any, cast

import torch
from torch import Tensor, nn

from everfed.core.layout import EXTRAS, Extras, registered
from everfed.core.legacy import (
    FIRST,
    MODEL,
    AddsParameters,
    Cohort,
    Context,
    Data,
    Entry,
    Mean,
    Message,
    Model,
    Once,
    Optimizer,
    Part,
    Phase,
    Position,
    Server,
    Slots,
    State,
    Step,
    Tree,
)
from everfed.methods.common.checks import at_least
from everfed.methods.common.features import head_weight, through_head


@dataclass(frozen=True)
class DBE(AddsParameters, Part):
    """weight: kappa_r. momentum: of the running mean."""

    weight: float = 0.0
    momentum: float = 0.1

    name = "dbe"

    def __post_init__(self) -> None:
        at_least(self, 0, "weight")
        if not 0.0 < self.momentum <= 1.0:
            raise ValueError(f"momentum must be above 0 and at most 1; got {self.momentum}")

    def is_personal(self, parameter: str) -> bool:
        return parameter == f"{EXTRAS}vector"

    def parameters(self, server: Server) -> dict[str, Tensor]:
        """c_k, as long as a feature vector."""
        ctx = server.context
        return {"vector": torch.zeros(head_weight(ctx.facts.layout).shape[1])}

    def forward(self, module: nn.Module, x: Tensor, own: Tree, message: Tree) -> Tensor:
        vector = cast(Extras, module.extras)[self.name]["vector"]
        outputs, features = through_head(module, x, None if "alone" in own else lambda f: f + vector)  # Eq. 4
        if module.training and "mean" in own:
            own.setdefault("batch", features.float().mean(0))  # for `loss`; the first of a step is the real batch
        return outputs

    # the consensus -----------------------------------------------------------------------------------------------
    def phases(self) -> tuple[Phase, ...]:
        consensus = Phase(
            "features",
            cohort=Cohort.ALL,
            when=FIRST,
            position=Position.BEFORE,
            reduce={"mean": Mean(weighted=True)},
            run=self._features,
            update=self._consensus,
        )
        return (consensus,) if self.weight else ()

    def _features(self, client: State, message: Message, data: Data, ctx: Context) -> tuple[None, Tree]:
        """One local training without c_k, of which only the running mean is kept."""
        if len(data) == 0:
            return None, {}
        model = message[MODEL]
        mean = self._zeros(ctx, model)
        state = {self.name: {"mean": mean, "alone": torch.ones_like(mean)}}
        fitted = ctx.train.fit(ctx, (self,), model, model["params"], state, {}, data, tag="features")
        return None, {"mean": fitted.state[self.name]["mean"]}

    def _consensus(self, server: State, reduced: Tree, ctx: Context) -> Slots:
        return None if reduced.get("mean") is None else {"mean": reduced["mean"]}

    def broadcast(self, server: State, ctx: Context) -> dict[str, Any]:
        held = server.get(self.name)
        return {"mean": Once("consensus", held["mean"])} if held else {}

    def receive(self, client: State, message: Message, model: Model, data: Data, ctx: Context) -> tuple[Slots, Model]:
        """The running mean begins anew with every local training. rate: of c_k, unless the optimiser is plain SGD."""
        own: Tree = {"mean": self._zeros(ctx, model)} if self.weight else {}
        if not _plain_sgd(ctx.options.optimizer):
            own["rate"] = torch.tensor(ctx.rate, device=model["params"].device)
        return own or None, model

    def _zeros(self, ctx: Context, model: Model) -> Tensor:
        return torch.zeros(head_weight(ctx.facts.layout).shape[1], device=model["params"].device)

    # a step ------------------------------------------------------------------------------------------------------
    def loss(self, step: Step) -> Tensor | None:
        consensus = step.message.get(self.name, {}).get("mean")
        if consensus is None or not self.weight:
            return None
        return self.weight * 0.5 * (self._running(step) - consensus).square().mean()  # Eq. 5

    def _running(self, step: Step) -> Tensor:
        own = step.state[self.name]
        return (1.0 - self.momentum) * own["mean"] + self.momentum * own["batch"]

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        rate = step.state.get(self.name, {}).get("rate")
        if rate is not None:
            vector = self._entry(step)
            step.handed[self.name] = vector.view(step.params) - rate * vector.view(gradient)
        return gradient

    def _entry(self, step: Step) -> Entry:
        return step.layout.param(registered(self.name, "vector", personal=True))

    def after(self, step: Step) -> None:
        own = step.state.get(self.name, {})
        if self.name in step.handed:  # in place of what the run's optimiser made of c_k
            self._entry(step).view(step.params).copy_(step.handed[self.name])
        if "batch" in own:
            own["mean"].copy_(self._running(step).detach())
            del own["batch"]


def _plain_sgd(optimizer: Optimizer) -> bool:
    further = (optimizer.momentum, optimizer.weight_decay, optimizer.clip, optimizer.groups)
    return optimizer.kind == "sgd" and optimizer.by == "round" and not any(further)
