"""A-GEM: a step may not, to first order, increase the loss on a replayed minibatch (Chaudhry et al., 2019).

g_b is the gradient on a minibatch from memory at the current weights; when <g, g_b> < 0 the conflicting part of g is
removed. The memory is the reservoir and includes the current task, as in FedGP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from everfed.core.legacy import Context, Part, Schedule, State, Step, Tables
from everfed.methods.common.checks import at_least
from everfed.methods.project.projection import project, squared_norm
from everfed.methods.replay import memory
from everfed.methods.replay.er import drawn


@dataclass(frozen=True)
class AGEM(Part):
    """batch: replayed samples per step."""

    batch: int = 32

    name = "agem"
    needs = frozenset({memory.NAME})

    def __post_init__(self) -> None:
        at_least(self, 1, "batch")

    def plan(self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context) -> tuple[None, Tables]:
        return None, {"rows": memory.replay_rows(plans, self.batch, ctx.rng(self.name))}

    def conflicts_with(self, step: Step) -> tuple[Tensor, Tensor] | None:
        """g_b and its squared norm."""
        replayed = drawn(step, self.name).get(self.name)
        if replayed is None:
            return None
        reference = step.task_gradient(replayed.x, replayed.y)
        return reference, squared_norm(reference)

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        found = self.conflicts_with(step)
        return gradient if found is None else project(gradient, *found)
