"""FedDyn: a dynamic regulariser aligns the clients' optima with the global one (Acar et al., 2021, Algorithm 1).

With x the server's model, client k of the S in a round (of m) minimises

    L_k(w) - <h_k, w> + alpha / 2 |w - x|^2       and then     h_k <- h_k - alpha (w_k - x)

The server's h <- h - alpha / m sum_k (w_k - x), and its next model is mean_k w_k - h / alpha. Where this comes to rest,
every w_k is x, h_k is the gradient of L_k at x, and these gradients sum to 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everfed.core.client import synchronises
from everfed.core.legacy import (
    MODEL,
    Aggregator,
    Context,
    Data,
    Fitted,
    Mean,
    Message,
    Model,
    Optimizer,
    Part,
    Reducer,
    Slots,
    State,
    Step,
    Sum,
    Tree,
    refuse_personal,
)
from everfed.methods.aggregate.fedavg import refuse_pieces, replaced, sent
from everfed.methods.common.checks import positive


@dataclass(frozen=True)
class FedDyn(Aggregator):
    """alpha: of the regulariser; the paper tunes it in {0.1, 0.01, 0.001}."""

    alpha: float = 0.01

    name = "feddyn"

    def __post_init__(self) -> None:
        positive(self, "alpha")

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        refuse_personal(self, parts)
        refuse_pieces(self, parts)
        return ()

    # on the client ---------------------------------------------------------------------------------------------------
    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        gradient = gradient.add(step.params - step.received, alpha=self.alpha)
        own = step.state.get(self.name, {})
        return gradient - own["h"] if "h" in own else gradient

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Slots, Tree]:
        if not synchronises(ctx):
            return None, {}
        params = fitted.model["params"]
        change = self.alpha * (message[MODEL]["params"].to(params.device) - params)
        own = client.get(self.name, {})
        return {"h": own["h"].to(params.device) + change if own else change}, {"clients": 1}

    def upload(self, model: Model, message: Message, ctx: Context) -> Tree:
        return sent(model, ctx)

    # on the server ---------------------------------------------------------------------------------------------------
    def reducers(self) -> Mapping[str, Reducer]:
        return {"params": Mean(), "stats": Mean(), "counters": Mean(), "clients": Sum()}

    def aggregate(self, server: State, reduced: Tree, ctx: Context) -> Model:
        model = replaced(server[MODEL], reduced)
        if reduced.get("params") is None:
            return model
        h = self._h(server.get(self.name, {}), server[MODEL]["params"], reduced, ctx)
        return {**model, "params": reduced["params"] - h / self.alpha}

    def update_model(self, server: State, model: Model, ctx: Context) -> tuple[Slots, Model]:
        """Keeps x for `update`, which sees the new model only."""
        return {**server.get(self.name, {}), "before": server[MODEL]["params"]}, model

    def update(self, server: State, reduced: Tree, ctx: Context) -> Slots:
        own = server[self.name]
        if reduced.get("params") is None:
            return {key: value for key, value in own.items() if key != "before"}
        return {"h": self._h(own, own["before"], reduced, ctx)}

    def _h(self, own: Tree, before: Tensor, reduced: Tree, ctx: Context) -> Tensor:
        """h after a round from the model `before`."""
        mean = reduced["params"]
        h = own["h"].to(mean.device) if "h" in own else torch.zeros_like(mean)
        return h - self.alpha * float(reduced["clients"]) / ctx.facts.clients * (mean - before.to(mean.device))
