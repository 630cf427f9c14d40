"""TIES-merging as a federated aggregator (Yadav et al., "TIES-Merging: Resolving Interference When Merging Models",
NeurIPS 2023, Algorithm 1).

A client's update tau_k = theta_k - theta is its task vector. The server

    trims:   hat tau_k keeps the share `density` of tau_k that is largest in magnitude; the rest is 0
    elects:  gamma = sgn(sum_k hat tau_k), the sign with the larger total magnitude, for every parameter
    merges:  tau = mean of the hat tau_k whose sign is gamma (0 where there is none)

    theta <- theta + scale tau

Every client counts the same. The server needs each update by itself, so secure aggregation is impossible. BatchNorm's
statistics are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everfed.method import Aggregator, Client, Collect, Mean, Model, Server, Tells, option


@dataclass(frozen=True)
class TIES(Aggregator):
    density: float = option(0.2, above=0, at_most=1, about="k, the share of an update's entries that trimming keeps")
    scale: float = option(1.0, above=0, about="lambda, of the merged update")

    name = "ties"

    def upload(self, client: Client):
        """The update rather than the model: as many bytes, and the server need not hold both."""
        statistics = {key: value for key, value in super().upload(client).items() if key != "params"}
        return {"update": client.update, **statistics}

    def reducers(self):
        return {"update": Collect(tells=Tells.GRADIENTS), "stats": Mean(), "counters": Mean()}

    def aggregate(self, server: Server) -> Model:
        model, updates = super().aggregate(server), server.reduced.get("update")
        if not updates:
            return model
        merged = merge([trim(update, self.density) for update in updates.values()])
        return {**model, "params": model["params"].to(merged.device) + self.scale * merged}


def trim(update: Tensor, density: float) -> Tensor:
    """The entries of largest magnitude, at least one; zeros elsewhere. Entries as large as the smallest that is kept
    are kept, too."""
    if density == 1 or update.numel() == 0:
        return update
    size = update.abs()
    least = size.topk(max(1, round(density * update.numel()))).values[-1]
    return update.where(size >= least, torch.zeros_like(update))


def merge(trimmed: Sequence[Tensor]) -> Tensor:
    """The mean of the entries with the elected sign, over the clients that have one there."""
    total = torch.zeros_like(trimmed[0], dtype=torch.float64)
    for update in trimmed:
        total += update
    sign, count = total.sign(), torch.zeros_like(total)
    total.zero_()
    for update in trimmed:
        agrees = (update.sign() == sign) & (sign != 0)
        total += update * agrees
        count += agrees
    return (total / count.clamp(min=1)).to(trimmed[0].dtype)
