"""FedAvg: the shared model is the mean of the clients' models (McMahan et al., 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from everfed.core.context import Context
from everfed.core.message import MODEL
from everfed.core.part import Model, Part, State
from everfed.core.reduce import Mean, Reducer
from everfed.core.tree import Tree


@dataclass(frozen=True)
class FedAvg(Part):
    """weighting: "uniform" gives every client 1/K (FedGP), "samples" gives it n_k/n (McMahan)."""

    weighting: str = "uniform"

    name: ClassVar[str] = "fedavg"
    aggregates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.weighting not in ("uniform", "samples"):
            raise ValueError(f"weighting must be 'uniform' or 'samples'; got {self.weighting!r}")

    def reducers(self) -> Mapping[str, Reducer]:
        mean = Mean(weighted=self.weighting == "samples")
        return {"params": mean, "stats": mean, "counters": mean}

    def upload(self, model: Model, message: dict[str, Tree], ctx: Context) -> Tree:
        if ctx.options.batchnorm == "local":
            return {"params": model["params"]}
        return dict(model)

    def aggregate(self, server: State, reduced: Tree, ctx: Context) -> Model:
        """The mean of what arrived; what nobody sent stays as it was."""
        return {name: value if reduced.get(name) is None else reduced[name] for name, value in server[MODEL].items()}
