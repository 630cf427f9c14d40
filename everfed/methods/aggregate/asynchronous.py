"""Replies that are stale: their clients received the model of an earlier round, tau rounds ago.

FedBuff (Nguyen et al., 2022) adds the mean of a buffer of updates, FedAsync (Xie et al., 2019) mixes single models in:

    FedBuff    w <- w + lr mean_k s(tau_k) (w_k - w_received)
    FedAsync   w <- (1 - a_k) w + a_k w_k,   a_k = mixing s(tau_k)             s(tau) = (1 + tau)^-decay

Each reply is changed so that the aggregating part's own rule gives this, whatever that part is.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

from torch import Tensor

from everfed.core.client import Reply
from everfed.core.layout import TrainsPieces
from everfed.core.phase import TRAIN
from everfed.method import STALE, CompositionError, Model, Phase, Protection, Server, Sum, option, overrides

_MODEL = ("params", "stats")  # of a reply; counters stay as they are


@dataclass(frozen=True)
class Asynchronous(Protection):
    """What both share."""

    decay: float = option(0.5, at_least=0, about="exponent of s(tau); 0: stale replies count like fresh ones")

    def needs(self):
        return {STALE}

    def check(self, parts, optimizer):
        for part in parts:
            if isinstance(part, TrainsPieces):
                raise CompositionError(
                    f"part {self.name!r} mixes whole models; {part.name!r} trains other pieces by round"
                )
            if overrides(part, "open") and part.name != self.name and part not in parts[parts.index(self) :]:
                raise CompositionError(f"put {self.name!r} before {part.name!r}: it works on what the other decodes")

    def init(self, side):
        if side.options.sync_every > 1:
            raise CompositionError(f"part {self.name!r} needs train.sync_every = 1")

    def reducers(self):
        return {"staleness": Sum(), "replies": Sum()}

    def open(self, server: Server, phase: Phase, reply: Reply, received: Model) -> Reply:
        """The reply as a change of the model that the server has now."""
        own, weight = dict(reply.values.get(phase.owner, {})), (1.0 + reply.age) ** -self.decay
        if not own or phase.name != TRAIN:
            return reply
        for key in _MODEL:
            if key in own:
                now, then = (model[key].to(own[key].device) for model in (server.model, received))
                own[key] = now + self.step(own[key] - then, then - now, weight)
        if "update" in own:
            drift = received["params"] - server.model["params"]
            own["update"] = self.step(own["update"], drift.to(own["update"].device), weight)
        said = {"staleness": reply.age, "replies": 1}
        return replace(reply, values={**reply.values, phase.owner: own, self.name: said})

    @abstractmethod
    def step(self, update: Tensor, drift: Tensor, weight: float) -> Tensor:
        """How far the model moves. update: from the received model; drift: from the present model to that one."""

    def update(self, server: Server) -> None:
        if server.reduced.get("replies"):
            server.report("staleness", server.reduced["staleness"] / server.reduced["replies"])


@dataclass(frozen=True)
class FedBuff(Asynchronous):
    lr: float = option(1.0, above=0, about="learning rate of the server")

    name = "fedbuff"

    def step(self, update: Tensor, drift: Tensor, weight: float) -> Tensor:
        return update * (self.lr * weight)


@dataclass(frozen=True)
class FedAsync(Asynchronous):
    mixing: float = option(0.6, above=0, at_most=1, about="alpha: the share of a fresh model that is mixed in")

    name = "fedasync"

    def step(self, update: Tensor, drift: Tensor, weight: float) -> Tensor:
        return (update + drift) * (self.mixing * weight)
