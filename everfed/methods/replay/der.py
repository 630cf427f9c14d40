"""DER and DER++: keep the outputs a sample had when it was stored (Buzzega et al., 2020).

DER:   CE(f(X), Y) + alpha * mean over batch and classes of (h(X') - Z')^2
DER++: ... + beta * CE(f(X''), Y''), with a second, independent draw.

The replayed samples are forwarded on their own: joined with the current ones they would change BatchNorm's statistics.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from everfed.method import Batch, Client, CompositionError, Part, Schedule, Step, option
from everfed.methods.replay import memory


@dataclass(frozen=True)
class DER(Part):
    weight: float = option(1.0, at_least=0, about="alpha (FedGP's code: 1.0)")
    batch: int = option(32, at_least=1, about="replayed samples per step")

    name = "der"

    def needs(self):
        return {memory.NAME}

    def check(self, parts, optimizer):
        buffer = next(part for part in parts if isinstance(part, memory.Memory))
        if not buffer.logits:
            raise CompositionError(f"part {self.name!r} needs the stored outputs: set method.memory.logits = true")

    def plan(self, client: Client, schedule: Schedule):
        return {"rows": memory.replay_rows(client, self.batch, self.name)}

    def batches(self, step: Step) -> dict[str, Batch]:
        return memory.replayed(step, only_outputs=True) if self.weight else {}

    def loss(self, step: Step) -> Tensor | None:
        batch = step.batches.get("rows")
        if batch is None or batch.outputs is None:
            return None
        term = functional.mse_loss(batch.outputs, batch.extra["logits"])
        return term if self.weight == 1.0 else self.weight * term


@dataclass(frozen=True)
class DERPlusPlus(DER):
    weight: float = option(0.1, at_least=0, about="alpha")
    label_weight: float = option(0.5, at_least=0, about="beta")

    name = "der++"

    def plan(self, client: Client, schedule: Schedule):
        labelled = memory.replay_rows(client, self.batch, f"{self.name}/labelled")
        return {**super().plan(client, schedule), "labelled": labelled}

    def batches(self, step: Step) -> dict[str, Batch]:
        labelled = memory.replayed(step, "labelled", only_outputs=True) if self.label_weight else {}
        return super().batches(step) | labelled

    def loss(self, step: Step) -> Tensor | None:
        term, batch = super().loss(step), step.batches.get("labelled")
        if batch is None or batch.outputs is None:
            return term
        labels = self.label_weight * step.task_loss(batch.outputs, batch.y)
        return labels if term is None else term + labels
