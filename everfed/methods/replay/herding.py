"""iCaRL's herding: exemplars whose mean follows the class mean, in an order that may be cut anywhere.

Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning", 2017, Algorithms 4 and 5.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from everfed.methods.replay.directions import unit_rows


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
