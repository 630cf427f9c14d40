"""What decides which samples a client's memory holds: the interface of all selection policies.

A policy is a frozen dataclass of options. It decides in the training steps (`plan`, `after`: reservoir, GSS-greedy) or
in phases of the memory. By default that is one phase at the end of a task, which offers the task's samples and the
stored ones together; such a policy defines `choose` and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from everfed.core.option import Options
from everfed.method import (
    END,
    MODEL,
    Client,
    Cohort,
    CompositionError,
    Model,
    Phase,
    Schedule,
    Step,
    Table,
    Tables,
    Tree,
)
from everfed.methods.replay.sample_gradients import GradientOptions, gradients_at

if TYPE_CHECKING:
    from everfed.methods.replay.memory import Memory

NAME = "memory"  # of the part: the namespace of its state and messages
REMEMBER = "remember"  # the phase in which clients choose


@dataclass(frozen=True)
class Pool:
    """The samples that a client chooses from: its current samples X_t first, then its stored ones R_t.

    x, y: (new + stored, ...) in storage form. ids: (new + stored,). seen_before: samples seen in all earlier tasks,
    stored or not. state: what the policy remembers, a dict to read and write. gradient_options: how gradients are made.
    """

    client: Client
    x: Tensor
    y: Tensor
    ids: np.ndarray
    new: int
    stored: int
    seen_before: int
    state: Tree
    gradient_options: GradientOptions

    def __len__(self) -> int:
        return self.new + self.stored

    @property
    def model(self) -> Model:
        """The shared model, for policies that need one."""
        if MODEL not in self.client.messages:
            raise ValueError("this policy uses the model, so it must set needs_model = True")
        return self.client.model

    @property
    def message(self) -> Mapping[str, Any]:
        """What the policy's server side sent."""
        return self.client.message

    def rng(self, tag: str) -> np.random.Generator:
        """A generator of this choice's own, for `tag`."""
        return self.client.rng(tag)

    def gradients(self) -> Tensor:
        """(new + stored, d) gradients of the single-sample losses at the model."""
        return gradients_at(self.client.context, self.model, self.x, self.y, self.gradient_options)


@dataclass(frozen=True)
class Policy(Options):
    """Base of all policies. `kind` is its name in recipes; one of a user's own goes by package.module:Name."""

    kind = ""
    about = ""
    needs_model = True  # does `choose` use the model?

    def needs(self) -> AbstractSet[str]:
        """What it must know or have, in the words of a part's `needs` (CLASSES, TOGETHER, EAGER)."""
        return frozenset()

    def init(self, size: int) -> Tree:
        """What it remembers beside a buffer of so many rows, in host memory."""
        return {}

    # in phases of its own ----------------------------------------------------------------------------------------
    def phases(self, memory: Memory) -> tuple[Phase, ...]:
        """One phase at the end of every task but the last, after which nothing is replayed."""
        sends = self.needs_model or memory.logits
        return (Phase(REMEMBER, Cohort.BOUNDARY, END, in_last_round=False, sends=sends, run=memory.choose),)

    def choose(self, pool: Pool, size: int) -> np.ndarray:
        """Different positions of the pool, at most `size`, in the order of the buffer."""
        raise CompositionError(f"policy {self.kind or type(self).__name__!r} has a phase to choose in, but no choose()")

    # in training -------------------------------------------------------------------------------------------------
    def plan(self, memory: Memory, client: Client, schedule: Schedule) -> Tables:
        """Tables for every step; "fill" holds the number of valid rows before it. May change `client.state["host"]`."""
        return {"fill": Table.of([np.array([int(client.state["host"]["stored"])])] * schedule.steps)}

    def after(self, memory: Memory, step: Step) -> None:
        """After a training step; nothing to do for a policy that chooses in a phase."""
