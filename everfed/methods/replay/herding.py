"""iCaRL's herding: exemplars whose mean follows the class mean, in an order that may be cut anywhere.

Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning", 2017, Algorithms 4 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from everfed.method import CLASSES, Phase, Tree, option
from everfed.methods.common.layers import features
from everfed.methods.replay.diversity import unit_rows
from everfed.methods.replay.memory import Memory, Policy, Pool


@dataclass(frozen=True)
class Herding(Policy):
    """Every class that the client has ever seen gets an equal share of the buffer. A class that comes back is herded
    anew from its new samples and its exemplars together."""

    last: bool = option(
        False, about="choose at the end of the last task, too, for parts that classify by exemplars (icarl)"
    )

    kind = "herding"
    about = "iCaRL's herding: exemplars whose mean follows the class mean"

    def needs(self):
        return {CLASSES}

    def phases(self, memory: Memory) -> tuple[Phase, ...]:
        return tuple(replace(phase, in_last_round=self.last) for phase in super().phases(memory))

    def init(self, size: int) -> Tree:
        return {"classes": torch.zeros(0, dtype=torch.int64)}

    def choose(self, pool: Pool, size: int) -> np.ndarray:
        labels = pool.y.cpu().numpy()
        current = np.unique(labels[: pool.new])
        seen = np.union1d(pool.state["classes"].numpy(), current)
        pool.state["classes"] = torch.from_numpy(seen)
        m = quota(size, len(seen))
        chosen = [np.zeros(0, dtype=np.int64)]
        found = features(pool.client.trainer, pool.model, pool.x).cpu() if len(current) else torch.zeros(0, 1)
        for label in np.unique(labels):
            rows = np.flatnonzero(labels == label)
            # stored exemplars are in herding order, so that an old class is cut to its first m
            chosen.append(rows[herd(found[rows], m)] if label in current else rows[:m])
        return np.concatenate(chosen)


def herd(features: Tensor | np.ndarray, m: int) -> np.ndarray:
    """The positions of the first `m` exemplars of one class, in herding order; all positions when m >= n.

    features: (n, D) of one class; scaled to length 1 here (a zero feature stays zero). Ties: the earlier position.
    p_k = argmin || mu - (phi(x) + sum_{j<k} phi(p_j)) / k || over x not yet chosen.
    """
    phi = unit_rows(features).cpu().numpy()
    mean = phi.mean(axis=0) if len(phi) else np.zeros(phi.shape[1])
    squares = (phi**2).sum(axis=1)
    chosen: list[int] = []
    total = np.zeros(phi.shape[1])
    for k in range(1, min(m, len(phi)) + 1):
        # k^2 times the squared norm above, less what does not depend on x
        distance = squares - 2 * phi @ (k * mean - total)
        distance[chosen] = np.inf
        chosen.append(int(np.argmin(distance)))
        total += phi[chosen[-1]]
    return np.array(chosen, dtype=np.int64)


def quota(budget: int, classes: int) -> int:
    """Exemplars per class: an equal share of the budget over all classes this client has seen."""
    return budget // classes if classes else 0
