"""Exemplars kept when a client detects by itself that its task has changed (GLFC, Dong et al., 2022).

In every round every client, whether it trains or not, passes its data through the model that the round begins with.
Its mean prediction entropy

    H = - mean_i sum_c p_ic log(p_ic + 1e-5)

jumps when the data is new to the model: by more than a threshold, and the classes of the data before count as learned.
Their data is gone by then, so exemplars of the current data are set aside in every round; a jump makes them part of the
memory, and otherwise they are replaced. Of a task whose end is not detected nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from everfed.method import CLASSES, Cohort, Phase, Tree, When, option
from everfed.methods.common.layers import outputs_and_features
from everfed.methods.common.teacher import competing
from everfed.methods.replay.herding import herd, quota
from everfed.methods.replay.memory import REMEMBER, Memory, Policy, Pool


@dataclass(frozen=True)
class OnTransition(Policy):
    """Every learned class and every current one has the same share of the buffer, chosen by iCaRL's herding. Rows of
    the buffer: exemplars of learned classes, each class in herding order, then `host/staged` of the current data."""

    threshold: float = option(1.2, at_least=0, about="by how much the entropy must rise")
    detect: str = option(
        "entropy", one_of=("entropy", "boundary"), about="by the entropy, or at the stream's task boundary"
    )

    kind = "on-transition"
    about = "GLFC's exemplars: herding, when a client's entropy shows that its task has changed"

    def needs(self):
        return {CLASSES}

    def init(self, size: int) -> Tree:
        """entropy: H in the last round. signal: did it jump then? task: the last one known. learned: classes with
        exemplars. staged: how many of the stored rows, the last ones, are of current data."""
        none = torch.zeros(0, dtype=torch.int64)
        return {"entropy": 0.0, "signal": False, "task": -1, "learned": none, "staged": 0}

    def phases(self, memory: Memory):
        """Before training, in every round, on every client: a change that only participants could detect would be
        lost on all others."""
        return (Phase(REMEMBER, Cohort.ALL, when=When.BEFORE, run=memory.choose),)

    def choose(self, pool: Pool, size: int) -> np.ndarray:
        if pool.new == 0:  # no entropy to compare
            pool.state["signal"] = False
            return np.arange(pool.stored)
        outputs, features = outputs_and_features(pool.client.trainer, pool.model, pool.x)
        now = entropy(outputs[: pool.new].index_select(1, competing(pool.client).to(outputs.device)))
        signal = self.fires(now, pool)
        labels, border = pool.y.numpy(force=True), len(pool) - int(pool.state["staged"])
        old = _committed(pool, border, signal)
        m = quota(size, len(np.unique(labels[old])) + len(np.unique(labels[: pool.new])))

        def herded(rows: np.ndarray) -> np.ndarray:
            return rows[herd(features[torch.from_numpy(rows)], m)]

        def cut(rows: np.ndarray) -> np.ndarray:
            """A class in one herding order is cut; one that came back is herded anew."""
            return rows[:m] if (rows < border).all() or (rows >= border).all() else herded(rows)

        kept, staged = _by_class(old, labels, cut), _by_class(np.arange(pool.new), labels, herded)
        task = -1 if pool.client.task is None else pool.client.task
        learned = torch.from_numpy(np.unique(labels[kept]))
        pool.state.update({"entropy": now, "signal": signal, "task": task, "learned": learned, "staged": len(staged)})
        return np.concatenate([kept, staged])

    def fires(self, now: float, pool: Pool) -> bool:
        """Has the task changed? The first data a client ever has is a change too, if it is new to the model."""
        if self.detect == "entropy":
            return bool(now - float(pool.state["entropy"]) > self.threshold)
        if pool.client.task is None:
            raise ValueError("memory.policy.detect = 'boundary' needs a stream that tells when a task begins or ends")
        return bool(pool.state["task"] != pool.client.task)


def entropy(outputs: Tensor) -> float:
    """Mean over samples of the entropy of softmax(outputs), in nats, with GLFC's 1e-5 inside the logarithm."""
    p = functional.softmax(outputs, dim=1)
    return float(-(p * torch.log(p + 1e-5)).sum(1).mean())


def _committed(pool: Pool, border: int, signal: bool) -> np.ndarray:
    """Positions in the pool of what is kept for good: exemplars of learned classes and, on a signal, what was set aside
    (from `border` on) of data that is no longer there."""
    settled, aside = np.arange(pool.new, border), np.arange(border, len(pool))
    gone = aside[~np.isin(pool.ids[aside], pool.ids[: pool.new])]
    return np.concatenate([settled, gone]) if signal else settled


def _by_class(positions: np.ndarray, labels: np.ndarray, choose: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """What `choose` takes of the positions of every class, one class after the other."""
    chosen = [choose(positions[labels[positions] == label]) for label in np.unique(labels[positions])]
    return np.concatenate([np.zeros(0, dtype=np.int64), *chosen])
