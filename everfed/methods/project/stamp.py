"""STAMP: spatio-temporal gradient matching with a pool of exemplars (CFAgentic workshop, ICML 2025).

The temporal half, on the client. After local training on the current task (theta_0 -> theta_t), a clone is trained on
the exemplars of every earlier task i (-> theta_i), and the client ends where all of these moves agree:

    Delta_i = theta_i - theta_0,   theta_u = theta_0 + rate * GM_kappa(Delta_1 .. Delta_t)            (Eq. 3, corrected)

with GM of `matching.py`. Without exemplars, in the first task, it is plain local training. The spatial half is
`fedomg.py`; STAMP is both, and this part with FedAvg is the ablation "client matching only".

The pool holds exemplars of every class of a task, drawn at the task's end and kept for ever. Nothing of it is sent, and
the phase that draws them sends nothing at all, so traffic is FedAvg's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.client import OWN
from everfed.method import (
    BOUNDARIES,
    CLASSES,
    EAGER,
    END,
    Client,
    Cohort,
    Data,
    Gradient,
    Model,
    Part,
    Phase,
    Schedule,
    Server,
    Step,
    Table,
    Tree,
    option,
)
from everfed.methods.project.matching import KAPPA, SCALE, SOLVER, Scale, Solver, match_gradients
from everfed.methods.project.matching_solvers import SoftmaxSGD


@dataclass(frozen=True)
class STAMP(Part):
    """A clone's minibatches are cut as those of local training: where `train.drop_last` drops a partial last one, it
    does so here (the released code, too), but a pool below one minibatch is one minibatch."""

    exemplars: int = option(13, at_least=0, about="of every class, kept per task")
    kappa: float = option(0.25, **KAPPA)
    scale: Scale = option("1+k2", **SCALE)
    rate: float = option(1.0, above=0, about="lr_t; the released code has 2")
    clone_from: str = option(
        "after_current",
        one_of=("after_current", "round_start"),
        about="where clones start: after training (released code; the mean keeps the whole progress), or at the "
        "round's start (the wording of Eq. 3; progress is divided by the number of tasks unless combine is sum)",
    )
    combine: str = option("mean", one_of=("mean", "sum"), about="as matched, or times the number of updates")
    balance: bool = option(False, about="rescale every update to their mean norm")
    epochs: int | None = option(None, at_least=0, about="of a clone over its exemplars; unset: as local training")
    moments: str = option(
        "fresh", one_of=("fresh", "copied"), about="a clone's optimiser begins anew, or from a copy of the client's"
    )
    granularity: str = option(
        "round",
        one_of=("round", "step"),
        about="match what whole trainings moved, or the gradients of every minibatch, one per stored task beside the "
        "current one (never captured on a GPU)",
    )
    solver: Solver = option("exact", **SOLVER)
    solver_steps: int = option(100, at_least=1, about="of solver softmax_sgd; the released code has 25 on clients")
    solver_momentum: float = option(
        0.5, at_least=0, below=1, about="of solver softmax_sgd; the released code has 0.1 on clients"
    )
    match_first: bool = option(
        False, about="match in the first task, too, where the only update is made longer (released code)"
    )

    name = "stamp"

    def needs(self):
        return {BOUNDARIES, CLASSES} | ({EAGER} if self._every_step else set())  # matching in a step solves on the host

    @property
    def _every_step(self) -> bool:
        return self.granularity == "step"

    # the pool ----------------------------------------------------------------------------------------------------
    def init(self, side: Client | Server) -> None:
        """host/pool: {task: {x, y}} in storage form, in host memory."""
        if isinstance(side, Client):
            side.state["host"] = {"pool": {}}

    def buffer_tasks(self, own: Tree, task_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        pool = own["host"]["pool"]
        return np.repeat([int(task) for task in pool], [len(kept["y"]) for kept in pool.values()]).astype(np.int64)

    def phases(self):
        return [Phase("exemplars", Cohort.BOUNDARY, END, sends=False, run=self.draw)] if self.exemplars else []

    def draw(self, client: Client) -> None:
        if len(client.data):
            labels = client.data.y.numpy(force=True)
            kept = client.data.take(per_class(labels, self.exemplars, client.rng("exemplars")))
            client.state["host"]["pool"][str(client.task)] = {"x": kept.x.cpu(), "y": kept.y.cpu()}

    # matching the updates of whole trainings ---------------------------------------------------------------------
    def reply(self, client: Client) -> None:
        """The matched model in place of the trained one."""
        pool, trained = client.state["host"]["pool"], client.model
        if self._every_step or not (pool or self.match_first):
            return
        theta, shared = client.fitted.start["params"].cpu(), client.layout.shared
        ends = [*(self._clone(client, task, kept) for task, kept in pool.items()), trained["params"]]
        updates = [(end.cpu() - theta)[:shared] for end in ends]  # in host memory: t vectors may outgrow a device
        matched = theta[:shared] + self.rate * self._matched(updates)  # Eq. 3
        params = trained["params"].clone()  # personal parameters stay as they were trained
        params[:shared] = matched.to(params.device)
        client.model = {**trained, "params": params}

    def _clone(self, client: Client, task: str, kept: Tree) -> Tensor:
        """(P,) where training on the exemplars of an earlier task ends."""
        after, epochs = self.clone_from == "after_current", self.epochs
        model = client.model if after else client.fitted.start
        epochs = client.options.local_epochs if epochs is None else epochs
        if epochs == 0:
            return model["params"]
        copied = client.fitted.moments if after else client.of(OWN).get("moments")
        exemplars = Data(kept["x"], kept["y"], np.arange(len(kept["y"]), dtype=np.int64))
        moments = copied if self.moments == "copied" else None
        return train_clone(client, model, exemplars, epochs=epochs, moments=moments, tag=f"exemplars {task}")

    def _matched(self, updates: list[Tensor]) -> Tensor:
        """GM of the updates, with the options `balance` and `combine`."""
        if self.balance:
            updates = balanced(updates)
        sgd = SoftmaxSGD(steps=self.solver_steps, momentum=self.solver_momentum)
        matched = match_gradients(updates, self.kappa, self.scale, solver=self.solver, sgd=sgd)
        return matched * len(updates) if self.combine == "sum" else matched

    # matching the gradients of every step ------------------------------------------------------------------------
    def plan(self, client: Client, schedule: Schedule):
        """For every step and stored task, which of its exemplars are replayed."""
        if not self._every_step:
            return {}
        rng, size = client.rng("replayed"), client.options.batch_size
        return {
            task: Table.of([rng.permutation(len(kept["y"]))[:size] for _ in range(schedule.steps)])
            for task, kept in client.state["host"]["pool"].items()
        }

    def gradient(self, step: Step, gradient: Gradient) -> Gradient | Tensor:
        pool: dict[str, Tree] = step.state["host"]["pool"] if self._every_step else {}
        replayed = []
        for task, kept in pool.items():
            rows, device = step.rows[task].cpu(), step.params.device
            replayed.append(step.task_gradient(kept["x"][rows].to(device), kept["y"][rows].to(device)))
        return self.rate * self._matched([*replayed, gradient.vector]) if replayed else gradient


def train_clone(client: Client, model: Model, data: Data, **how: Any) -> Tensor:
    """(P,) where training `model` on some data beside the client's own training ends. how: as of `Client.fit`."""
    forward = client.trainer.forward_part  # the only other part that matters: it changes the forward pass
    how |= {"received": client.fitted.start["params"], "state": client.states, "messages": dict(client.messages)}
    return client.fit(() if forward is None else (forward,), model=model, data=data, **how).model["params"]


def per_class(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Positions of `count` samples of every class, uniformly drawn (all where there are fewer), ascending."""
    chosen = [rng.permutation(np.flatnonzero(labels == label))[:count] for label in np.unique(labels)]
    return np.sort(np.concatenate(chosen))


def balanced(updates: list[Tensor]) -> list[Tensor]:
    """The updates rescaled to their mean norm; zero updates stay zero."""
    norms = torch.stack([update.norm() for update in updates])
    return [update * (norms.mean() / norm) if norm > 0 else update for update, norm in zip(updates, norms, strict=True)]
