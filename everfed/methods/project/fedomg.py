"""FedOMG: the server matches the clients' updates instead of averaging them; STAMP's spatial half (Eq. 4 and 5).

    Delta_u = theta_u - theta,   theta <- theta + rate * GM_kappa(Delta_1 .. Delta_U)

GM is the direction near the mean update that serves the worst-served client best (`matching.py`). Clients send as many
bytes as under FedAvg, but the server must see each update by itself, so secure aggregation is impossible. Only
trainable parameters are matched; BatchNorm statistics are averaged as under FedAvg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from everfed.method import Aggregator, Client, Collect, Mean, Model, Server, Tells, option
from everfed.methods.project.matching import KAPPA, SCALE, SOLVER, Scale, Solver, match_gradients, pairwise_cosines


@dataclass(frozen=True)
class FedOMG(Aggregator):
    kappa: float = option(0.25, **KAPPA)
    scale: Scale = option("1+k2", **SCALE)
    rate: float = option(1.0, above=0, about="lr_s")
    weighting: str = option(
        "uniform",
        one_of=("uniform", "samples"),
        about="shares of the clients in the mean: equal (paper), or by samples",
    )
    solver: Solver = option("exact", **SOLVER)
    angles: bool = option(
        False, about="report the mean cosine between the clients' updates (Fig. 4); costs one more pass over them"
    )

    name = "fedomg"

    def reducers(self):
        mean = Mean(weighted=self.weighting == "samples")
        own = {"update": Collect(tells=Tells.GRADIENTS), "samples": Collect(tells=Tells.AMOUNT)}
        return {**own, "stats": mean, "counters": mean}

    def upload(self, client: Client):
        """The update rather than the model: as many bytes, and the server need not hold both."""
        statistics = {key: value for key, value in super().upload(client).items() if key != "params"}
        return {"update": client.update, **statistics}

    def reply(self, client: Client):
        """The number of samples, where it is the client's weight: a plain number, which costs no payload."""
        return {"samples": client.fitted.samples} if self.weighting == "samples" else {}

    def aggregate(self, server: Server) -> Model:
        model, reduced = super().aggregate(server), server.reduced
        updates: dict[int, Tensor] | None = reduced.get("update")
        if not updates:
            return model
        shares = [reduced["samples"][client] for client in updates] if self.weighting == "samples" else None
        matched = match_gradients(list(updates.values()), self.kappa, self.scale, weights=shares, solver=self.solver)
        return {**model, "params": model["params"].to(matched.device) + self.rate * matched}  # Eq. 4

    def update(self, server: Server) -> None:
        if self.angles:
            updates = list((server.reduced.get("update") or {}).values())
            report_angles(server, "spatial", mean_cosine(updates), len(updates))


def report_angles(server: Server, kind: str, cosine: float | None, count: int) -> None:
    """Report a mean cosine over the pairs i < j of `count` updates, and over all ordered pairs with i = j, as in the
    released code; nothing where no pair has a direction."""
    if cosine is not None:
        server.report(f"{kind}_cosine", cosine)
        server.report(f"{kind}_cosine_with_self", (1.0 + (count - 1) * cosine) / count)


def mean_cosine(updates: Sequence[Tensor]) -> float | None:
    """Mean cosine over pairs, None where no pair has a direction."""
    cosine = pairwise_cosines(updates) if len(updates) > 1 else float("nan")
    return None if cosine != cosine else cosine
