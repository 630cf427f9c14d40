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

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everfed.core.client import OWN
from everfed.core.legacy import (
    BOUNDARIES,
    CLASSES,
    END,
    MODEL,
    Cohort,
    Context,
    Data,
    Fitted,
    Message,
    Part,
    Phase,
    Schedule,
    Slots,
    State,
    Step,
    Table,
    Tables,
    Tree,
)
from everfed.methods.common.checks import at_least, one_of
from everfed.methods.project.fedomg import check_matching
from everfed.methods.project.matching import Scale, Solver, match_gradients
from everfed.methods.project.matching_solvers import SoftmaxSGD

CHOICES = {
    "clone_from": ("after_current", "round_start"),
    "moments": ("fresh", "copied"),
    "combine": ("mean", "sum"),
    "granularity": ("round", "step"),
}


@dataclass(frozen=True)
class STAMP(Part):
    """exemplars: of every class, kept per task. kappa, scale, solver: of the matching. rate: lr_t.

    clone_from: clones start "after_current" training (released code: the mean keeps the whole progress) or at
    "round_start" (the wording of Eq. 3: progress is divided by the number of tasks unless combine = "sum").
    combine: "mean" as matched, or "sum": times the number of updates. balance: rescale every update to their mean norm.
    epochs: of a clone over its exemplars (None: as many as local training), in minibatches cut as those of local
    training: where `train.drop_last` drops a partial last one, it does so here (the released code, too), but a pool
    below one minibatch is one minibatch. moments: a clone's optimiser starts "fresh" or from a copy of the client's.
    granularity: "round" matches what whole trainings moved; "step" matches the gradients of every minibatch, one per
    stored task beside the current one. match_first: match in the first task, too, where the only update is made longer
    (released code). solver_steps, solver_momentum: of the solver "softmax_sgd"; the released code has 25 and 0.1 on
    clients.
    """

    exemplars: int = 13
    kappa: float = 0.25
    scale: Scale = "1+k2"
    rate: float = 1.0
    clone_from: str = "after_current"
    combine: str = "mean"
    balance: bool = False
    epochs: int | None = None
    moments: str = "fresh"
    granularity: str = "round"
    solver: Solver = "exact"
    solver_steps: int = 100
    solver_momentum: float = 0.5
    match_first: bool = False

    name = "stamp"
    needs = frozenset({BOUNDARIES, CLASSES})

    @property
    def capturable(self) -> bool:  # type: ignore[override]
        """Matching inside a step solves on the host."""
        return self.granularity == "round"

    def __post_init__(self) -> None:
        check_matching(self, self.kappa)
        one_of(self, **CHOICES)
        at_least(self, 0, "exemplars", "epochs")
        at_least(self, 1, "solver_steps")
        if not 0.0 <= self.solver_momentum < 1.0:
            raise ValueError(f"solver_momentum must be at least 0 and below 1; got {self.solver_momentum}")

    # the pool ----------------------------------------------------------------------------------------------------
    def client_slots(self, ctx: Context) -> Tree:
        """host/pool: {task: {x, y}} in storage form, in host memory."""
        return {"host": {"pool": {}}}

    def buffer_tasks(self, own: Tree, task_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        pool = own["host"]["pool"]
        return np.repeat([int(task) for task in pool], [len(kept["y"]) for kept in pool.values()]).astype(np.int64)

    def phases(self) -> tuple[Phase, ...]:
        if self.exemplars == 0:
            return ()
        return (Phase("exemplars", Cohort.BOUNDARY, END, sends=False, run=self._draw),)

    def _draw(self, client: State, message: Message, data: Data, ctx: Context) -> tuple[Slots, Tree]:
        if len(data) == 0:
            return None, {}
        kept = data.take(per_class(data.y.numpy(force=True), self.exemplars, ctx.rng("exemplars")))
        pool = {**client[self.name]["host"]["pool"], str(ctx.current_task): {"x": kept.x.cpu(), "y": kept.y.cpu()}}
        return {"host": {"pool": pool}}, {}

    # matching the updates of whole trainings ---------------------------------------------------------------------
    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[None, Tree]:
        """The matched model in place of the trained one."""
        pool = client[self.name]["host"]["pool"]
        if not (pool or self.match_first) or self.granularity == "step":
            return None, {}
        theta, shared = fitted.start["params"].cpu(), ctx.facts.layout.shared
        trained = [self._clone(task, kept, client, message, fitted, ctx) for task, kept in pool.items()]
        ends = [*trained, fitted.model["params"]]
        updates = [(end.cpu() - theta)[:shared] for end in ends]  # in host memory: t vectors may outgrow a device
        matched = theta[:shared] + self.rate * self._matched(updates)  # Eq. 3
        params = fitted.model["params"].clone()  # personal parameters stay as they were trained
        params[:shared] = matched.to(params.device)
        return None, {MODEL: {**fitted.model, "params": params}}

    def _clone(self, task: str, kept: Tree, client: State, message: Message, fitted: Fitted, ctx: Context) -> Tensor:
        """(P,) where training on the exemplars of an earlier task ends."""
        after = self.clone_from == "after_current"
        model = fitted.model if after else fitted.start
        epochs = ctx.options.local_epochs if self.epochs is None else self.epochs
        if epochs == 0:
            return model["params"]
        copied = fitted.moments if after else client[OWN].get("moments")
        exemplars = Data(kept["x"], kept["y"], np.arange(len(kept["y"]), dtype=np.int64))
        moments = copied if self.moments == "copied" else None
        forward = ctx.train.forward_part  # the only other part that matters: it changes the forward pass
        parts = () if forward is None else (forward,)
        args = (ctx, parts, model, fitted.start["params"], client, message, exemplars)
        return ctx.train.fit(*args, epochs=epochs, moments=moments, tag=f"exemplars {task}").model["params"]

    def _matched(self, updates: list[Tensor]) -> Tensor:
        """GM of the updates, with the options `balance` and `combine`."""
        if self.balance:
            updates = balanced(updates)
        sgd = SoftmaxSGD(steps=self.solver_steps, momentum=self.solver_momentum)
        matched = match_gradients(updates, self.kappa, self.scale, solver=self.solver, sgd=sgd)
        return matched * len(updates) if self.combine == "sum" else matched

    # matching the gradients of every step ------------------------------------------------------------------------
    def plan(self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context) -> tuple[None, Tables]:
        """For every step and stored task, which of its exemplars are replayed."""
        if self.granularity == "round":
            return None, {}
        rng, size = ctx.rng("replayed"), ctx.options.batch_size
        pool = client[self.name]["host"]["pool"]
        return None, {
            task: Table.of([rng.permutation(len(kept["y"]))[:size] for _ in range(schedule.steps)])
            for task, kept in pool.items()
        }

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        if self.granularity == "round":
            return gradient
        pool: dict[str, Tree] = step.state[self.name]["host"]["pool"]
        gradients = []
        for task, kept in pool.items():
            rows = step.rows[self.name][task].cpu()
            x, y = kept["x"][rows].to(gradient.device), kept["y"][rows].to(gradient.device)
            gradients.append(step.task_gradient(x, y))
        return self.rate * self._matched([*gradients, gradient]) if gradients else gradient


def per_class(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Positions of `count` samples of every class, uniformly drawn (all where there are fewer), ascending."""
    chosen = [rng.permutation(np.flatnonzero(labels == label))[:count] for label in np.unique(labels)]
    return np.sort(np.concatenate(chosen))


def balanced(updates: list[Tensor]) -> list[Tensor]:
    """The updates rescaled to their mean norm; zero updates stay zero."""
    norms = torch.stack([update.norm() for update in updates])
    return [update * (norms.mean() / norm) if norm > 0 else update for update, norm in zip(updates, norms, strict=True)]
