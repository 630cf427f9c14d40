"""FL+SI: synaptic intelligence on every client (Zenke et al., 2017; federated as in the FedSSI paper's baselines).

The contribution is accumulated in all local steps of a task in which the client took part; importance is settled with
the aggregated models at the task's end. See `path.py` for the equations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from everfed.core.context import Context
from everfed.core.data import Data
from everfed.core.part import Model, State, Tables
from everfed.core.schedule import Schedule
from everfed.core.step import Step
from everfed.core.trainer import Fitted
from everfed.core.tree import Tree
from everfed.parts.regularise.path import SCRATCH, PathRegulariser, begin_step, end_step, scratch


@dataclass(frozen=True)
class SynapticIntelligence(PathRegulariser):
    """Options as in `PathRegulariser`. Put it before other parts that add to the gradient: what reaches it is taken for
    the gradient of the data loss."""

    name: ClassVar[str] = "si"
    changes: ClassVar[frozenset[str]] = frozenset({"contribution", *SCRATCH})

    def plan(self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context) -> tuple[Tree, Tables]:
        own = client[self.name]
        zero = torch.zeros_like(own["anchor"])
        return {"contribution": zero, **own, **scratch(own["anchor"])}, {}

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        begin_step(step.state[self.name], step.params, gradient)
        return self.penalty(step, gradient)

    def after(self, step: Step) -> None:
        end_step(step.state[self.name], step.params)

    def reply(self, client: State, fitted: Fitted, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        return {k: v for k, v in client[self.name].items() if k not in SCRATCH}, {}

    def path(self, own: Tree, model: Model, data: Data, ctx: Context) -> tuple[Tensor, Tensor]:
        moved = model["params"] - own["anchor"]
        return own.get("contribution", torch.zeros_like(moved)), moved.square()
