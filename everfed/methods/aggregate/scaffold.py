"""SCAFFOLD: control variates against client drift (Karimireddy et al., 2020, Algorithm 1 with option II).

Client i takes K local steps y <- y - eta (g_i(y) - c_i + c) from the server's x. Afterwards

    c_i+ = c_i - c + (x - y) / (K eta)            on the client, which sends c_i+ - c_i
    c   <- c + (1 / N) sum_i (c_i+ - c_i)         on the server, over the S of N clients that took part

and x becomes the mean of the y, as in FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from everfed.core.client import synchronises
from everfed.core.legacy import (
    BEGIN,
    MODEL,
    Cohort,
    CompositionError,
    Context,
    Data,
    Fitted,
    Message,
    Model,
    Optimizer,
    Part,
    Phase,
    Position,
    Reducer,
    Slots,
    State,
    Step,
    Sum,
    Tree,
    options_of,
    refuse_personal,
)
from everfed.methods.aggregate.fedavg import refuse_pieces


@dataclass(frozen=True)
class Scaffold(Part):
    """reset: begin with zero control variates in every task, for those of the last one correct its drift."""

    reset: bool = False

    name = "scaffold"

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        refuse_personal(self, parts)
        refuse_pieces(self, parts)
        _require_plain_sgd(optimizer)
        if any(options_of(part).get("weighting") == "samples" for part in parts):
            raise CompositionError("part 'scaffold' counts every client the same: method.fedavg.weighting = 'uniform'")
        return ()

    def phases(self) -> tuple[Phase, ...]:
        begin = Phase("reset-variates", Cohort.SERVER, BEGIN, Position.BEFORE, update=self._forget)
        return (begin,) if self.reset else ()

    def _forget(self, server: State, reduced: Tree, ctx: Context) -> Tree:
        return {}

    # on the client ---------------------------------------------------------------------------------------------------
    def broadcast(self, server: State, ctx: Context) -> dict[str, Any]:
        return dict(server.get(self.name, {}))

    def receive(self, client: State, message: Message, model: Model, data: Data, ctx: Context) -> tuple[Slots, Model]:
        """A task's first round forgets the last one's variate."""
        own = client.get(self.name)
        return ({} if own and self.reset and own["task"] != ctx.current_task else None), model

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        own, server = step.state.get(self.name, {}), step.message.get(self.name, {})
        if "c" in own:
            gradient = gradient - own["c"]
        return gradient + server["c"] if "c" in server else gradient

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Slots, Tree]:
        """Option II. Between synchronisations K eta is added up."""
        own = client.get(self.name, {})
        path = own.get("path", 0.0) + fitted.steps * ctx.rate
        if not synchronises(ctx):
            return {**own, "path": path, "task": ctx.current_task}, {}
        if path == 0.0:
            return None, {}
        params = fitted.model["params"]
        change = (message[MODEL]["params"].to(params.device) - params) / path  # c_i+ - c_i, without - c
        if "c" in message.get(self.name, {}):
            change = change - message[self.name]["c"].to(params.device)
        c = change + own["c"].to(params.device) if "c" in own else change
        return {"c": c, "task": ctx.current_task}, {"change": change}

    # on the server ---------------------------------------------------------------------------------------------------
    def reducers(self) -> Mapping[str, Reducer]:
        return {"change": Sum()}

    def update(self, server: State, reduced: Tree, ctx: Context) -> Slots:
        if reduced.get("change") is None:
            return None
        change = reduced["change"] / ctx.facts.clients
        own = server.get(self.name, {})
        return {"c": own["c"].to(change.device) + change if "c" in own else change}


def _require_plain_sgd(optimizer: Optimizer) -> None:
    """Refuse optimisers under which a local update is not the rate times the sum of gradients."""
    plain = Optimizer()
    for name in ("kind", "momentum", "clip", "by", "groups"):
        if getattr(optimizer, name) != getattr(plain, name):
            raise CompositionError(
                "part 'scaffold' reads gradients off local updates, which needs plain SGD: train.optimizer."
                f"{name} = {getattr(plain, name)!r}; got {getattr(optimizer, name)!r}"
            )
