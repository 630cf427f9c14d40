"""FedLwF-2T: learning without forgetting with two teachers (Usmanova et al., 2021).

During a task t > 1 a client trains on its current data with

    L = alpha CE + beta L_dis(own model of the previous task) + (1 - alpha - beta) L_dis(model received this round)
    L_dis(teacher) = - mean_i sum_c softmax(t_i / T)_c log softmax(s_i / T)_c

Teacher 1 (stability) is the client's own model after its last update in an earlier task, over the classes it knew;
teacher 2 (generality) is the server's, over all classes so far. Neither is ever changed. In the first task L = CE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from everfed.core.legacy import (
    BOUNDARIES,
    CLASSES,
    MODEL,
    Context,
    Data,
    Fitted,
    Message,
    Model,
    Part,
    Schedule,
    Slots,
    State,
    Step,
    Sum,
    Tables,
    Tree,
)
from everfed.methods.common.checks import at_least, one_of, positive
from everfed.methods.common.teacher import among, classes_of, frozen_outputs, mask_of, soft_cross_entropy

OUTPUTS = ("known", "all")


@dataclass(frozen=True)
class FedLwF2T(Part):
    """alpha: weight of the labels; beta: of the client's own teacher; the rest is the server's. temperature: T.
    outputs: distil over the classes "known" to a teacher, or over "all" outputs of the head.

    A client that has no teacher of its own gives that weight to the server's; how often is counted on the server."""

    alpha: float = 1 / 3
    beta: float = 1 / 3
    temperature: float = 2.0
    outputs: str = "known"

    name = "fedlwf2t"
    needs = frozenset({BOUNDARIES, CLASSES})

    def __post_init__(self) -> None:
        at_least(self, 0, "alpha", "beta")
        if self.alpha + self.beta > 1:
            raise ValueError(f"beta must be at most 1 - alpha = {1 - self.alpha:g}; got {self.beta}")
        positive(self, "temperature")
        one_of(self, outputs=OUTPUTS)

    # the client's own teacher ------------------------------------------------------------------------------------
    def receive(self, client: State, message: Message, model: Model, data: Data, ctx: Context) -> tuple[Slots, Model]:
        """At a task change the latest model becomes the teacher."""
        own = client.get(self.name, {})
        if "latest" not in own or own["host"]["latest_task"] == ctx.current_task:
            return None, model
        return {"teacher": own["latest"], "host": {"teacher_task": own["host"]["latest_task"]}}, model

    def plan(self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context) -> tuple[Tree, Tables]:
        """The classes of each teacher; no server teacher in the first task. Steps do not use the latest model."""
        own = {k: v for k, v in client.get(self.name, {}).items() if k in ("teacher", "host")}
        task = ctx.current_task or 0
        if task == 0:
            return own, {}
        own["classes"] = self._classes(ctx, task)
        if "teacher" in own:
            own["own_classes"] = self._classes(ctx, int(own["host"]["teacher_task"]))
        if ctx.options.batchnorm == "local" and "stats" in client["client"]:
            own["statistics"] = {k: client["client"][k] for k in ("stats", "counters")}
        return own, {}

    def _classes(self, ctx: Context, task: int) -> Tensor:
        """(C,) mask of what a model of that task knows."""
        return mask_of(ctx, classes_of(ctx, range(ctx.facts.tasks) if self.outputs == "all" else range(task + 1)))

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        """Keep the model after every local training: which one is the task's last is not known in advance."""
        own = dict(client.get(self.name, {}))
        own["latest"] = dict(fitted.model)
        own["host"] = {**own.get("host", {}), "latest_task": ctx.current_task or 0}
        kept = {k: v for k, v in own.items() if k in ("teacher", "latest", "host")}
        return kept, {"missing": float("classes" in own and "own_classes" not in own)}

    # counting missing teachers -----------------------------------------------------------------------------------
    def reducers(self) -> dict[str, Sum]:
        return {"missing": Sum()}

    def update(self, server: State, reduced: Tree, ctx: Context) -> Tree:
        before = server.get(self.name, {}).get("missing", 0.0)
        return {"missing": before + (reduced.get("missing") or 0.0)}

    # the loss ----------------------------------------------------------------------------------------------------
    def objective(self, step: Step) -> Tensor:
        labels = step.task_loss(step.all_outputs, step.all_y)
        return self.alpha * labels if "classes" in step.state.get(self.name, {}) else labels

    def loss(self, step: Step) -> Tensor | None:
        own = step.state.get(self.name, {})
        if "classes" not in own or self.alpha == 1:
            return None
        total = self._weight_of_server(own) * self._distil(step, self._server_model(step), own["classes"])
        if "own_classes" in own and self.beta:
            total = total + self.beta * self._distil(step, own["teacher"], own["own_classes"])
        return total

    def _weight_of_server(self, own: Tree) -> float:
        return 1 - self.alpha - (self.beta if "own_classes" in own else 0.0)

    def _server_model(self, step: Step) -> Model:
        """The model received this round, with the client's statistics where those never leave it."""
        received: dict[str, Any] = step.message[MODEL]
        return {**received, "params": step.received, **step.state[self.name].get("statistics", {})}

    def _distil(self, step: Step, teacher: Model, classes: Tensor) -> Tensor:
        targets = among(frozen_outputs(step, teacher, step.x), classes)
        return soft_cross_entropy(among(step.outputs, classes), targets, self.temperature)
