"""A-GEM: a step may not, to first order, increase the loss on a replayed minibatch (Chaudhry et al., 2019).

g_b is the gradient on a minibatch from memory at the current weights; when <g, g_b> < 0 the conflicting part of g is
removed. The memory is the reservoir and includes the current task, as in FedGP.
"""

from __future__ import annotations

from dataclasses import dataclass

from everfed.method import Client, Gradient, Part, Schedule, Step, option
from everfed.methods.replay import memory


@dataclass(frozen=True)
class AGEM(Part):
    batch: int = option(32, at_least=1, about="replayed samples per step")

    name = "agem"

    def needs(self):
        return {memory.NAME}

    def plan(self, client: Client, schedule: Schedule):
        return {"rows": memory.replay_rows(client, self.batch, self.name)}

    def gradient(self, step: Step, gradient: Gradient) -> Gradient:
        for batch in memory.replayed(step).values():
            gradient = gradient.without_conflict(step.task_gradient(batch.x, batch.y))
        return gradient
