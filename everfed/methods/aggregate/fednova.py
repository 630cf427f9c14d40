"""FedNova: normalised averaging of clients that take different numbers of steps (Wang et al., 2020).

Client i's local update is a weighted sum of its gradients, with weights a_i. It sends d_i = (w_i - x) / |a_i|_1, the
update per step, and the server moves by the mean number of steps along the mean of these:

    x <- x + (sum_i p_i |a_i|_1) (sum_i p_i d_i)

|a_i|_1 is the number of steps tau of plain SGD. With momentum rho, (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everfed.core.client import synchronises
from everfed.core.legacy import (
    MODEL,
    Aggregator,
    CompositionError,
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
    Tree,
    refuse_personal,
)
from everfed.methods.aggregate.fedavg import refuse_pieces, replaced, sent
from everfed.methods.common.checks import one_of


@dataclass(frozen=True)
class FedNova(Aggregator):
    """weighting: p_i, "samples" (n_i / n, as published) or "uniform"."""

    weighting: str = "samples"

    name = "fednova"

    def __post_init__(self) -> None:
        one_of(self, weighting=("samples", "uniform"))

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        refuse_personal(self, parts)
        refuse_pieces(self, parts)
        if optimizer.kind != "sgd" or (optimizer.momentum and optimizer.state != "fresh"):
            raise CompositionError(
                "part 'fednova' counts local steps of train.optimizer.kind = 'sgd' alone, with state = 'fresh' if it "
                f"has momentum; got {optimizer.kind!r}, {optimizer.state!r}"
            )
        return ()

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Slots, Tree]:
        """d_i and |a_i|_1, which is added up between synchronisations."""
        steps = client.get(self.name, {}).get("steps", 0.0) + steps_of(fitted.steps, ctx.options.optimizer.momentum)
        if not synchronises(ctx):
            return {"steps": steps}, {}
        params = fitted.model["params"]
        update = (params - message[MODEL]["params"].to(params.device)) / steps
        return {}, {"update": update, "steps": steps}

    def upload(self, model: Model, message: Message, ctx: Context) -> Tree:
        """What is not normalised: BatchNorm's statistics."""
        return {key: value for key, value in sent(model, ctx).items() if key != "params"}

    def reducers(self) -> Mapping[str, Reducer]:
        mean = Mean(weighted=self.weighting == "samples")
        return {"update": mean, "steps": mean, "stats": mean, "counters": mean}

    def aggregate(self, server: State, reduced: Tree, ctx: Context) -> Model:
        model = replaced(server[MODEL], reduced)
        if reduced.get("update") is None:
            return model
        update = reduced["update"] * float(reduced["steps"])
        return {**model, "params": model["params"].to(update.device) + update}


def steps_of(steps: int, momentum: float = 0.0) -> float:
    """|a|_1: the weights of all gradients in an update of so many steps, together."""
    if not momentum:
        return float(steps)
    return (steps - momentum * (1.0 - momentum**steps) / (1.0 - momentum)) / (1.0 - momentum)
