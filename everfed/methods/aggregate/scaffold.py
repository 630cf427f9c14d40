"""SCAFFOLD: control variates against client drift (Karimireddy et al., 2020, Algorithm 1 with option II).

Client i takes K local steps y <- y - eta (g_i(y) - c_i + c) from the server's x. Afterwards

    c_i+ = c_i - c + (x - y) / (K eta)            on the client, which sends c_i+ - c_i
    c   <- c + (1 / N) sum_i (c_i+ - c_i)         on the server, over the S of N clients that took part

and x becomes the mean of the y, as in FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from everfed.method import (
    BEGIN,
    SHARED,
    WHOLE,
    Client,
    Cohort,
    CompositionError,
    Gradient,
    Optimizer,
    Part,
    Phase,
    Server,
    Step,
    Sum,
    Tells,
    When,
    option,
)


@dataclass(frozen=True)
class Scaffold(Part):
    reset: bool = option(
        False, about="begin every task with zero control variates: those of the last correct its drift"
    )

    name = "scaffold"

    def needs(self):
        return {SHARED, WHOLE}

    def check(self, parts, optimizer):
        _require_plain_sgd(optimizer)
        if any(getattr(part, "weighting", None) == "samples" for part in parts):
            raise CompositionError("part 'scaffold' counts every client the same: method.fedavg.weighting = 'uniform'")

    def phases(self):
        return [Phase("reset-variates", Cohort.SERVER, BEGIN, When.BEFORE, update=self.forget)] if self.reset else []

    def forget(self, server: Server) -> None:
        server.state = {}

    # on the client ---------------------------------------------------------------------------------------------------
    def broadcast(self, server: Server):
        return server.state

    def receive(self, client: Client) -> None:
        """A task's first round forgets the last one's variate."""
        if self.reset and client.state and client.state["task"] != client.task:
            client.state = {}

    def gradient(self, step: Step, gradient: Gradient) -> Gradient | Tensor:
        if "c" in step.state:
            gradient = Gradient.of(step.replica, gradient.vector - step.state["c"])
        return gradient.vector + step.message["c"] if "c" in step.message else gradient

    def reply(self, client: Client):
        """Option II. Between synchronisations K eta is added up."""
        path = client.state.get("path", 0.0) + client.fitted.steps * client.rate
        if not client.synchronises:
            client.state |= {"path": path, "task": client.task}
            return {}
        if path == 0.0:
            return {}
        y = client.model["params"]
        change = (client.received["params"].to(y.device) - y) / path  # c_i+ - c_i, without - c
        if "c" in client.message:
            change = change - client.message["c"].to(y.device)
        client.state = {"c": change + client.state["c"] if "c" in client.state else change, "task": client.task}
        return {"change": change}

    # on the server ---------------------------------------------------------------------------------------------------
    def reducers(self):
        return {"change": Sum(tells=Tells.GRADIENTS)}

    def update(self, server: Server) -> None:
        if server.reduced.get("change") is not None:
            change = server.reduced["change"] / server.facts.clients
            server.state["c"] = server.state["c"].to(change.device) + change if "c" in server.state else change


def _require_plain_sgd(optimizer: Optimizer) -> None:
    """Refuse optimisers under which a local update is not the rate times the sum of gradients."""
    plain = Optimizer()
    for name in ("kind", "momentum", "clip", "by", "groups"):
        if getattr(optimizer, name) != getattr(plain, name):
            raise CompositionError(
                "part 'scaffold' reads gradients off local updates, which needs plain SGD: train.optimizer."
                f"{name} = {getattr(plain, name)!r}; got {getattr(optimizer, name)!r}"
            )
