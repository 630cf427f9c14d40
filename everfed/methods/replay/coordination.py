"""Coordinated selection: clients choose together, exchanging nothing but a mean (Algorithm 1).

"Coordinated Replay Sample Selection for Continual Federated Learning", objective (8): find x_m and targets h_m with
sum_m h_m = 0 that minimise M sum_m ||G_m x_m - h_m||^2. At its optimum this is ||sum_m G_m x_m||^2 (Theorem 1).
Alternate: every client solves for x_m given h_m; the server averages y_m = G_m x_m; h_m = y_m - mean.

The steps are functions of one client, for a protocol to call; `coordinate` runs them all in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everfed.methods.replay.capped_simplex import largest
from everfed.methods.replay.diversity import Candidates, Seed, convex_weights, zero_diagonal_weights

ROUNDINGS = ("zero-diagonal", "top-n")


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
