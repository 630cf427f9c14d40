"""FedLwF-2T: learning without forgetting with two teachers (Usmanova et al., 2021).

During a task t > 1 a client trains on its current data with

    L = alpha CE + beta L_dis(own model of the previous task) + (1 - alpha - beta) L_dis(model received this round)
    L_dis(teacher) = - mean_i sum_c softmax(t_i / T)_c log softmax(s_i / T)_c

Teacher 1 (stability) is the client's own model after its last update in an earlier task, over the classes it knew;
teacher 2 (generality) is the server's, over all classes so far. Neither is ever changed. In the first task L = CE.
A client that has no teacher of its own gives that weight to the server's; how often is counted on the server.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from everfed.method import BOUNDARIES, CLASSES, Client, Model, Part, Schedule, Server, Step, Sum, Tells, Tree, option
from everfed.methods.common.teacher import among, classes_of, frozen_outputs, mask_of, soft_cross_entropy


@dataclass(frozen=True)
class FedLwF2T(Part):
    alpha: float = option(1 / 3, at_least=0, about="weight of the labels; the server's teacher has what is left")
    beta: float = option(1 / 3, at_least=0, about="weight of the client's own teacher")
    temperature: float = option(2.0, above=0, about="T")
    outputs: str = option(
        "known", one_of=("known", "all"), about="distil over the classes known to a teacher, or over all outputs"
    )

    name = "fedlwf2t"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha + self.beta > 1:
            raise ValueError(f"beta must be at most 1 - alpha = {1 - self.alpha:g}; got {self.beta}")

    def needs(self):
        return {BOUNDARIES, CLASSES}

    # the client's own teacher ------------------------------------------------------------------------------------
    def receive(self, client: Client) -> None:
        """At a task change the latest model becomes the teacher."""
        own = client.state
        if "latest" in own and own["host"]["latest_task"] != client.task:
            client.state = {"teacher": own["latest"], "host": {"teacher_task": own["host"]["latest_task"]}}

    def plan(self, client: Client, schedule: Schedule) -> None:
        """The classes of each teacher; no server teacher in the first task. Steps do not use the latest model."""
        own = {k: v for k, v in client.state.items() if k in ("teacher", "host")}
        if client.task:
            own["classes"] = self._classes(client, client.task)
            if "teacher" in own:
                own["own_classes"] = self._classes(client, int(own["host"]["teacher_task"]))
        client.state = own

    def _classes(self, client: Client, task: int) -> Tensor:
        """(C,) mask of what a model of that task knows."""
        tasks = range(client.facts.tasks) if self.outputs == "all" else range(task + 1)
        return mask_of(client, classes_of(client, tasks))

    def reply(self, client: Client):
        """Keep the model after every local training: which one is the task's last is not known in advance."""
        own = client.state
        host = {**own.get("host", {}), "latest_task": client.task or 0}
        teacher = {"teacher": own["teacher"]} if "teacher" in own else {}
        client.state = {**teacher, "host": host, "latest": dict(client.model)}
        return {"missing": float("classes" in own and "own_classes" not in own)}

    # counting missing teachers -----------------------------------------------------------------------------------
    def reducers(self):
        return {"missing": Sum(tells=Tells.CLASSES)}

    def update(self, server: Server) -> None:
        server.state["missing"] = server.state.get("missing", 0.0) + (server.reduced.get("missing") or 0.0)

    # the loss ----------------------------------------------------------------------------------------------------
    def objective(self, step: Step) -> Tensor:
        labels = super().objective(step)
        return self.alpha * labels if "classes" in step.state else labels

    def loss(self, step: Step) -> Tensor | None:
        own = step.state
        if "classes" not in own or self.alpha == 1:
            return None
        total = self._weight_of_server(own) * self._distil(step, step.received_model, own["classes"])
        if "own_classes" in own and self.beta:
            total = total + self.beta * self._distil(step, own["teacher"], own["own_classes"])
        return total

    def _weight_of_server(self, own: Tree) -> float:
        return 1 - self.alpha - (self.beta if "own_classes" in own else 0.0)

    def _distil(self, step: Step, teacher: Model, classes: Tensor) -> Tensor:
        targets = among(frozen_outputs(step, teacher, step.x), classes)
        return soft_cross_entropy(among(step.outputs, classes), targets, self.temperature)
