"""Memory: the one replay buffer of a client, shared by every part that replays.

What it keeps is decided by its policy: the reservoir over the client's whole life by default (`reservoir`), or one of
`policies`, most of which choose at the end of a task, once, from its samples and the stored ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from everfed.core.context import Context
from everfed.core.data import Data
from everfed.core.message import MODEL
from everfed.core.part import TOGETHER, Part, State, Tables
from everfed.core.phase import Phase
from everfed.core.schedule import Schedule, Table
from everfed.core.step import Step
from everfed.core.trainer import Fitted
from everfed.core.tree import Tree
from everfed.parts.memory.policies import make_policy
from everfed.parts.memory.policy import REMEMBER, Policy, Pool
from everfed.parts.memory.reservoir import reservoir_rows
from everfed.parts.selection.gradient_rows import GradientOptions

__all__ = ["NAME", "Memory", "filled", "replay_rows", "reservoir_rows", "stored"]

NAME = "memory"
_PLAIN = GradientOptions()


@dataclass(frozen=True)
class Memory(Part):
    """size: B, samples per client. logits: also keep the outputs a sample had when it was stored (DER).
    offer: "first_visit" offers each sample once in the client's life, "every_visit" whenever it is trained on (to
    policies that decide while training). policy: what is kept; a policy's kind, or a table {kind, and its options}.
    gradients: how policies that look at gradients compute them, a table {layers, projection, memory}."""

    size: int = 200
    logits: bool = False
    offer: str = "first_visit"
    policy: str | Mapping[str, Any] | Policy = "reservoir"
    gradients: Mapping[str, Any] | GradientOptions = _PLAIN

    name: ClassVar[str] = NAME

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size must be at least 0; got {self.size}")
        if self.offer not in ("first_visit", "every_visit"):
            raise ValueError(f"offer must be 'first_visit' or 'every_visit'; got {self.offer!r}")
        object.__setattr__(self, "policy", make_policy(self.policy))
        object.__setattr__(self, "gradients", GradientOptions.of(self.gradients))

    @property
    def chooser(self) -> Policy:
        """The policy, made from what the option says."""
        return make_policy(self.policy)

    @property
    def how(self) -> GradientOptions:
        """How gradients are computed, made from what the option says."""
        return GradientOptions.of(self.gradients)

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        return self.chooser.capturable

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({TOGETHER}) if self.chooser.together else frozenset()

    @property
    def silent(self) -> frozenset[str]:  # type: ignore[override]
        """Nothing is sent for a choice that needs no model."""
        return frozenset() if self.chooser.needs_model or self.logits else frozenset({REMEMBER})

    def client_slots(self, ctx: Context) -> Tree:
        """x, y (and logits): (B + 1, ...) rows in storage form, the last one spare; rows 0 ... stored - 1 are valid.

        host: n (samples offered so far), seen (their ids, for policies that decide while training), ids (of the rows,
        -1 where there is none), stored, and what the policy remembers.
        """
        blank, device = ctx.facts.blank, ctx.train.device
        if self.chooser.needs_classes and blank.y.dim() != 1:
            raise ValueError(f"memory.policy = {self.chooser.kind!r} needs classes, which this stream has not")
        ids = torch.full((self.size + 1,), -1, dtype=torch.int64)
        host: Tree = {"n": 0, "seen": torch.zeros(0, dtype=torch.int64), "ids": ids, "stored": 0}
        slots: Tree = {"host": {**host, **self.chooser.host(self.size)}}
        slots["x"] = blank.x.new_zeros((self.size + 1, *blank.x.shape[1:]), device=device)
        slots["y"] = blank.y.new_zeros((self.size + 1, *blank.y.shape[1:]), device=device)
        if self.logits:
            slots["logits"] = torch.zeros((self.size + 1, *ctx.facts.outputs), device=device)
        return slots

    # in training -----------------------------------------------------------------------------------------------
    def plan(self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context) -> tuple[Tree, Tables]:
        own = client[NAME]
        host, tables = self.chooser.plan(self, own, schedule, ctx)
        return {**own, "host": host}, tables

    def after(self, step: Step) -> None:
        self.chooser.after(self, step)

    def reply(self, client: State, fitted: Fitted, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        """Wipe the spare row: what was rejected is not kept. The slots are the ones that training just made."""
        own = client[NAME]
        for key in ("x", "y", "logits"):
            if key in own:
                own[key][self.size].zero_()
        return own, {}

    def kept(self, own: Tree, task_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        return task_of(stored(own).ids)

    # at the end of a task ----------------------------------------------------------------------------------------
    def phases(self) -> tuple[Phase, ...]:
        return self.chooser.phases(NAME)

    def wanted(self, phase: str, ctx: Context) -> bool:
        return self.chooser.wanted(phase, ctx)

    def broadcast(self, server: State, phase: str, ctx: Context) -> dict[str, Any]:
        return self.chooser.broadcast(server.get(NAME, {}), phase, ctx)

    def update(self, server: State, phase: str, reduced: Tree, ctx: Context) -> Tree:
        return self.chooser.update(server.get(NAME, {}), phase, reduced, ctx)

    def done(self, server: State, phase: str, ctx: Context) -> bool:
        return self.chooser.done(server.get(NAME, {}), phase, ctx)

    def run(self, client: State, phase: str, message: dict[str, Tree], data: Data, ctx: Context) -> tuple[Tree, Tree]:
        own, heard = client[NAME], message.get(NAME, {})
        kept = stored(own)
        x, y = (torch.cat([new.to(old.device), old]) for new, old in ((data.x, kept.x), (data.y, kept.y)))
        ids = np.concatenate([data.ids, kept.ids])
        pool = Pool(x, y, len(data), len(kept), int(own["host"]["n"]), message.get(MODEL), self.how, ctx, ids)
        if phase != REMEMBER:
            host, reply = self.chooser.speak(pool, self.size, own["host"], heard)
            return {**own, "host": host}, reply
        chosen, host = self.chooser.choose(pool, self.size, own["host"], heard)
        return self._refilled(own, pool, chosen, ids[chosen], host), {}

    def _refilled(self, own: Tree, pool: Pool, chosen: np.ndarray, ids: np.ndarray, host: Tree) -> Tree:
        """The slots with the samples of the pool at `chosen` in the first rows and nothing in the others."""
        count, index = len(chosen), torch.from_numpy(chosen).to(pool.x.device)
        values = {"x": pool.x[index], "y": pool.y[index]}
        if self.logits:
            values["logits"] = self._outputs(own, pool)[index]
        slots: Tree = {}
        for key, rows in values.items():
            slots[key] = torch.zeros_like(own[key])
            slots[key][:count] = rows
        by_row = torch.full_like(own["host"]["ids"], -1)
        by_row[:count] = torch.from_numpy(ids)
        return {**slots, "host": {**host, "n": pool.seen_before + pool.new, "ids": by_row, "stored": count}}

    def _outputs(self, own: Tree, pool: Pool) -> Tensor:
        """Outputs of the new samples at the model of the task's end, and those that were stored."""
        fresh = pool.ctx.train.outputs(pool.weights, pool.x[: pool.new])
        return torch.cat([fresh, own["logits"][: pool.stored]])


def replay_rows(plans: Mapping[str, Tables], size: int, rng: np.random.Generator) -> Table:
    """For every step, min(size, filled) different rows of the buffer as it is before that step."""
    fill = plans[NAME]["fill"].values[:, 0]
    return Table.of([rng.permutation(filled)[:size] for filled in fill])


def filled(own: Tree, size: int) -> int:
    """How many rows of the buffer hold a sample."""
    return min(int(own["host"]["stored"]), size)


def stored(own: Tree) -> Data:
    """The samples in the buffer."""
    count = int(own["host"]["stored"])
    return Data(own["x"][:count], own["y"][:count], own["host"]["ids"][:count].numpy())
