"""FedAvg: the shared model is the mean of the clients' models (McMahan et al., 2017), or a robust one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everfed.core.legacy import (
    MODEL,
    Aggregator,
    CompositionError,
    Context,
    Mean,
    Message,
    Model,
    Part,
    Reducer,
    State,
    Tree,
)
from everfed.core.pieces import TrainsPieces
from everfed.methods.aggregate.robust import ClippedMean, GeometricMedian, Median, TrimmedMean
from everfed.methods.common.checks import at_least, one_of

REDUCERS = ("mean", "trimmed-mean", "median", "norm-clipping", "geometric-median")
_OF_UPDATES = ("norm-clipping", "geometric-median")  # they reduce what clients add to the model they were sent


@dataclass(frozen=True)
class FedAvg(Aggregator):
    """weighting: "uniform" gives every client 1/K (FedGP), "samples" gives it n_k/n (McMahan).

    reducer: "mean"; against malicious clients, "trimmed-mean" (of every coordinate the `trim` smallest and largest are
    cut off), "median" (of every coordinate), "norm-clipping" (updates of an L2 norm above `norm` are scaled down to
    it; 0: above the median of the round's norms), or "geometric-median" (of the updates, each mixed with its nearest
    neighbours if some of the clients may be `liars`). The robust ones see every client's model, and give each the same
    weight.
    """

    weighting: str = "uniform"
    reducer: str = "mean"
    trim: int = 1
    norm: float = 0.0
    liars: int = 0

    name = "fedavg"

    def __post_init__(self) -> None:
        if self.weighting not in ("uniform", "samples"):
            raise ValueError(f"weighting must be 'uniform' or 'samples'; got {self.weighting!r}")
        one_of(self, reducer=REDUCERS)
        if self.reducer != "mean" and self.weighting == "samples":
            raise ValueError(
                f"weighting must be 'uniform' with reducer = {self.reducer!r}: weights are clients' claims"
            )
        at_least(self, 1, "trim")
        at_least(self, 0, "norm", "liars")

    def reducers(self) -> Mapping[str, Reducer]:
        if self.reducer in _OF_UPDATES:
            update = ClippedMean(self.norm) if self.reducer == "norm-clipping" else GeometricMedian(self.liars)
            return {"update": update, "stats": Median(), "counters": Median()}
        robust: dict[str, Reducer] = {"trimmed-mean": TrimmedMean(self.trim), "median": Median()}
        mean = robust.get(self.reducer, Mean(weighted=self.weighting == "samples"))
        return {"params": mean, "stats": mean, "counters": mean}

    def upload(self, model: Model, message: Message, ctx: Context) -> Tree:
        values = sent(model, ctx)
        if self.reducer in _OF_UPDATES:
            params = values.pop("params")
            values["update"] = params - message[MODEL]["params"].to(params.device)
        return values

    def aggregate(self, server: State, reduced: Tree, ctx: Context) -> Model:
        """The mean of what arrived; what no client sent stays as it was."""
        model = server[MODEL]
        if reduced.get("update") is not None:
            reduced = {**reduced, "params": model["params"].to(reduced["update"].device) + reduced["update"]}
        return replaced(model, reduced)


def refuse_pieces(part: Part, parts: Sequence[Part]) -> None:
    """For parts whose state is a vector over all parameters, beside one that trains only some of them at a time."""
    for other in parts:
        if isinstance(other, TrainsPieces):
            raise CompositionError(f"part {part.name!r} follows all parameters; {other.name!r} trains some at a time")


def sent(model: Model, ctx: Context) -> Tree:
    """What of a client's model is averaged: without the statistics that stay with it."""
    return dict(model) if ctx.options.batchnorm != "local" else {"params": model["params"]}


def replaced(model: Model, reduced: Tree) -> Model:
    """The model with what arrived; what no client sent stays as it was."""
    return {name: value if reduced.get(name) is None else reduced[name] for name, value in model.items()}
