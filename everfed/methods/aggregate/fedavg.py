"""FedAvg: the shared model is the mean of the clients' models (McMahan et al., 2017), or a robust one.

The robust reducers see every client's model, and give each the same weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from everfed.method import Aggregator, Client, Mean, Model, Reducer, Server, option
from everfed.methods.aggregate.robust import ClippedMean, GeometricMedian, Median, TrimmedMean

REDUCERS = ("mean", "trimmed-mean", "median", "norm-clipping", "geometric-median")
_OF_UPDATES = ("norm-clipping", "geometric-median")  # they reduce what clients add to the model they were sent


@dataclass(frozen=True)
class FedAvg(Aggregator):
    weighting: str = option(
        "uniform",
        one_of=("uniform", "samples"),
        about="a client counts 1/K (uniform, FedGP) or n_k/n (samples, McMahan)",
    )
    reducer: str = option(
        "mean", one_of=REDUCERS, about="mean; against malicious clients one of the others, which are robust"
    )
    trim: int = option(
        1, at_least=1, about="of trimmed-mean: smallest and largest values of every coordinate that are cut off"
    )
    norm: float = option(
        0.0, at_least=0, about="of norm-clipping: the L2 norm of an update at most; 0: the median of the round's norms"
    )
    liars: int = option(
        0,
        at_least=0,
        about="of geometric-median: clients that may lie; if any, updates are mixed with their nearest first",
    )

    name = "fedavg"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reducer != "mean" and self.weighting == "samples":
            raise ValueError(
                f"weighting must be 'uniform' with reducer = {self.reducer!r}: weights are clients' claims"
            )

    def reducers(self):
        if self.reducer in _OF_UPDATES:
            update = ClippedMean(self.norm) if self.reducer == "norm-clipping" else GeometricMedian(self.liars)
            return {"update": update, "stats": Median(), "counters": Median()}
        robust: dict[str, Reducer] = {"trimmed-mean": TrimmedMean(self.trim), "median": Median()}
        mean = robust.get(self.reducer, Mean(weighted=self.weighting == "samples"))
        return {"params": mean, "stats": mean, "counters": mean}

    def upload(self, client: Client):
        values = dict(super().upload(client))
        if self.reducer in _OF_UPDATES:
            values["update"] = client.update
            del values["params"]
        return values

    def aggregate(self, server: Server) -> Model:
        """The mean of what arrived; what no client sent stays as it was."""
        model, update = super().aggregate(server), server.reduced.get("update")
        return model if update is None else {**model, "params": model["params"].to(update.device) + update}
