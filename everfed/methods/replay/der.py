"""DER and DER++: keep the outputs a sample had when it was stored (Buzzega et al., 2020).

DER:   CE(f(X), Y) + alpha * mean over batch and classes of (h(X') - Z')^2
DER++: ... + beta * CE(f(X''), Y''), with a second, independent draw.

The replayed samples are forwarded on their own: joined with the current ones they would change BatchNorm's statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from everfed.core.legacy import Batch, CompositionError, Context, Optimizer, Part, Schedule, State, Step, Tables
from everfed.methods.common.checks import at_least
from everfed.methods.replay import memory
from everfed.methods.replay.er import drawn


@dataclass(frozen=True)
class DER(Part):
    """weight: alpha (FedGP's code: 1.0). batch: replayed samples per step."""

    weight: float = 1.0
    batch: int = 32

    name = "der"
    needs = frozenset({memory.NAME})

    def __post_init__(self) -> None:
        at_least(self, 0, "weight")
        at_least(self, 1, "batch")

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        buffer = next(part for part in parts if isinstance(part, memory.Memory))
        if not buffer.logits:
            raise CompositionError(f"part {self.name!r} needs the stored outputs: set memory.logits = true")
        return ()

    def plan(self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context) -> tuple[None, Tables]:
        return None, {"rows": memory.replay_rows(plans, self.batch, ctx.rng(self.name))}

    def batches(self, step: Step) -> dict[str, Batch]:
        return drawn(step, self.name, only_outputs=True) if self.weight else {}

    def loss(self, step: Step) -> Tensor | None:
        batch = step.batches.get(self.name)
        if batch is None or batch.outputs is None:
            return None
        term = functional.mse_loss(batch.outputs, batch.extra["logits"])
        return term if self.weight == 1.0 else self.weight * term


@dataclass(frozen=True)
class DERPlusPlus(DER):
    """weight: alpha; label_weight: beta."""

    weight: float = 0.1
    label_weight: float = 0.5

    name = "der++"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "label_weight")

    def plan(self, client: State, schedule: Schedule, plans: Mapping[str, Tables], ctx: Context) -> tuple[None, Tables]:
        _, tables = super().plan(client, schedule, plans, ctx)
        return None, {**tables, "labelled": memory.replay_rows(plans, self.batch, ctx.rng(f"{self.name}/labelled"))}

    def batches(self, step: Step) -> dict[str, Batch]:
        labelled = drawn(step, self.name, rows="labelled", only_outputs=True) if self.label_weight else {}
        return super().batches(step) | labelled

    def loss(self, step: Step) -> Tensor | None:
        term, batch = super().loss(step), step.batches.get(f"{self.name}/labelled")
        if batch is None or batch.outputs is None:
            return term
        labels = self.label_weight * step.task_loss(batch.outputs, batch.y)
        return labels if term is None else term + labels
