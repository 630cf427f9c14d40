"""Replay samples with diverse gradients, chosen by each client alone or by all of them together.

"Coordinated Replay Sample Selection for Continual Federated Learning". Alone: of the task's samples and the stored ones
keep the N whose unit gradients have the shortest sum (Eq. 3, relaxed). Together (Algorithm 1): clients exchange nothing
but the mean of their weighted sums of unit gradients, so that the phase runs under secure aggregation.

    select, T times:   client -> server   y_m = G_m x_m            server -> client   the mean of all y
    remember:          h_m = y_m - mean,  x_m <- argmin ||G_m x - h_m||^2,  keep the N samples it points to

Objective (8) is to find x_m and targets h_m with sum_m h_m = 0 that minimise M sum_m ||G_m x_m - h_m||^2; at its
optimum this is ||sum_m G_m x_m||^2 (Theorem 1).

From one exchange to the next a client keeps its weights x_m and, where gradients are projected and so small, G_m;
others are computed anew in every exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from everfed.method import END, TOGETHER, Client, Cohort, Mean, Phase, Server, Tells, option
from everfed.methods.replay.diversity import (
    RELAXATIONS,
    Candidates,
    Seed,
    convex_weights,
    largest,
    select,
    zero_diagonal_weights,
)
from everfed.methods.replay.memory import Memory, Policy, Pool

SELECT = "select"
COHORTS = {"all": Cohort.BOUNDARY, "sampled": Cohort.SAMPLED}
ROUNDINGS = ("zero-diagonal", "top-n")
_SEED = "selection"  # names the random start of the last descent: the same with and without coordination


@dataclass(frozen=True)
class Uncoordinated(Policy):
    relaxation: str = option("zero-diagonal", one_of=RELAXATIONS, about="of the choice to weights (see `diversity`)")

    kind = "uncoordinated"
    about = "each client by itself: samples whose gradients point in different directions"

    def choose(self, pool: Pool, size: int) -> np.ndarray:
        if len(pool) <= size or size == 0:
            return np.arange(min(len(pool), size))
        seed = pool.client.key(_SEED)
        return select(pool.gradients(), size, self.relaxation, seed=seed)


@dataclass(frozen=True)
class Coordinated(Policy):
    exchanges: int = option(1, at_least=0, about="T, how often the mean is exchanged; 0 is the uncoordinated choice")
    rounding: str = option(
        "zero-diagonal",
        one_of=ROUNDINGS,
        about="how weights become a choice: one more descent, or the n largest (printed)",
    )
    delta: float = option(
        0.0,
        at_least=0,
        below=1,
        about="subtracted from the Gram matrix's diagonal in the exchanges; 0 is the paper, 1 / clients removes the "
        "diagonal of the common one",
    )
    tolerance: float = option(
        0.0, at_least=0, about="stop when an exchange shortens the sum's square by no more than this share (0: never)"
    )
    speakers: str = option(
        "all",
        one_of=tuple(COHORTS),
        about="who exchanges: all clients, or those sampled for the round; the others choose by themselves",
    )

    kind = "coordinated"
    about = "all clients together: samples whose gradients cancel over the federation"

    def needs(self):
        """Where clients change tasks at different rounds, too few choose at once to be coordinated."""
        return {TOGETHER} if self.exchanges else set()

    def phases(self, memory: Memory):
        (choice,) = super().phases(memory)
        if self.exchanges == 0:
            return (choice,)
        exchange = Phase(
            SELECT,
            COHORTS[self.speakers],
            END,
            reduce={"sum": Mean(tells=Tells.SUMS)},
            repeat=self.exchanges,
            in_last_round=False,
            broadcast=_send_mean,
            run=partial(self._exchange, memory),
            update=self._keep_mean,
        )
        return exchange, replace(choice, broadcast=_send_mean, update=_forget)

    # on clients --------------------------------------------------------------------------------------------------
    def _exchange(self, memory: Memory, client: Client):
        """Solve for the weights and send the weighted sum; a client without samples sends nothing."""
        pool = memory.pool(client)
        if len(pool) == 0:
            return {}
        gradients = _gradients(pool)
        candidates = Candidates.of(gradients)
        weights = self._weights(candidates, memory.size, pool)
        pool.state["sent"] = {"weights": torch.from_numpy(weights), "round": client.round}
        if memory.gradient_options.projection:
            pool.state["sent"]["gradients"] = gradients.cpu()
        return {"sum": _sent(candidates, weights)}

    def choose(self, pool: Pool, size: int) -> np.ndarray:
        chosen = self._choice(pool, size)
        pool.state.pop("sent", None)
        return chosen

    def _choice(self, pool: Pool, size: int) -> np.ndarray:
        if len(pool) <= size or size == 0:
            return np.arange(min(len(pool), size))
        candidates, seed = Candidates.of(_gradients(pool)), pool.client.key(_SEED)
        weights = np.zeros(len(candidates.directed))
        if self.rounding == "top-n" or size == 1:  # otherwise they are not used
            weights = self._weights(candidates, size, pool)
        return client_choice(candidates, size, weights, _target(candidates, pool), self.rounding, seed)

    def _weights(self, candidates: Candidates, size: int, pool: Pool) -> np.ndarray:
        target = _target(candidates, pool)
        start = None if target is None else pool.state["sent"]["weights"].numpy()
        return client_step(candidates, size, target, start, self.delta)

    # on the server -----------------------------------------------------------------------------------------------
    def _keep_mean(self, server: Server) -> bool:
        """mean: of what the clients sent. square: its squared length, M^-2 times the relaxed objective; it never
        increases from one exchange to the next. before: the square of the exchange before.

        True when the exchange shortened the sum by too little."""
        own, mean = server.state, server.reduced.get("sum")
        if mean is not None:
            square = float(mean.double().square().sum())
            own |= {"mean": mean, "square": square, "before": own.get("square")}
        before = own.get("before")
        return bool(self.tolerance and before is not None and before - own["square"] <= self.tolerance * before)


def _gradients(pool: Pool) -> Tensor:
    """G_m: of the exchange before, if it is kept."""
    sent = pool.state.get("sent", {})
    if "gradients" in sent and sent["round"] == pool.client.round:
        kept: Tensor = sent["gradients"].to(pool.client.device)
        return kept
    return pool.gradients()


def _target(candidates: Candidates, pool: Pool) -> Tensor | None:
    """h_m = y_m - mean, y_m as it was sent; None for a client that sent nothing in this selection."""
    sent = pool.state.get("sent")
    if "mean" not in pool.message or sent is None or sent["round"] != pool.client.round:
        return None
    own_sum = _sent(candidates, sent["weights"].numpy())
    return client_target(own_sum.double(), pool.message["mean"].to(own_sum.device).double())


def _sent(candidates: Candidates, weights: np.ndarray) -> Tensor:
    """y_m = G_m x_m as it crosses the wire, in single precision."""
    return candidates.weighted_sum(weights).float()


def _send_mean(server: Server):
    """The mean of the exchange before; there is none at the beginning."""
    return {"mean": server.state["mean"]} if "mean" in server.state else {}


def _forget(server: Server) -> None:
    """Once clients have chosen, the server keeps nothing."""
    server.state = {}


# Algorithm 1 as functions of one client, and of all in memory ---------------------------------------------------------
def client_step(
    candidates: Candidates,
    n: int,
    target: Tensor | None = None,
    start: np.ndarray | None = None,
    delta: float = 0.0,
) -> np.ndarray:
    """x_m = argmin ||G_m x - h_m||^2 over the capped simplex, warm from `start`; shape (directed samples,).

    delta: subtracted from Q's diagonal; 1/M removes the diagonal of all clients' common Gram matrix, 0 is the paper.
    The convex step, because vertices do not move: with the whole diagonal removed the exchange stalls.
    """
    return convex_weights(candidates, n, candidates.along(target), start, delta)


def client_target(message: Tensor, mean: Tensor) -> Tensor:
    """h_m = y_m - mean of all y: the client's share of directions that sum to zero (Algorithm 1, server step)."""
    return message - mean


def client_choice(
    candidates: Candidates,
    n: int,
    weights: np.ndarray,
    target: Tensor | None = None,
    rounding: str = "zero-diagonal",
    seed: Seed = 0,
) -> np.ndarray:
    """The positions to keep, ascending, from the last weights and target.

    rounding: "zero-diagonal" solves once more without the diagonal, so that no exchange at all gives exactly the
    uncoordinated `select`; "top-n" takes the largest weights, as printed. With n = 1 both take the largest weight.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")
    if rounding == "zero-diagonal" and n > 1:
        weights = zero_diagonal_weights(candidates, n, candidates.along(target), seed)
    return candidates.pick(largest(weights, n), n, seed)


@dataclass(frozen=True)
class Coordination:
    """What came of it, per client: choices (positions), weights x_m, targets h_m (None before any exchange).

    objectives[k]: the relaxed objective ||sum_m y_m||^2 after k exchanges; it never increases (with delta = 0).
    """

    choices: tuple[np.ndarray, ...]
    weights: tuple[np.ndarray, ...]
    targets: tuple[Tensor | None, ...]
    objectives: tuple[float, ...]


def coordinate(
    gradients_by_client: Sequence[Tensor | np.ndarray],
    n: int | Sequence[int],
    iterations: int,
    *,
    rounding: str = "zero-diagonal",
    delta: float = 0.0,
    tolerance: float | None = None,
    seeds: Sequence[Seed] | None = None,
) -> Coordination:
    """Coordinated selection of n (or n[m]) samples per client after `iterations` exchanges of a mean.

    gradients_by_client: one (n'_m, d) matrix per taking-part client, same d. A client without samples keeps nothing
    and is not counted in the mean; one with n or fewer keeps all and is counted.
    tolerance: stop earlier once one exchange lowers the objective by no more than this fraction.
    seeds: one per client; 0 for all by default, as in `select`.
    """
    clients = [Candidates.of(gradients) for gradients in gradients_by_client]
    sizes = [n] * len(clients) if isinstance(n, int | np.integer) else list(n)
    targets: list[Tensor | None] = [None] * len(clients)
    weights = [client_step(client, size, delta=delta) for client, size in zip(clients, sizes, strict=True)]
    messages = [client.weighted_sum(x) for client, x in zip(clients, weights, strict=True)]
    objectives = [_objective(messages)]
    for _ in range(iterations):
        targets = _share(messages, [len(client.norms) > 0 for client in clients])
        weights = [client_step(*step, delta) for step in zip(clients, sizes, targets, weights, strict=True)]
        messages = [client.weighted_sum(x) for client, x in zip(clients, weights, strict=True)]
        objectives.append(_objective(messages))
        if tolerance is not None and objectives[-2] - objectives[-1] <= tolerance * objectives[-2]:
            break
    chosen = zip(clients, sizes, weights, targets, seeds or [0] * len(clients), strict=True)
    choices = [client_choice(client, size, x, h, rounding, seed) for client, size, x, h, seed in chosen]
    return Coordination(tuple(choices), tuple(weights), tuple(targets), tuple(objectives))


def _share(messages: Sequence[Tensor], counted: Sequence[bool]) -> list[Tensor | None]:
    """The server step: the mean over the counted clients, and each one's target."""
    sent = [message for message, counts in zip(messages, counted, strict=True) if counts]
    mean = torch.stack(sent).mean(dim=0) if sent else None
    return [
        client_target(message, mean) if mean is not None and counts else None
        for message, counts in zip(messages, counted, strict=True)
    ]


def _objective(messages: Sequence[Tensor]) -> float:
    """||S||^2, S the sum of all messages; the server knows it as M^2 ||mean||^2."""
    return float((torch.stack(list(messages)).sum(dim=0) ** 2).sum()) if messages else 0.0
