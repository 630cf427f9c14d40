"""What decides which samples a client's memory keeps: the interface of all selection policies.

A policy is a frozen dataclass of options. It decides in the training steps (reservoir, GSS-greedy) or in a phase,
mostly at the end of a task, from the current samples and the stored ones together; then `choose` is all there is to
write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor

from everfed.core.context import Context
from everfed.core.part import CompositionError, Model, Tables
from everfed.core.phase import END, Cohort, Phase
from everfed.core.schedule import Schedule, Table
from everfed.core.step import Step
from everfed.core.tree import Tree
from everfed.parts.selection.gradient_rows import GradientOptions, gradients_at

if TYPE_CHECKING:
    from everfed.parts.memory.buffer import Memory

REMEMBER = "remember"  # the phase at the end of a task in which every client chooses


@dataclass(frozen=True)
class Pool:
    """What a client chooses from at the end of a task: its new samples X_t first, then its stored ones R_t.

    x, y: (new + stored, ...) in storage form. seen_before: samples seen in all earlier tasks, stored or not.
    model: the shared model at the end of the task; None for policies that need none. how: gradients are computed.
    ids: (new + stored,) of the samples; None where nobody asks for them.
    """

    x: Tensor
    y: Tensor
    new: int
    stored: int
    seen_before: int
    model: Model | None
    how: GradientOptions
    ctx: Context
    ids: np.ndarray | None = None

    def __len__(self) -> int:
        return self.new + self.stored

    @property
    def weights(self) -> Model:
        """The model, for policies that need one."""
        if self.model is None:
            raise ValueError("this policy needs the model, but its phase is silent")
        return self.model

    def gradients(self) -> Tensor:
        """(new + stored, d) gradients of the single-sample losses at the model."""
        return gradients_at(self.ctx, self.weights, self.x, self.y, self.how)


@dataclass(frozen=True)
class Policy:
    """Base of all policies. `kind` is its name in recipes."""

    kind: ClassVar[str] = ""
    about: ClassVar[str] = ""
    needs_model: ClassVar[bool] = True  # must the model be sent to clients for them to choose?
    needs_classes: ClassVar[bool] = False  # is every target a class?
    capturable: ClassVar[bool] = True  # may what it does in a training step be captured?
    together: ClassVar[bool] = False  # must all clients choose in the same round?

    def host(self, size: int) -> Tree:
        """What it remembers beside the buffer, on the host."""
        return {}

    # at the end of a task --------------------------------------------------------------------------------------
    def phases(self, owner: str) -> tuple[Phase, ...]:
        return (Phase(REMEMBER, owner=owner, cohort=Cohort.BOUNDARY, when=END),)

    def wanted(self, phase: str, ctx: Context) -> bool:
        """What is chosen after the last task would never be replayed."""
        return ctx.round + 1 < ctx.facts.rounds

    def choose(self, pool: Pool, size: int, host: Tree, message: Tree) -> tuple[np.ndarray, Tree]:
        """(different positions of the pool, at most `size`, in the order of the buffer; `host` afterwards)."""
        raise CompositionError(f"policy {self.kind!r} has a phase to choose in, but no choose()")

    # phases of its own -----------------------------------------------------------------------------------------
    def speak(self, pool: Pool, size: int, host: Tree, message: Tree) -> tuple[Tree, Tree]:
        """A client's turn in a phase before the choice: (`host`, reply)."""
        raise CompositionError(f"policy {self.kind!r} has a phase of its own, but no speak()")

    def broadcast(self, server: Tree, phase: str, ctx: Context) -> dict[str, Any]:
        return {}

    def update(self, server: Tree, phase: str, reduced: Tree, ctx: Context) -> Tree:
        return server

    def done(self, server: Tree, phase: str, ctx: Context) -> bool:
        return False

    # in training -----------------------------------------------------------------------------------------------
    def plan(self, memory: Memory, own: Tree, schedule: Schedule, ctx: Context) -> tuple[Tree, Tables]:
        """(`host` after training, tables); "fill" tells how many rows are valid before every step."""
        stored = np.array([int(own["host"]["stored"])])
        return own["host"], {"fill": Table.of([stored] * schedule.steps)}

    def after(self, memory: Memory, step: Step) -> None:
        """After a training step: nothing, for a policy that chooses at the end of a task."""
