"""LoRA by averaging, and FFA-LoRA (Sun et al., 2024): adapters of a frozen network, one pair of factors for every task.

In task t clients train A_t, B_t and the head's rows of the task's classes from W alone, y = W x + B_t A_t x; the server
averages each. What is scored is W + (1 / t) sum_{j <= t} B_j A_j, kept as factors. The mean of products is not the
product of means:

    mean(B_k A_k) - mean(B_k) mean(A_k) = mean((B_k - B)(A_k - A))

FFA-LoRA freezes the random A, so that the average of the products is the product of the averages, and half as much is
sent. A_t is drawn from the seed, B_t begins at 0, and earlier tasks' factors are sent once to every client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from everfed.core.legacy import (
    BEGIN,
    AddsParameters,
    Cohort,
    CompositionError,
    Context,
    Entry,
    Layout,
    Model,
    Phase,
    Position,
    Server,
    Slots,
    State,
    Tree,
)
from everfed.core.pieces import Spans
from everfed.methods.common.checks import at_least
from everfed.methods.pretrained.piecewise import Piecewise, head_pieces, of_task, task_of
from everfed.models import lora


@dataclass(frozen=True)
class TaskAdapted(Piecewise):
    """Factors of its own for every task; a round trains the current task's and the head's rows of its classes."""

    def phases(self) -> tuple[Phase, ...]:
        begin = Phase(
            "adapter",
            cohort=Cohort.SERVER,
            when=BEGIN,
            position=Position.BEFORE,
            update=self._begin,
            update_model=self._next,
        )
        return (begin,)

    def _begin(self, server: State, reduced: Tree, ctx: Context) -> Slots:
        """The part's server slots in the task that begins."""
        return None

    def _next(self, server: State, model: Model, ctx: Context) -> tuple[Slots, Model]:
        """The network uses the factors of the task that begins."""
        return None, at_task(model, ctx)

    def pieces(self, layout: Layout, labels: Sequence[tuple[int, ...]]) -> Mapping[str, Spans]:
        return {**factor_pieces(layout), **head_pieces(layout, labels)}

    def trained(self, piece: str, server: State, ctx: Context) -> bool:
        return of_task(piece, task_of(ctx))


@dataclass(frozen=True)
class LoRA(AddsParameters, TaskAdapted):
    """rank, targets, alpha: of the adapters, where the network has none yet (`model.lora`): of which layers, by the
    ends of their names (none: all linear layers but the head), and their scale alpha / rank (0: 1)."""

    rank: int = 8
    targets: tuple[str, ...] = ()
    alpha: float = 0.0

    name = "lora"
    merge: ClassVar[str] = "mean"

    def __post_init__(self) -> None:
        at_least(self, 1, "rank")
        at_least(self, 0, "alpha")
        object.__setattr__(self, "targets", tuple(self.targets))

    def adapt(self, module: nn.Module, server: Server) -> None:
        """Give every LoRA layer factors for all tasks."""
        ctx = server.context
        if getattr(module, "prompts", None) is not None:
            raise CompositionError(f"part {self.name!r} freezes all but its factors and the head; leave prompts out")
        if any("lora_" in name for name, _ in module.named_parameters()) and not lora.layers(module):
            raise CompositionError(
                f"part {self.name!r} keeps factors for every task, which the network's own LoRA layers cannot hold; "
                "leave them out and set model.lora, or train them with method fedavg"
            )
        if not lora.layers(module):
            try:
                lora.add(module, {"rank": self.rank, "targets": self.targets, "alpha": self.alpha}, ctx.seed)
            except ValueError as error:
                raise CompositionError(f"part {self.name!r}: {error}") from error
        if ctx.facts.tasks > 1:
            clock = nn.Parameter(torch.zeros(1))
            for layer in lora.layers(module).values():
                layer.hold(ctx.facts.tasks, ctx.seed)
                layer.follow(clock, self.merge)


@dataclass(frozen=True)
class FFALoRA(LoRA):
    """A is random and frozen; only B and the head are trained and sent. Options as those of LoRA."""

    name = "ffa-lora"

    def trained(self, piece: str, server: State, ctx: Context) -> bool:
        return super().trained(piece, server, ctx) and not piece.startswith("A/")


_KINDS = {"A": "A/", "B": "B/", "merge.grams": "grams ", "merge.task": "task "}


def factor_pieces(layout: Layout) -> dict[str, Spans]:
    """Factors of all layers by task, "A/0", "B/0", ...; in a layer's `lora_merge`, "grams 0", ..., and "task", which
    are never trained."""
    found: dict[str, list[slice]] = {}
    for entry in layout.params:
        kind = _KINDS.get(entry.name.rpartition(".lora_")[2], "")
        for row in range(entry.shape[0] if kind else 0):
            found.setdefault(f"{kind}{row}", []).append(row_of(entry, row))
    return {name: tuple(spans) for name, spans in found.items()}


def row_of(entry: Entry, row: int) -> slice:
    """Where a row of an entry lies in the vector, counted along its first axis."""
    length = entry.size // entry.shape[0]
    return slice(entry.start + row * length, entry.start + (row + 1) * length)


def at_task(model: Model, ctx: Context, clock: str = lora.CLOCK) -> Model:
    """The model with the current task's number in it."""
    places = [entry for entry in ctx.facts.layout.params if entry.name.endswith(clock)]
    if not places or float(model["params"][places[0].start]) == task_of(ctx):
        return model
    params = model["params"].clone()
    params[places[0].start] = task_of(ctx)
    return {**model, "params": params}
