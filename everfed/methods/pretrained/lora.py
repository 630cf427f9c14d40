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

from everfed.core.layout import Spans
from everfed.method import BEGIN, AddsParameters, Cohort, CompositionError, Layout, Phase, Server, When, option
from everfed.methods.pretrained.piecewise import Piecewise, at_task, head_pieces, of_task, row_of, task_of
from everfed.models import lora


@dataclass(frozen=True)
class TaskAdapted(Piecewise):
    """Factors of its own for every task; a round trains the current task's and the head's rows of its classes."""

    def phases(self):
        return (Phase("adapter", cohort=Cohort.SERVER, rounds=BEGIN, when=When.BEFORE, update=self.begin),)

    def begin(self, server: Server) -> None:
        """The network uses the factors of the task that begins."""
        server.model = at_task(server, lora.CLOCK)

    def pieces(self, layout: Layout, labels: Sequence[tuple[int, ...]]) -> Mapping[str, Spans]:
        return {**factor_pieces(layout), **head_pieces(layout, labels)}

    def trained(self, piece: str, server: Server) -> bool:
        return of_task(piece, task_of(server))


@dataclass(frozen=True)
class LoRA(AddsParameters, TaskAdapted):
    """The options are those of the adapters where the network has none yet (`model.lora`)."""

    rank: int = option(8, at_least=1, about="rank of the adapters")
    targets: tuple[str, ...] = option(
        (), about="which layers, by the ends of their names (none: all linear layers but the head)"
    )
    alpha: float = option(0.0, at_least=0, about="their scale is alpha / rank (0: 1)")

    name = "lora"
    merge: ClassVar[str] = "mean"

    def adapt(self, module: nn.Module, server: Server) -> None:
        """Give every LoRA layer factors for all tasks."""
        if getattr(module, "prompts", None) is not None:
            raise CompositionError(f"part {self.name!r} freezes all but its factors and the head; leave prompts out")
        if any("lora_" in name for name, _ in module.named_parameters()) and not lora.layers(module):
            raise CompositionError(
                f"part {self.name!r} keeps factors for every task, which the network's own LoRA layers cannot hold; "
                "leave them out and set model.lora, or train them with method fedavg"
            )
        if not lora.layers(module):
            try:
                lora.add(module, {"rank": self.rank, "targets": self.targets, "alpha": self.alpha}, server.seed)
            except ValueError as error:
                raise CompositionError(f"part {self.name!r}: {error}") from error
        if server.facts.tasks > 1:
            clock = nn.Parameter(torch.zeros(1))
            for layer in lora.layers(module).values():
                layer.hold(server.facts.tasks, server.seed)
                layer.follow(clock, self.merge)


@dataclass(frozen=True)
class FFALoRA(LoRA):
    """A is random and frozen; only B and the head are trained and sent. Options as those of LoRA."""

    name = "ffa-lora"

    def trained(self, piece: str, server: Server) -> bool:
        return super().trained(piece, server) and not piece.startswith("A/")


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
