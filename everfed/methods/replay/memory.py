"""Memory: the one replay buffer of a client, shared by every part that replays.

Its policy decides what it holds: the reservoir over the client's whole life by default (`reservoir`), or one of
`policies`, most of which choose once, at the end of a task, from its samples and the stored ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.legacy import (
    CLASSES,
    MODEL,
    TOGETHER,
    Context,
    Data,
    Fitted,
    Message,
    Part,
    Phase,
    Schedule,
    State,
    Step,
    Table,
    Tables,
    Tree,
)
from everfed.methods.common.checks import at_least, one_of
from everfed.methods.replay.gradient_rows import GradientOptions
from everfed.methods.replay.policies import make_policy
from everfed.methods.replay.policy import NAME, Policy, Pool
from everfed.methods.replay.reservoir import reservoir_rows

__all__ = ["NAME", "Memory", "filled", "replay_rows", "reservoir_rows", "stored"]

OFFERS = ("first_visit", "every_visit")


@dataclass(frozen=True)
class Memory(Part):
    """size: B, samples per client. logits: also keep the outputs a sample had when it was stored (DER).
    offer: "first_visit" offers each sample once in the client's life, "every_visit" whenever it is trained on (to
    policies that decide while training). policy: what is kept; a policy's kind or package.module:Name, or a table
    {kind, and its options}; in Python also a policy or its class. gradients: how policies compute gradients of samples,
    a table {layers, projection, memory}."""

    size: int = 200
    logits: bool = False
    offer: str = "first_visit"
    policy: str | Mapping[str, Any] | type[Policy] | Policy = field(default="reservoir", hash=False)
    gradients: Mapping[str, Any] | GradientOptions = field(default=GradientOptions(), hash=False)

    name = NAME

    def __post_init__(self) -> None:
        at_least(self, 0, "size")
        one_of(self, offer=OFFERS)
        _ = self.chooser, self.gradient_options  # made once, here, so that a wrong option is refused

    @cached_property
    def chooser(self) -> Policy:
        """The policy that the option `policy` names."""
        return make_policy(self.policy)

    @cached_property
    def gradient_options(self) -> GradientOptions:
        """The option `gradients` as an object."""
        return GradientOptions.of(self.gradients)

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        return self.chooser.capturable

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        together = {TOGETHER} if self.chooser.together else set()
        return frozenset(together | ({CLASSES} if self.chooser.needs_classes else set()))

    def phases(self) -> tuple[Phase, ...]:
        return self.chooser.phases(self)

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

    def buffer_tasks(self, own: Tree, task_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """The task of every stored sample."""
        return task_of(stored(own).ids)

    # in training -------------------------------------------------------------------------------------------------
    def plan(self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context) -> tuple[Tree, Tables]:
        own = client[NAME]
        host, tables = self.chooser.plan(self, own, schedule, ctx)
        return {**own, "host": host}, tables

    def after(self, step: Step) -> None:
        self.chooser.after(self, step)

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        """Wipe the spare row, so that rejected samples are not kept; in place, in the slots that training just made."""
        own = client[NAME]
        for key in ("x", "y", "logits"):
            if key in own:
                own[key][self.size].zero_()
        return own, {}

    # in the policy's phases --------------------------------------------------------------------------------------
    def choose(self, client: State, message: Message, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        """Refill the buffer with what the policy chooses."""
        own, pool = client[NAME], self.pool(client, message, data, ctx)
        chosen, host = self.chooser.choose(pool, self.size, own["host"], message.get(NAME, {}))
        return self._refilled(own, pool, chosen, host), {}

    def pool(self, client: State, message: Message, data: Data, ctx: Context) -> Pool:
        """The client's current samples and its stored ones, to choose from."""
        own, old = client[NAME], stored(client[NAME])
        return Pool(
            torch.cat([data.x.to(old.x.device), old.x]),
            torch.cat([data.y.to(old.y.device), old.y]),
            np.concatenate([data.ids, old.ids]),
            new=len(data),
            stored=len(old),
            seen_before=int(own["host"]["n"]),
            model=message.get(MODEL),
            gradient_options=self.gradient_options,
            ctx=ctx,
        )

    def _refilled(self, own: Tree, pool: Pool, chosen: np.ndarray, host: Tree) -> Tree:
        """The slots with the samples of the pool at `chosen` in the first rows and nothing in the others."""
        count, index = len(chosen), torch.from_numpy(chosen).to(pool.x.device)
        values = {"x": pool.x[index], "y": pool.y[index]}
        if self.logits:
            values["logits"] = self._outputs(own, pool)[index]
        slots: Tree = {}
        for key, rows in values.items():
            slots[key] = torch.zeros_like(own[key])
            slots[key][:count] = rows
        ids = torch.full_like(own["host"]["ids"], -1)
        ids[:count] = torch.from_numpy(pool.ids[chosen])
        return {**slots, "host": {**host, "n": pool.seen_before + pool.new, "ids": ids, "stored": count}}

    def _outputs(self, own: Tree, pool: Pool) -> Tensor:
        """Outputs of the new samples at the shared model, and those that were stored."""
        fresh = pool.ctx.train.outputs(pool.weights, pool.x[: pool.new])
        return torch.cat([fresh, own["logits"][: pool.stored]])


def replay_rows(plans: Mapping[str, Tables], size: int, rng: np.random.Generator) -> Table:
    """For every step, min(size, filled) different rows of the buffer as it is before that step."""
    fill = plans[NAME]["fill"].values[:, 0]
    return Table.of([rng.permutation(rows)[:size] for rows in fill])


def filled(own: Tree, size: int) -> int:
    """How many rows of the buffer hold a sample."""
    return min(int(own["host"]["stored"]), size)


def stored(own: Tree) -> Data:
    """The samples in the buffer."""
    count = int(own["host"]["stored"])
    return Data(own["x"][:count], own["y"][:count], own["host"]["ids"][:count].numpy())
