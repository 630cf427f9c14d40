"""FL+LwF: learning without forgetting on every client (Li and Hoiem, 2016; federated as in the FedSSI paper).

The teacher is the global model at the end of the previous task, sent once per task and never changed:

    L = CE(all seen classes) + beta tau^2 KL(softmax(z_T[O] / tau) || softmax(z_S[O] / tau))

on the same augmented minibatch of the new task, with O the classes of earlier tasks (all of them when tasks share their
classes). No data is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from everfed.core.legacy import (
    CLASSES,
    END,
    MODEL,
    Cohort,
    Context,
    Once,
    Part,
    Phase,
    Schedule,
    State,
    Step,
    Tables,
    Tree,
)
from everfed.methods.common.checks import at_least, positive
from everfed.methods.common.teacher import among, classes_of, divergence, frozen_outputs, mask_of, tasks_before


@dataclass(frozen=True)
class LwF(Part):
    """weight: beta. temperature: tau."""

    weight: float = 1.0
    temperature: float = 2.0

    name = "lwf"
    needs = frozenset({CLASSES})

    def __post_init__(self) -> None:
        at_least(self, 0, "weight")
        positive(self, "temperature")

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("teacher", Cohort.SERVER, END, in_last_round=False, update=self._new_teacher),)

    def _new_teacher(self, server: State, reduced: Tree, ctx: Context) -> Tree:
        """The model at a task's end becomes the teacher."""
        return {"teacher": dict(server[MODEL]), "since": ctx.round}

    def broadcast(self, server: State, ctx: Context) -> dict[str, Any]:
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
