"""FedOMG: the server matches the clients' updates instead of averaging them; STAMP's spatial half (Eq. 4 and 5).

    Delta_u = theta_u - theta,   theta <- theta + rate * GM_kappa(Delta_1 .. Delta_U)

GM is the direction near the mean update that serves the worst-served client best (`matching.py`). Clients send as many
bytes as under FedAvg, but the server must see each update by itself, so secure aggregation is impossible. Only
trainable parameters are matched; BatchNorm statistics are averaged as under FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from everfed.core.legacy import (
    MODEL,
    Aggregator,
    Collect,
    Context,
    Data,
    Fitted,
    Mean,
    Message,
    Model,
    Part,
    Reducer,
    State,
    Tree,
)
from everfed.methods.common.checks import one_of, positive
from everfed.methods.project.matching import Scale, Solver, match_gradients, pairwise_cosines


@dataclass(frozen=True)
class FedOMG(Aggregator):
    """kappa: radius of the search around the mean update, as a part of its norm; 0 is FedAvg. scale: what the result is
    divided by: "none" (1), "1+k" or "1+k2" (the released code). rate: lr_s. weighting: shares of the clients in the
    mean: "uniform" (paper) or by "samples". solver: "exact", or the released code's "softmax_sgd".
    angles: report the mean cosine between the clients' updates (Fig. 4); costs one more pass over them.
    """

    kappa: float = 0.25
    scale: Scale = "1+k2"
    rate: float = 1.0
    weighting: str = "uniform"
    solver: Solver = "exact"
    angles: bool = False

    name = "fedomg"

    def __post_init__(self) -> None:
        check_matching(self, self.kappa)
        one_of(self, weighting=("uniform", "samples"))

    def reducers(self) -> Mapping[str, Reducer]:
        mean = Mean(weighted=self.weighting == "samples")
        return {"update": Collect(), "samples": Collect(), "stats": mean, "counters": mean}

    def upload(self, model: Model, message: Message, ctx: Context) -> Tree:
        """The update rather than the model: as many bytes, and the server need not hold both."""
        params = model["params"]
        sent: Tree = {"update": params - message[MODEL]["params"].to(params.device)}
        return sent if ctx.options.batchnorm == "local" else {**sent, **{k: model[k] for k in ("stats", "counters")}}

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[None, Tree]:
        """The number of samples, where it is the client's weight: a plain number, which costs no payload."""
        return None, {"samples": fitted.samples} if self.weighting == "samples" else {}

    def measure(self, server: State, reduced: Tree, ctx: Context) -> dict[str, float]:
        updates = list((reduced.get("update") or {}).values())
        return angles("spatial", pairwise_cosines(updates), len(updates)) if self.angles and len(updates) > 1 else {}

    def aggregate(self, server: State, reduced: Tree, ctx: Context) -> Model:
        model = {k: v if reduced.get(k) is None else reduced[k] for k, v in server[MODEL].items()}
        updates: dict[int, Tensor] | None = reduced.get("update")
        if not updates:
            return model
        shares = [reduced["samples"][client] for client in updates] if self.weighting == "samples" else None
        matched = match_gradients(list(updates.values()), self.kappa, self.scale, weights=shares, solver=self.solver)
        return {**model, "params": server[MODEL]["params"].to(matched.device) + self.rate * matched}  # Eq. 4


def check_matching(part: Part, kappa: float) -> None:
    """Refuse options of the matching outside their range."""
    if not 0.0 <= kappa < 1.0:
        raise ValueError(f"kappa must be at least 0 and below 1; got {kappa}")
    one_of(part, scale=get_args(Scale), solver=get_args(Solver))
    positive(part, "rate")


def angles(kind: str, cosine: float, count: int) -> dict[str, float]:
    """A mean cosine over the pairs i < j of `count` updates, and over all ordered pairs with i = j, as in the released
    code; nothing where no pair has a direction."""
    if cosine != cosine:
        return {}
    return {f"{kind}_cosine": cosine, f"{kind}_cosine_with_self": (1.0 + (count - 1) * cosine) / count}


def mean_cosine(updates: Sequence[Tensor]) -> float | None:
    """Mean cosine over pairs, None where no pair has a direction."""
    cosine = pairwise_cosines(updates) if len(updates) > 1 else float("nan")
    return None if cosine != cosine else cosine
