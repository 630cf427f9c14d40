"""FedDyn: a dynamic regulariser aligns the clients' optima with the global one (Acar et al., 2021, Algorithm 1).

With x the server's model, client k of the S in a round (of m) minimises

    L_k(w) - <h_k, w> + alpha / 2 |w - x|^2       and then     h_k <- h_k - alpha (w_k - x)

The server's h <- h - alpha / m sum_k (w_k - x), and its next model is mean_k w_k - h / alpha. Where this comes to rest,
every w_k is x, h_k is the gradient of L_k at x, and these gradients sum to 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from everfed.method import SHARED, WHOLE, Aggregator, Client, Gradient, Mean, Model, Server, Step, Sum, Tells, option


@dataclass(frozen=True)
class FedDyn(Aggregator):
    alpha: float = option(0.01, above=0, about="of the regulariser; the paper tunes it in {0.1, 0.01, 0.001}")

    name = "feddyn"

    def needs(self):
        return {SHARED, WHOLE}

    # on the client ---------------------------------------------------------------------------------------------------
    def gradient(self, step: Step, gradient: Gradient) -> Tensor:
        vector = gradient.vector.add(step.params - step.received, alpha=self.alpha)
        return vector - step.state["h"] if "h" in step.state else vector

    def reply(self, client: Client):
        if not client.synchronises:
            return {}
        client.state["h"] = client.state.get("h", 0.0) - self.alpha * client.update
        return {"clients": 1}

    # on the server ---------------------------------------------------------------------------------------------------
    def reducers(self):
        return {"params": Mean(), "stats": Mean(), "counters": Mean(), "clients": Sum(tells=Tells.GRADIENTS)}

    def aggregate(self, server: Server) -> Model:
        model, mean = super().aggregate(server), server.reduced.get("params")
        if mean is None:
            return model
        h = server.state["h"].to(mean.device) if "h" in server.state else torch.zeros_like(mean)
        rate = self.alpha * float(server.reduced["clients"]) / server.facts.clients
        server.state["h"] = h - rate * (mean - server.model["params"].to(mean.device))
        return {**model, "params": mean - server.state["h"] / self.alpha}
