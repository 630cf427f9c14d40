"""Re-Fed: cache the samples that matter most to a model between the local and the global one.

Li et al., "Towards Efficient Replay in Federated Incremental Learning", CVPR 2024. A personalised informative model v
leaves the global w for s passes over the client's samples, drawn back to w by q(lambda) (v - w); a sample's importance
is the sum over passes p of (1/p) times the norm of its gradient at v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everfed.core.data import minibatches
from everfed.method import option
from everfed.methods.regularise.fedssi import check_rate, proximity
from everfed.methods.replay.diversity import largest
from everfed.methods.replay.memory import Policy, Pool
from everfed.methods.replay.sample_gradients import norms_at

Norms = Callable[[Tensor, np.ndarray], Tensor]
"""(v, rows) -> (len(rows),) norms of the single-sample gradients at v."""
Gradient = Callable[[Tensor, np.ndarray], Tensor]
"""(v, rows) -> gradient at v of the mean loss over the rows, shaped like v."""


@dataclass(frozen=True)
class ReFed(Policy):
    passes: int = option(5, at_least=1, about="s, steps of the personalised informative model v")
    informative: float = option(
        0.5, above=0, below=1, about="lambda; near 0 v stays at the global model, near 1 it goes its own way"
    )
    power: int = option(1, one_of=(1, 2), about="2 adds up squared gradient norms")
    exact: bool = option(True, about="score all samples of a pass at the v of its start")

    kind = "re-fed"
    about = "Re-Fed: the samples that matter most to a model between the local and the global one"

    def choose(self, pool: Pool, size: int) -> np.ndarray:
        if len(pool) <= size:
            return np.arange(len(pool))
        return most_important(self.scores(pool), size)

    def scores(self, pool: Pool) -> np.ndarray:
        """(new + stored,) I(x) of every sample of the pool."""
        client, model = pool.client, pool.model
        rate = client.options.optimizer.lr  # a task's first: a schedule's last would leave v at w, whatever lambda is
        check_rate("informative", self.informative, rate, "train.optimizer.lr")
        order = minibatches(np.arange(len(pool)), 1, client.options.batch_size, pool.rng(self.kind)).rows

        def samples(rows: np.ndarray) -> tuple[Tensor, Tensor]:
            index = torch.from_numpy(rows).to(pool.x.device)
            return pool.x.index_select(0, index), pool.y.index_select(0, index)

        def norms(v: Tensor, rows: np.ndarray) -> Tensor:
            return norms_at(client.context, {**model, "params": v}, *samples(rows), pool.gradient_options.limit)

        def gradient(v: Tensor, rows: np.ndarray) -> Tensor:
            return client.gradient(*samples(rows), model={**model, "params": v}, mode="eval", tag=self.kind)

        return importance(
            model["params"].to(client.device),
            norms,
            gradient,
            [order.row(step) for step in range(len(order.lengths))],
            learning_rate=rate,
            passes=self.passes,
            informative=self.informative,
            power=self.power,
            exact=self.exact,
        )


def importance(
    weights: Tensor,
    norms: Norms,
    gradient: Gradient,
    batches: Sequence[np.ndarray],
    *,
    learning_rate: float,
    passes: int = 5,
    informative: float = 0.5,
    power: int = 1,
    exact: bool = True,
) -> np.ndarray:
    """(n,) scores I(x) >= 0 of the n samples that `batches` (arrays of positions) partition.

    weights: the global model, flat; never written. informative: lambda. power: 2 scores squared norms.
    exact: every sample of a pass is scored at the v of the pass's start, so that scores do not depend on where in
    a pass a sample comes; otherwise at the v its batch meets, which a caller can get from the same backward pass.
    """
    pull = proximity(informative)
    scores = np.zeros(sum(len(rows) for rows in batches))
    v = weights.detach().clone()
    for p in range(1, passes + 1):
        start = v
        for rows in batches:
            scores[rows] += _numbers(norms(start if exact else v, rows)) ** power / p
            if p < passes or not exact:  # v is not used after the last scores
                v = informative_step(v, weights, gradient(v, rows), learning_rate, pull)
    return scores


def _numbers(values: Tensor) -> np.ndarray:
    return values.detach().double().cpu().numpy()


def informative_step(v: Tensor, weights: Tensor, gradient: Tensor, learning_rate: float, pull: float) -> Tensor:
    """v - eta (grad + q (v - w)): one step of the personalised informative model; returns a new tensor."""
    with torch.no_grad():
        return v - learning_rate * (gradient + pull * (v - weights))


def most_important(scores: np.ndarray, m: int) -> np.ndarray:
    """The positions of the m highest scores (all, when fewer), ascending; among equals the earlier position."""
    return largest(scores, m)
