"""Gap: how much accuracy aggregation costs (STAMP, Fig. 1). A part that only looks.

After local training every participant scores its own model on the tests of its current task, and after aggregation the
shared one on the same tests:

    gap = correct answers of the clients' models / samples - those of the shared model / samples

It is told as an event of every round ("measure"). Added to a method as
`everfed.parts.project.gap:Gap`; it changes no result.
The second look sends the new model to the clients a little earlier than the next round would; at the very end of a run
that is one model more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from everfed.core.context import Context
from everfed.core.data import Data
from everfed.core.message import MODEL
from everfed.core.part import BOUNDARIES, HELD_OUT, Model, Part, State
from everfed.core.phase import Phase
from everfed.core.reduce import Reducer, Sum
from everfed.core.score import Exam, score_tasks
from everfed.core.trainer import Fitted
from everfed.core.tree import Tree
from everfed.metrics.alignment import local_global_gap

COUNTS: Mapping[str, Reducer] = {"correct": Sum(), "samples": Sum()}


@dataclass(frozen=True)
class Gap(Part):
    """All logits compete, whatever eval.logits says."""

    name: ClassVar[str] = "gap"
    needs: ClassVar[frozenset[str]] = frozenset({BOUNDARIES, HELD_OUT})

    def reducers(self) -> Mapping[str, Reducer]:
        return COUNTS

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("gap", owner=self.name, reduce=COUNTS),)

    def reply(self, client: State, fitted: Fitted, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        return {}, self._counts(fitted.model, client, {}, ctx)

    def run(self, client: State, phase: str, message: dict[str, Tree], data: Data, ctx: Context) -> tuple[Tree, Tree]:
        """Those that trained, and nobody else, so that both looks are at the same tests."""
        return {}, self._counts(message[MODEL], client, message, ctx) if len(data) else {}

    def _counts(self, model: Model, client: State, message: dict[str, Tree], ctx: Context) -> Tree:
        """Plain numbers, which cost no payload."""
        task = ctx.current_task or 0
        exam = Exam((task,), task + 1)
        samples, correct, *_ = score_tasks(ctx.train, ctx.held_out, model, exam, client, message, ctx.client)[0]
        return {"correct": int(correct), "samples": int(samples)}

    def update(self, server: State, phase: str, reduced: Tree, ctx: Context) -> Tree:
        """From one look to the other the server remembers the accuracy of the clients' models."""
        accuracy = _accuracy(reduced)
        return {"local": accuracy} if phase == "train" and accuracy is not None else {}

    def measure(self, server: State, reduced: Tree, ctx: Context) -> dict[str, float]:
        local, shared = server.get(self.name, {}).get("local"), _accuracy(reduced)
        if ctx.phase != "gap" or local is None or shared is None:
            return {}
        gap = local_global_gap([local], shared)
        return {"local_accuracy": local, "global_accuracy": shared, "local_global_gap": float(gap or 0.0)}


def _accuracy(reduced: Tree) -> float | None:
    return float(reduced["correct"] / reduced["samples"]) if reduced.get("samples") else None
