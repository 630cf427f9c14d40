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

import numpy as np
import torch
from torch import Tensor

from everfed.method import Client, Data, Gradient, Layout, Model, Optimizer, Part, Personal, Step, option
from everfed.methods.common.layers import network, span


@dataclass(frozen=True)
class ALA(Personal):
    """The first time W is learned until the mean loss of its epochs is steady; later for one epoch."""

    layers: int = option(
        2, at_least=0, about="how many of the last parameter tensors are mixed (2: weight and bias of the head; 0: all)"
    )
    eta: float = option(1.0, at_least=0, about="step size of W")
    share: float = option(0.8, above=0, at_most=1, about="share of the data that W is learned on, in one piece")
    window: int = option(10, at_least=2, about="how many epochs' losses must be steady, the first time")
    threshold: float = option(0.1, at_least=0, about="deviation of these losses below which they are steady")
    max_epochs: int = option(100, at_least=1, about="most epochs, the first time")

    name = "ala"

    def upper(self, layout: Layout) -> slice:
        """Where the mixed tensors lie in a parameter vector."""
        entries = network(layout)
        return span(entries[-self.layers :] if self.layers else entries)

    def start(self, client: Client) -> None:
        if "own" not in client.state:  # it has no model of its own yet
            return
        upper = client.model["params"][self.upper(client.layout)]
        gap = upper - client.state["own"].to(upper.device)
        if gap.any():
            client.state["weights"] = self._learn(client, gap)
            client.model = self.personalise(client)

    def _learn(self, client: Client, gap: Tensor) -> Tensor:
        """W after learning on the client's data."""
        first = "weights" not in client.state
        weights = torch.ones_like(gap) if first else client.state["weights"].to(gap.device)
        chosen, losses = self._piece(client), list[float]()
        for epoch in range(self.max_epochs if first else 1):
            weights, loss = self._epoch(client, weights, gap, chosen, epoch)
            losses.append(loss)
            if len(losses) >= self.window and float(np.std(losses[-self.window :])) < self.threshold:
                break
        return weights

    def _piece(self, client: Client) -> Data:
        """`share` of the data: consecutive samples from a random place on."""
        data = client.data
        count = max(1, int(self.share * len(data)))
        begin = int(client.rng("piece").integers(0, len(data) - count + 1))
        return data.take(np.arange(begin, begin + count))

    def _epoch(self, client: Client, weights: Tensor, gap: Tensor, data: Data, epoch: int) -> tuple[Tensor, float]:
        """One pass: (W, mean loss). Nothing but W and the mixture moves, so the optimiser's rate is 0."""
        where, own = self.upper(client.layout), client.state["own"].to(gap.device)
        inner = Mixing(self.eta, where.start, where.stop)
        fitted = client.fit(
            (inner,),
            model=_mixed(client.model, where, own + weights * gap),
            data=data,
            state={inner.name: {"weights": weights, "own": own, "gap": gap}},
            rate=0.0,
            epochs=1,
            optimizer=Optimizer("sgd", lr=0.0),
            tag=f"weights {epoch}",
        )
        return fitted.state[inner.name]["weights"], float(fitted.loss) / max(fitted.steps, 1)

    def personalise(self, client: Client) -> Model:
        """The mixture; the global model as it is before there is one."""
        own, model = client.state, client.model
        if "weights" not in own:
            return model
        where, params = self.upper(client.layout), model["params"]
        mine, weights = own["own"].to(params.device), own["weights"].to(params.device)
        return _mixed(model, where, mine + weights * (params[where] - mine))  # Eq. 2

    def reply(self, client: Client):
        """Keep what the next mixture needs of the trained model: its upper layers."""
        client.state["own"] = client.model["params"][self.upper(client.layout)].clone()


@dataclass(frozen=True)
class Mixing(Part):
    """Eq. 3 as a training step: the gradient moves W, and W moves the mixture."""

    eta: float = 1.0
    begin: int = 0
    end: int = 0

    name = "ala-weights"
    changes = frozenset({"weights"})

    def gradient(self, step: Step, gradient: Gradient) -> Tensor:
        own, moved = step.state, gradient.vector[self.begin : self.end]
        own["weights"].addcmul_(moved, own["gap"], value=-self.eta).clamp_(0.0, 1.0)
        return torch.zeros_like(gradient.vector)

    def after(self, step: Step) -> None:
        own = step.state
        step.params[self.begin : self.end].copy_(own["own"] + own["weights"] * own["gap"])
        step.replica.refresh()


def _mixed(model: Model, where: slice, upper: Tensor) -> Model:
    params = model["params"].clone()
    params[where] = upper
    return {**model, "params": params}
