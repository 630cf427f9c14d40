"""Replay samples with diverse gradients, chosen by each client alone or by all of them together.

"Coordinated Replay Sample Selection for Continual Federated Learning". Alone: of the task's samples and the stored ones
keep the N whose unit gradients have the shortest sum (Eq. 3, relaxed). Together (Algorithm 1): clients exchange nothing
but the mean of their weighted sums of unit gradients, so that the phase runs under secure aggregation.

    select, T times:   client -> server   y_m = G_m x_m            server -> client   the mean of all y
    remember:          h_m = y_m - mean,  x_m <- argmin ||G_m x - h_m||^2,  keep the N samples it points to

Gradients are computed anew in every exchange instead of being kept: a client remembers its weights x_m, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from everfed.core.context import Context
from everfed.core.phase import END, Cohort, Phase
from everfed.core.reduce import Mean
from everfed.core.tree import Tree
from everfed.parts.memory.policy import REMEMBER, Policy, Pool
from everfed.parts.selection.coordination import ROUNDINGS, client_choice, client_step, client_target
from everfed.parts.selection.diversity import RELAXATIONS, Candidates, select
from everfed.parts.shared.checks import at_least, one_of

SELECT = "select"
COHORTS = {"all": Cohort.BOUNDARY, "sampled": Cohort.SAMPLED}
_SEED = "selection"  # names the random start of the last descent: the same with and without coordination


@dataclass(frozen=True)
class Uncoordinated(Policy):
    """relaxation: "zero-diagonal" or "convex". swap_refine: improve the choice by single exchanges (not in the
    paper)."""

    relaxation: str = "zero-diagonal"
    swap_refine: bool = False

    kind: ClassVar[str] = "uncoordinated"
    about: ClassVar[str] = "each client by itself: samples whose gradients point in different directions"

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

    kind: ClassVar[str] = "coordinated"
    about: ClassVar[str] = "all clients together: samples whose gradients cancel over the federation"

    def __post_init__(self) -> None:
        at_least(self, 0, "exchanges", "tolerance")
        one_of(self, rounding=ROUNDINGS, speakers=COHORTS)
        if not 0 <= self.delta < 1:
            raise ValueError(f"delta must be at least 0 and below 1; got {self.delta}")

    @property
    def together(self) -> bool:  # type: ignore[override]
        """A mean over the few clients whose task happens to end now would coordinate nobody."""
        return self.exchanges > 0

    def phases(self, owner: str) -> tuple[Phase, ...]:
        if self.exchanges == 0:
            return super().phases(owner)
        reduce = {"sum": Mean()}
        exchange = Phase(SELECT, owner, COHORTS[self.speakers], END, reduce=reduce, repeat=self.exchanges)
        return (exchange, *super().phases(owner))

    # on the server -----------------------------------------------------------------------------------------------
    def broadcast(self, server: Tree, phase: str, ctx: Context) -> dict[str, Any]:
        """The mean of the exchange before; there is none at the beginning."""
        later = phase == REMEMBER or (phase == SELECT and ctx.repeat > 0)
        return {"mean": server["mean"]} if later and "mean" in server else {}

    def update(self, server: Tree, phase: str, reduced: Tree, ctx: Context) -> Tree:
        """mean: of what the clients sent. square: its squared length, M^-2 times the relaxed objective; it never
        increases from one exchange to the next. Nothing is kept once clients have chosen."""
        if phase == REMEMBER:
            return {}
        if phase != SELECT or reduced.get("sum") is None:
            return server
        mean: Tensor = reduced["sum"]
        return {"mean": mean, "square": float(mean.double().square().sum()), "before": server.get("square")}

    def done(self, server: Tree, phase: str, ctx: Context) -> bool:
        before = server.get("before")
        if phase != SELECT or not self.tolerance or before is None:
            return False
        return bool(before - server["square"] <= self.tolerance * before)

    # on the client -----------------------------------------------------------------------------------------------
    def speak(self, pool: Pool, size: int, host: Tree, message: Tree) -> tuple[Tree, Tree]:
        """One exchange: solve for the weights, send the weighted sum. A client without samples says nothing."""
        if len(pool) == 0:
            return host, {}
        candidates = Candidates.of(pool.gradients())
        weights = self._weights(candidates, size, host, message, pool.ctx)
        mine = {"weights": torch.from_numpy(weights), "round": pool.ctx.round}
        return {**host, "spoken": mine}, {"sum": _sent(candidates, weights)}

    def choose(self, pool: Pool, size: int, host: Tree, message: Tree) -> tuple[np.ndarray, Tree]:
        rest = {key: value for key, value in host.items() if key != "spoken"}
        if len(pool) <= size or size == 0:
            return np.arange(min(len(pool), size)), rest
        candidates, seed = Candidates.of(pool.gradients()), pool.ctx.key(_SEED)
        target = self._target(candidates, host, message, pool.ctx)
        weights = np.zeros(len(candidates.directed))
        if self.rounding == "top-n" or size == 1:  # else they are not looked at
            weights = self._weights(candidates, size, host, message, pool.ctx)
        return client_choice(candidates, size, weights, target, self.rounding, seed), rest

    def _weights(self, candidates: Candidates, size: int, host: Tree, message: Tree, ctx: Context) -> np.ndarray:
        target = self._target(candidates, host, message, ctx)
        start = None if target is None else host["spoken"]["weights"].numpy()
        return client_step(candidates, size, target, start, self.delta)

    def _target(self, candidates: Candidates, host: Tree, message: Tree, ctx: Context) -> Tensor | None:
        """h_m = y_m - mean, y_m as it was sent; None for a client that has not spoken in this selection."""
        spoken = host.get("spoken")
        if "mean" not in message or spoken is None or spoken["round"] != ctx.round:
            return None
        said = _sent(candidates, spoken["weights"].numpy())
        return client_target(said.double(), message["mean"].to(said.device).double())


def _sent(candidates: Candidates, weights: np.ndarray) -> Tensor:
    """y_m = G_m x_m as it crosses the wire, in single precision."""
    return candidates.weighted_sum(weights).float()
