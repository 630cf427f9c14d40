"""FedNova: normalised averaging of clients that take different numbers of steps (Wang et al., 2020).

Client i's local update is a weighted sum of its gradients, with weights a_i. It sends d_i = (w_i - x) / |a_i|_1, the
update per step, and the server moves by the mean number of steps along the mean of these:

    x <- x + (sum_i p_i |a_i|_1) (sum_i p_i d_i)

|a_i|_1 is the number of steps tau of plain SGD. With momentum rho, (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho).
FedProx shrinks it to the sum over j < tau of (1 - lr mu)^j, which is not counted here, so that the two are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from everfed.method import SHARED, WHOLE, Aggregator, Client, CompositionError, Mean, Model, Server, Tells, option
from everfed.methods.regularise.fedprox import FedProx


@dataclass(frozen=True)
class FedNova(Aggregator):
    weighting: str = option(
        "samples", one_of=("samples", "uniform"), about="p_i: n_i / n (samples, as published), or 1/K (uniform)"
    )

    name = "fednova"

    def needs(self):
        return {SHARED, WHOLE}

    def check(self, parts, optimizer):
        if any(isinstance(part, FedProx) and part.mu for part in parts):
            raise CompositionError(
                "part 'fednova' counts whole local steps, and 'fedprox' shrinks the later gradients of an update to "
                "(1 - lr mu)^j of themselves; leave one of the two out, or set fedprox.mu to 0"
            )
        if optimizer.kind != "sgd" or (optimizer.momentum and optimizer.state != "fresh"):
            raise CompositionError(
                "part 'fednova' counts local steps of train.optimizer.kind = 'sgd' alone, with state = 'fresh' if it "
                f"has momentum; got {optimizer.kind!r}, {optimizer.state!r}"
            )

    def reply(self, client: Client):
        """d_i and |a_i|_1, which is added up between synchronisations."""
        steps = client.state.get("steps", 0.0) + steps_of(client.fitted.steps, client.options.optimizer.momentum)
        client.state = {} if client.synchronises else {"steps": steps}
        return {"update": client.update / steps, "steps": steps} if client.synchronises else {}

    def upload(self, client: Client):
        """What is not normalised: BatchNorm's statistics."""
        return {key: value for key, value in super().upload(client).items() if key != "params"}

    def reducers(self):
        mean = partial(Mean, weighted=self.weighting == "samples")
        own = {"update": mean(tells=Tells.GRADIENTS), "steps": mean(tells=Tells.AMOUNT)}
        return {**own, "stats": mean(), "counters": mean()}

    def aggregate(self, server: Server) -> Model:
        model, update = super().aggregate(server), server.reduced.get("update")
        if update is None:
            return model
        return {**model, "params": model["params"].to(update.device) + update * float(server.reduced["steps"])}


def steps_of(steps: int, momentum: float = 0.0) -> float:
    """|a|_1: the weights of all gradients in an update of so many steps, together."""
    if not momentum:
        return float(steps)
    return (steps - momentum * (1.0 - momentum**steps) / (1.0 - momentum)) / (1.0 - momentum)
