"""The selection policies by name, and those that choose at the end of a task and compare no gradient directions.

Random policies: "Coordinated Replay Sample Selection for Continual Federated Learning", Appendix A. Herding: iCaRL
(Rebuffi et al., 2017). Importance: Re-Fed (Li et al., 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.data import minibatches
from everfed.core.legacy import Tree
from everfed.methods.common.checks import at_least
from everfed.methods.replay import random_policies
from everfed.methods.replay.coordinated import Coordinated, Uncoordinated
from everfed.methods.replay.gradient_rows import features_at, norms_at
from everfed.methods.replay.gss_policies import GSSCluster, GSSGreedy
from everfed.methods.replay.herding import herd, quota
from everfed.methods.replay.importance import importance, most_important, proximity
from everfed.methods.replay.policy import Policy, Pool
from everfed.methods.replay.reservoir import Reservoir
from everfed.methods.replay.transition import OnTransition
from everfed.naming import load_object, with_options

Choice = tuple[np.ndarray, Tree]


@dataclass(frozen=True)
class NaiveUniform(Policy):
    """No options."""

    kind = "naive-uniform"
    about = "uniformly from the task's samples and the stored ones; old tasks fade geometrically"
    needs_model = False

    def choose(self, pool: Pool, size: int, host: Tree, message: Tree) -> Choice:
        return random_policies.naive_uniform(pool.new, pool.stored, size, pool.ctx.rng(self.kind)), host


@dataclass(frozen=True)
class ApproximateUniform(Policy):
    """No options."""

    kind = "approximate-uniform"
    about = "the same expected share of every task's samples"
    needs_model = False

    def choose(self, pool: Pool, size: int, host: Tree, message: Tree) -> Choice:
        rng = pool.ctx.rng(self.kind)
        return random_policies.approximate_uniform(pool.new, pool.stored, pool.seen_before, size, rng), host


@dataclass(frozen=True)
class FixedProportion(Policy):
    """proportion: p, the share of the buffer that goes to the newest task (not in the paper; 0.5 by default)."""

    proportion: float = 0.5

    kind = "fixed-proportion"
    about = "a fixed share of the buffer for the newest task"
    needs_model = False

    def __post_init__(self) -> None:
        if not 0 < self.proportion < 1:
            raise ValueError(f"proportion must lie strictly between 0 and 1; got {self.proportion}")

    def choose(self, pool: Pool, size: int, host: Tree, message: Tree) -> Choice:
        rng = pool.ctx.rng(self.kind)
        return random_policies.fixed_proportion(pool.new, pool.stored, size, self.proportion, rng), host


@dataclass(frozen=True)
class Herding(Policy):
    """Every class that the client has ever seen gets an equal share of the buffer. A class that comes back is herded
    anew from its new samples and its exemplars together."""

    kind = "herding"
    about = "iCaRL's herding: exemplars whose mean follows the class mean"
    needs_classes = True

    def host(self, size: int) -> Tree:
        return {"classes": torch.zeros(0, dtype=torch.int64)}

    def choose(self, pool: Pool, size: int, host: Tree, message: Tree) -> Choice:
        labels = pool.y.cpu().numpy()
        current = np.unique(labels[: pool.new])
        seen = np.union1d(host["classes"].numpy(), current)
        m = quota(size, len(seen))
        chosen = [np.zeros(0, dtype=np.int64)]
        features = features_at(pool.ctx, pool.weights, pool.x).cpu() if len(current) else torch.zeros(0, 1)
        for label in np.unique(labels):
            rows = np.flatnonzero(labels == label)
            # stored exemplars are in herding order, so that an old class is cut to its first m
            chosen.append(rows[herd(features[rows], m)] if label in current else rows[:m])
        return np.concatenate(chosen), {**host, "classes": torch.from_numpy(seen)}


@dataclass(frozen=True)
class ReFed(Policy):
    """passes: s, steps of the personalised informative model v. informative: lambda in (0, 1); near 0 v stays at the
    global model, near 1 it goes its own way. power: 2 adds up squared gradient norms. exact: score all samples of a
    pass at the v of its start."""

    passes: int = 5
    informative: float = 0.5
    power: int = 1
    exact: bool = True

    kind = "re-fed"
    about = "Re-Fed: the samples that matter most to a model between the local and the global one"

    def __post_init__(self) -> None:
        proximity(self.informative)
        at_least(self, 1, "passes")
        if self.power not in (1, 2):
            raise ValueError(f"power must be 1 (norms) or 2 (squared norms); got {self.power}")

    def choose(self, pool: Pool, size: int, host: Tree, message: Tree) -> Choice:
        if len(pool) <= size:
            return np.arange(len(pool)), host
        return most_important(self.scores(pool), size), host

    def scores(self, pool: Pool) -> np.ndarray:
        """(new + stored,) I(x) of every sample of the pool."""
        ctx, model = pool.ctx, pool.weights
        order = minibatches(np.arange(len(pool)), 1, ctx.options.batch_size, ctx.rng(self.kind)).rows

        def samples(rows: np.ndarray) -> tuple[Tensor, Tensor]:
            index = torch.from_numpy(rows).to(pool.x.device)
            return pool.x.index_select(0, index), pool.y.index_select(0, index)

        def norms(v: Tensor, rows: np.ndarray) -> Tensor:
            return norms_at(ctx, {**model, "params": v}, *samples(rows), pool.gradient_options.limit)

        def gradient(v: Tensor, rows: np.ndarray) -> Tensor:
            return ctx.train.gradient(ctx, {**model, "params": v}, *samples(rows), mode="eval", tag=self.kind)

        return importance(
            model["params"].to(ctx.train.device),
            norms,
            gradient,
            [order.row(step) for step in range(len(order.lengths))],
            learning_rate=ctx.rate,
            passes=self.passes,
            informative=self.informative,
            power=self.power,
            exact=self.exact,
        )


POLICIES: Mapping[str, type[Policy]] = {
    policy.kind: policy
    for policy in (
        Reservoir,
        NaiveUniform,
        ApproximateUniform,
        FixedProportion,
        Herding,
        OnTransition,
        GSSGreedy,
        GSSCluster,
        Uncoordinated,
        Coordinated,
        ReFed,
    )
}


def make_policy(value: str | Mapping[str, Any] | type[Policy] | Policy) -> Policy:
    """A policy from its kind, its class, or a table {kind, and its options}; a kind may be `package.module:Name`.
    Raises ValueError, which names the key."""
    if isinstance(value, Policy):
        return value
    options = dict(value) if isinstance(value, Mapping) else {"kind": value}
    kind = options.pop("kind", "")
    cls = _find(kind, "policy.kind" if isinstance(value, Mapping) else "policy")
    return with_options(cls, options, "policy", f" of {kind!r}")


def _find(kind: Any, key: str) -> type[Policy]:
    found = kind
    if isinstance(kind, str):
        found = load_object(kind, key) if ":" in kind else POLICIES.get(kind)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ValueError(
            f"{key} must be one of {', '.join(POLICIES)}, or package.module:Name of a Policy; got {kind!r}"
        )
    return found
