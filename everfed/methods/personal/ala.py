"""FedALA: adaptive local aggregation (Zhang et al., 2023).

A client does not take over the global model theta_g as it is: in the upper layers it starts from a mixture with its own
last model theta_k, weighted element by element,

    theta^ = theta_k + W (.) (theta_g - theta_k),   W in [0, 1]                                       (Eq. 2)

and learns W on a part of its current data, the model itself frozen:

    W <- clip(W - eta * grad_theta^ L (.) (theta_g - theta_k))                                        (Eq. 3)

The lower layers are the global ones. Then it trains as usual, and the server averages. It is scored with its mixture,
W as it was last learned.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from everfed.core.legacy import (
    Context,
    Data,
    Fitted,
    Message,
    Model,
    Optimizer,
    Part,
    Personal,
    Slots,
    State,
    Step,
    Tree,
)
from everfed.methods.common.checks import at_least
from everfed.methods.common.features import network, span


@dataclass(frozen=True)
class ALA(Personal):
    """layers: p, how many of the last parameter tensors are mixed (2: weight and bias of the head; 0: all). eta: step
    size of W. share: of the data that W is learned on, in one piece. The first time W is learned until the deviation of
    the mean losses of the last `window` epochs is below `threshold`, at most `max_epochs`; later for one epoch."""

    layers: int = 2
    eta: float = 1.0
    share: float = 0.8
    window: int = 10
    threshold: float = 0.1
    max_epochs: int = 100

    name = "ala"

    def __post_init__(self) -> None:
        at_least(self, 0, "layers", "eta", "threshold")
        at_least(self, 1, "max_epochs")
        at_least(self, 2, "window")
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share must be above 0 and at most 1; got {self.share}")

    def upper(self, ctx: Context) -> slice:
        """Where the mixed tensors lie in a parameter vector."""
        entries = network(ctx.facts.layout)
        return span(entries[-self.layers :] if self.layers else entries)

    def start(self, client: State, message: Message, model: Model, data: Data, ctx: Context) -> tuple[Slots, Model]:
        own = client.get(self.name, {})
        if "own" not in own:  # it has no model of its own yet
            return None, model
        where = self.upper(ctx)
        gap = model["params"][where] - own["own"].to(model["params"].device)
        if not gap.any():
            return None, model
        own = {**own, "weights": self._learn(own, gap, model, data, ctx)}
        return own, self.personalise({self.name: own}, message, model, ctx)

    def _learn(self, own: Tree, gap: Tensor, model: Model, data: Data, ctx: Context) -> Tensor:
        """W after learning on the client's data."""
        first = "weights" not in own
        weights = torch.ones_like(gap) if first else own["weights"].to(gap.device)
        chosen, losses = self._piece(data, ctx), list[float]()
        for epoch in range(self.max_epochs if first else 1):
            weights, loss = self._epoch(weights, own["own"].to(gap.device), gap, model, chosen, epoch, ctx)
            losses.append(loss)
            if len(losses) >= self.window and float(np.std(losses[-self.window :])) < self.threshold:
                break
        return weights

    def _piece(self, data: Data, ctx: Context) -> Data:
        """`share` of the data: consecutive samples from a random place on."""
        count = max(1, int(self.share * len(data)))
        begin = int(ctx.rng("piece").integers(0, len(data) - count + 1))
        return data.take(np.arange(begin, begin + count))

    def _epoch(
        self, weights: Tensor, mine: Tensor, gap: Tensor, model: Model, data: Data, epoch: int, ctx: Context
    ) -> tuple[Tensor, float]:
        """One pass: (W, mean loss). Nothing but W and the mixture moves, so the optimiser's rate is 0."""
        where = self.upper(ctx)
        inner = _mixing(self.eta, where.start, where.stop)
        mixed = _mixed(model, where, mine + weights * gap)
        state = {inner.name: {"weights": weights, "own": mine, "gap": gap}}
        fitted = ctx.train.fit(
            ctx.at(rate=0.0),
            (inner,),
            mixed,
            mixed["params"],
            state,
            {},
            data,
            epochs=1,
            optimizer=Optimizer("sgd", lr=0.0),
            tag=f"weights {epoch}",
        )
        return fitted.state[inner.name]["weights"], float(fitted.loss) / max(fitted.steps, 1)

    def personalise(self, client: State, message: Message, model: Model, ctx: Context) -> Model:
        """The mixture; the global model as it is before there is one."""
        own = client.get(self.name, {})
        if "weights" not in own:
            return model
        where, params = self.upper(ctx), model["params"]
        mine, weights = own["own"].to(params.device), own["weights"].to(params.device)
        return _mixed(model, where, mine + weights * (params[where] - mine))  # Eq. 2

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        """Keep what the next mixture needs of the trained model: its upper layers."""
        return {**client.get(self.name, {}), "own": fitted.model["params"][self.upper(ctx)].clone()}, {}


@dataclass(frozen=True)
class Mixing(Part):
    """Eq. 3 as a training step: the gradient moves W, and W moves the mixture."""

    eta: float = 1.0
    begin: int = 0
    end: int = 0

    name = "ala-weights"
    changes = frozenset({"weights"})

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        own = step.state[self.name]
        own["weights"].addcmul_(gradient[self.begin : self.end], own["gap"], value=-self.eta).clamp_(0.0, 1.0)
        return torch.zeros_like(gradient)

    def after(self, step: Step) -> None:
        own = step.state[self.name]
        step.params[self.begin : self.end].copy_(own["own"] + own["weights"] * own["gap"])
        step.replica.refresh()


@cache
def _mixing(eta: float, begin: int, end: int) -> Mixing:
    """One object per setting, so that an engine that keeps captured steps per part finds them again."""
    return Mixing(eta, begin, end)


def _mixed(model: Model, where: slice, upper: Tensor) -> Model:
    params = model["params"].clone()
    params[where] = upper
    return {**model, "params": params}
