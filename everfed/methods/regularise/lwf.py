"""FL+LwF: learning without forgetting on every client (Li and Hoiem, 2016; federated as in the FedSSI paper).

The teacher is the global model at the end of the previous task, sent once per task and never changed:

    L = CE(all seen classes) + beta tau^2 KL(softmax(z_T[O] / tau) || softmax(z_S[O] / tau))

on the same augmented minibatch of the new task, with O the classes of earlier tasks (all of them when tasks share their
classes). No data is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from everfed.method import CLASSES, END, Cached, Client, Cohort, Part, Phase, Schedule, Server, Step, option
from everfed.methods.common.teacher import among, classes_of, divergence, frozen_outputs, mask_of, tasks_before


@dataclass(frozen=True)
class LwF(Part):
    weight: float = option(1.0, at_least=0, about="beta")
    temperature: float = option(2.0, above=0, about="tau")

    name = "lwf"

    def needs(self):
        return {CLASSES}

    def phases(self):
        return [Phase("teacher", Cohort.SERVER, END, in_last_round=False, update=self.new_teacher)]

    def new_teacher(self, server: Server) -> None:
        """The model at a task's end becomes the teacher."""
        server.state = {"teacher": dict(server.model), "since": server.round}

    def broadcast(self, server: Server):
        own = server.state
        return {"teacher": Cached(own["since"], own["teacher"])} if own and self.weight else {}

    def plan(self, client: Client, schedule: Schedule) -> None:
        client.state = {"old": mask_of(client, classes_of(client, tasks_before(client)))}

    def loss(self, step: Step) -> Tensor | None:
        teacher, old = step.message.get("teacher"), step.state["old"]
        if teacher is None:
            return None
        targets, student = among(frozen_outputs(step, teacher, step.x), old), among(step.outputs, old)
        return self.weight * self.temperature**2 * divergence(student, targets, self.temperature)
