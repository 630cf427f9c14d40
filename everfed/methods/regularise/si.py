"""FL+SI: synaptic intelligence on every client (Zenke et al., 2017; federated as in the FedSSI paper's baselines).

The contribution is accumulated in all local steps of a task in which the client took part; importance is computed from
the aggregated models at the task's end. See `path.py` for the equations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from everfed.core.legacy import Context, Data, Fitted, Message, Model, Schedule, State, Step, Tables, Tree
from everfed.methods.regularise.path import SCRATCH, PathRegulariser, begin_step, end_step, scratch


@dataclass(frozen=True)
class SynapticIntelligence(PathRegulariser):
    """Options as in `PathRegulariser`. Put it before other parts that add to the gradient: it takes the gradient that
    it gets for that of the data loss."""

    name = "si"
    changes = frozenset({"contribution", *SCRATCH})

    def plan(self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context) -> tuple[Tree, Tables]:
        own = client[self.name]
        zero = torch.zeros_like(own["anchor"])
        return {"contribution": zero, **own, **scratch(own["anchor"])}, {}

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        begin_step(step.state[self.name], step.params, gradient)
        return self.penalty(step, gradient)

    def after(self, step: Step) -> None:
        end_step(step.state[self.name], step.params)

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        return {k: v for k, v in client[self.name].items() if k not in SCRATCH}, {}

    def path(self, own: Tree, model: Model, data: Data, ctx: Context) -> tuple[Tensor, Tensor]:
        moved = model["params"] - own["anchor"]
        return own.get("contribution", torch.zeros_like(moved)), moved.square()
