"""Replay samples with diverse gradients, chosen by each client alone or by all of them together.

"Coordinated Replay Sample Selection for Continual Federated Learning". Alone: of the task's samples and the stored ones
keep the N whose unit gradients have the shortest sum (Eq. 3, relaxed). Together (Algorithm 1): clients exchange nothing
but the mean of their weighted sums of unit gradients, so that the phase runs under secure aggregation.

    select, T times:   client -> server   y_m = G_m x_m            server -> client   the mean of all y
    remember:          h_m = y_m - mean,  x_m <- argmin ||G_m x - h_m||^2,  keep the N samples it points to

From one exchange to the next a client keeps its weights x_m and, where gradients are projected and so small, G_m;
others are computed anew in every exchange.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.legacy import END, Cohort, Context, Data, Mean, Message, Phase, Slots, State, Tree
from everfed.methods.common.checks import at_least, one_of
from everfed.methods.replay.coordination import ROUNDINGS, client_choice, client_step, client_target
from everfed.methods.replay.diversity import RELAXATIONS, Candidates, select
from everfed.methods.replay.policy import NAME, Policy, Pool

if TYPE_CHECKING:
    from everfed.methods.replay.memory import Memory

SELECT = "select"
COHORTS = {"all": Cohort.BOUNDARY, "sampled": Cohort.SAMPLED}
_SEED = "selection"  # names the random start of the last descent: the same with and without coordination


@dataclass(frozen=True)
class Uncoordinated(Policy):
    """relaxation: "zero-diagonal" or "convex". swap_refine: improve the choice by single exchanges (not in the
    paper)."""

    relaxation: str = "zero-diagonal"
    swap_refine: bool = False

    kind = "uncoordinated"
    about = "each client by itself: samples whose gradients point in different directions"

    def __post_init__(self) -> None:
        one_of(self, relaxation=RELAXATIONS)

    def choose(self, pool: Pool, size: int, host: Tree, message: Tree) -> tuple[np.ndarray, Tree]:
        if len(pool) <= size or size == 0:
            return np.arange(min(len(pool), size)), host
        seed = pool.ctx.key(_SEED)
        return select(pool.gradients(), size, self.relaxation, seed=seed, swap_refine=self.swap_refine), host


@dataclass(frozen=True)
class Coordinated(Policy):
    """exchanges: T, how often the mean is exchanged; 0 is the uncoordinated choice. rounding: how weights become a
    choice, "zero-diagonal" (one more descent) or "top-n" (as printed). delta: subtracted from the Gram matrix's
    diagonal in the exchanges; 0 is the paper, 1 / clients removes the diagonal of the common one. tolerance: stop when
    an exchange shortens the sum's square by no more than this share (0: never). speakers: who exchanges, "all" clients
    or those "sampled" for the round; the others choose by themselves."""

    exchanges: int = 1
    rounding: str = "zero-diagonal"
    delta: float = 0.0
    tolerance: float = 0.0
    speakers: str = "all"

    kind = "coordinated"
    about = "all clients together: samples whose gradients cancel over the federation"

    def __post_init__(self) -> None:
        at_least(self, 0, "exchanges", "tolerance")
        one_of(self, rounding=ROUNDINGS, speakers=COHORTS)
        if not 0 <= self.delta < 1:
            raise ValueError(f"delta must be at least 0 and below 1; got {self.delta}")

    @property
    def together(self) -> bool:  # type: ignore[override]
        """Where clients change tasks at different rounds, too few choose at once to be coordinated."""
        return self.exchanges > 0

    def phases(self, memory: Memory) -> tuple[Phase, ...]:
        (choice,) = super().phases(memory)
        if self.exchanges == 0:
            return (choice,)
        exchange = Phase(
            SELECT,
            COHORTS[self.speakers],
            END,
            reduce={"sum": Mean()},
            repeat=self.exchanges,
            in_last_round=False,
            broadcast=_send_mean,
            run=partial(self._exchange, memory),
            update=_keep_mean,
            done=self._converged,
        )
        return exchange, replace(choice, broadcast=_send_mean, update=_forget)

    def _converged(self, server: State, ctx: Context) -> bool:
        """Did the last exchange shorten the sum by too little?"""
        own = server.get(NAME, {})
        before = own.get("before")
        if not self.tolerance or before is None:
            return False
        return bool(before - own["square"] <= self.tolerance * before)

    def _exchange(
        self, memory: Memory, client: State, message: Message, data: Data, ctx: Context
    ) -> tuple[Slots, Tree]:
        """Solve for the weights and send the weighted sum; a client without samples sends nothing."""
        own, pool = client[NAME], memory.pool(client, message, data, ctx)
        if len(pool) == 0:
            return None, {}
        gradients = _gradients(pool, own["host"])
        candidates = Candidates.of(gradients)
        weights = self._weights(candidates, memory.size, own["host"], message.get(NAME, {}), ctx)
        sent = {"weights": torch.from_numpy(weights), "round": ctx.round}
        if memory.gradient_options.projection:
            sent["gradients"] = gradients.cpu()
        return {**own, "host": {**own["host"], "sent": sent}}, {"sum": _sent(candidates, weights)}

    def choose(self, pool: Pool, size: int, host: Tree, message: Tree) -> tuple[np.ndarray, Tree]:
        rest = {key: value for key, value in host.items() if key != "sent"}
        if len(pool) <= size or size == 0:
            return np.arange(min(len(pool), size)), rest
        candidates, seed = Candidates.of(_gradients(pool, host)), pool.ctx.key(_SEED)
        target = self._target(candidates, host, message, pool.ctx)
        weights = np.zeros(len(candidates.directed))
        if self.rounding == "top-n" or size == 1:  # otherwise they are not used
            weights = self._weights(candidates, size, host, message, pool.ctx)
        return client_choice(candidates, size, weights, target, self.rounding, seed), rest

    def _weights(self, candidates: Candidates, size: int, host: Tree, message: Tree, ctx: Context) -> np.ndarray:
        target = self._target(candidates, host, message, ctx)
        start = None if target is None else host["sent"]["weights"].numpy()
        return client_step(candidates, size, target, start, self.delta)

    def _target(self, candidates: Candidates, host: Tree, message: Tree, ctx: Context) -> Tensor | None:
        """h_m = y_m - mean, y_m as it was sent; None for a client that sent nothing in this selection."""
        sent = host.get("sent")
        if "mean" not in message or sent is None or sent["round"] != ctx.round:
            return None
        own_sum = _sent(candidates, sent["weights"].numpy())
        return client_target(own_sum.double(), message["mean"].to(own_sum.device).double())


def _gradients(pool: Pool, host: Tree) -> Tensor:
    """G_m: of the exchange before, if it is kept."""
    sent = host.get("sent", {})
    if "gradients" in sent and sent["round"] == pool.ctx.round:
        kept: Tensor = sent["gradients"].to(pool.ctx.train.device)
        return kept
    return pool.gradients()


def _sent(candidates: Candidates, weights: np.ndarray) -> Tensor:
    """y_m = G_m x_m as it crosses the wire, in single precision."""
    return candidates.weighted_sum(weights).float()


# on the server --------------------------------------------------------------------------------------------------------
def _send_mean(server: State, ctx: Context) -> dict[str, Any]:
    """The mean of the exchange before; there is none at the beginning."""
    own = server.get(NAME, {})
    return {"mean": own["mean"]} if "mean" in own else {}


def _keep_mean(server: State, reduced: Tree, ctx: Context) -> Slots:
    """mean: of what the clients sent. square: its squared length, M^-2 times the relaxed objective; it never increases
    from one exchange to the next. before: the square of the exchange before."""
    mean: Tensor | None = reduced.get("sum")
    if mean is None:
        return None
    before = server.get(NAME, {}).get("square")
    return {"mean": mean, "square": float(mean.double().square().sum()), "before": before}


def _forget(server: State, reduced: Tree, ctx: Context) -> Tree:
    """Once clients have chosen, the server keeps nothing."""
    return {}
