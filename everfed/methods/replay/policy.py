"""What decides which samples a client's memory holds: the interface of all selection policies.

A policy is a frozen dataclass of options. It decides in the training steps (`plan`, `after`: reservoir, GSS-greedy) or
in phases of the memory. By default that is one phase at the end of a task, which offers the task's samples and the
stored ones together; such a policy defines `choose` and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from everfed.core.legacy import (
    END,
    Cohort,
    CompositionError,
    Context,
    Model,
    Phase,
    Schedule,
    Step,
    Table,
    Tables,
    Tree,
)
from everfed.methods.replay.gradient_rows import GradientOptions, gradients_at

if TYPE_CHECKING:
    from everfed.methods.replay.memory import Memory

NAME = "memory"  # of the part: the namespace of its slots and messages
REMEMBER = "remember"  # the phase in which clients choose


@dataclass(frozen=True)
class Pool:
    """The samples that a client chooses from: its current samples X_t first, then its stored ones R_t.

    x, y: (new + stored, ...) in storage form. ids: (new + stored,). seen_before: samples seen in all earlier tasks,
    stored or not. model: the shared model; None in a phase that sends none. gradient_options: how gradients are made.
    """

    x: Tensor
    y: Tensor
    ids: np.ndarray
    new: int
    stored: int
    seen_before: int
    model: Model | None
    gradient_options: GradientOptions
    ctx: Context

    def __len__(self) -> int:
        return self.new + self.stored

    @property
    def weights(self) -> Model:
        """The model, for policies that need one."""
        if self.model is None:
            raise ValueError("this policy uses the model, so it must set needs_model = True")
        return self.model

    def gradients(self) -> Tensor:
        """(new + stored, d) gradients of the single-sample losses at the model."""
        return gradients_at(self.ctx, self.weights, self.x, self.y, self.gradient_options)


@dataclass(frozen=True)
class Policy:
    """Base of all policies. `kind` is its name in recipes; one of a user's own goes by package.module:Name."""

    kind = ""
    about = ""
    needs_model = True  # does `choose` use the model?
    needs_classes = False  # must every target be a class?
    capturable = True  # may `after` be captured in a CUDA graph?
    together = False  # must all clients choose in the same round?

    def host(self, size: int) -> Tree:
        """What it remembers beside the buffer, in host memory."""
        return {}

    # in phases of its own ----------------------------------------------------------------------------------------
    def phases(self, memory: Memory) -> tuple[Phase, ...]:
        """One phase at the end of every task but the last, after which nothing is replayed."""
        sends = self.needs_model or memory.logits
        return (Phase(REMEMBER, Cohort.BOUNDARY, END, in_last_round=False, sends=sends, run=memory.choose),)

    def choose(self, pool: Pool, size: int, host: Tree, message: Tree) -> tuple[np.ndarray, Tree]:
        """(different positions of the pool, at most `size`, in the order of the buffer; `host` afterwards)."""
        raise CompositionError(f"policy {self.kind or type(self).__name__!r} has a phase to choose in, but no choose()")

    # in training -------------------------------------------------------------------------------------------------
    def plan(self, memory: Memory, own: Tree, schedule: Schedule, ctx: Context) -> tuple[Tree, Tables]:
        """(`host` after training, tables); "fill" holds the number of valid rows before every step."""
        stored = np.array([int(own["host"]["stored"])])
        return own["host"], {"fill": Table.of([stored] * schedule.steps)}

    def after(self, memory: Memory, step: Step) -> None:
        """After a training step; nothing to do for a policy that chooses in a phase."""
