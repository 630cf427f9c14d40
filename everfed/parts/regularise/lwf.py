"""FL+LwF: learning without forgetting on every client (Li and Hoiem, 2016; federated as in the FedSSI paper).

The teacher is the global model at the end of the previous task, sent once per task and never changed:

    L = CE(all seen classes) + beta tau^2 KL(softmax(z_T[O] / tau) || softmax(z_S[O] / tau))

on the same augmented minibatch of the new task, with O the classes of earlier tasks (all of them when tasks share their
classes). No data is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from everfed.core.context import Context
from everfed.core.message import MODEL, Once
from everfed.core.part import Part, State, Tables
from everfed.core.phase import END, Cohort, Phase
from everfed.core.schedule import Schedule
from everfed.core.step import Step
from everfed.core.tree import Tree
from everfed.parts.shared.checks import at_least, positive
from everfed.parts.shared.teacher import among, classes_of, divergence, frozen_outputs, mask_of, tasks_before


@dataclass(frozen=True)
class LwF(Part):
    """weight: beta. temperature: tau."""

    weight: float = 1.0
    temperature: float = 2.0

    name: ClassVar[str] = "lwf"

    def __post_init__(self) -> None:
        at_least(self, 0, "weight")
        positive(self, "temperature")

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("teacher", owner=self.name, cohort=Cohort.SERVER, when=END),)

    def wanted(self, phase: str, ctx: Context) -> bool:
        return ctx.round + 1 < ctx.facts.rounds

    def update(self, server: State, phase: str, reduced: Tree, ctx: Context) -> Tree:
        """The model at a task's end becomes the teacher."""
        if phase != "teacher":
            return server.get(self.name, {})
        return {"teacher": dict(server[MODEL]), "since": ctx.round}

    def broadcast(self, server: State, phase: str, ctx: Context) -> dict[str, Any]:
        own = server.get(self.name)
        return {"teacher": Once(own["since"], own["teacher"])} if own and self.weight else {}

    def plan(self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context) -> tuple[Tree, Tables]:
        return {"old": mask_of(ctx, classes_of(ctx, tasks_before(ctx)))}, {}

    def loss(self, step: Step) -> Tensor | None:
        teacher = step.message.get(self.name, {}).get("teacher")
        if teacher is None:
            return None
        old = step.state[self.name]["old"]
        targets = among(frozen_outputs(step, teacher, step.x), old)
        student = among(step.outputs, old)
        return self.weight * self.temperature**2 * divergence(student, targets, self.temperature)
