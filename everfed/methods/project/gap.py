"""Gap: how much accuracy aggregation costs (STAMP, Fig. 1). A part that only measures.

After local training every participant scores its own model on the tests of its current task, and after aggregation the
shared one on the same tests:

    gap = correct answers of the clients' models / samples - those of the shared model / samples

It is reported as an event of every round ("measure"). Added to a method as `everfed.methods.project.gap:Gap`; it
changes no result. Its phase sends the new model to the clients a little earlier than the next
round would; at the very end of a run that is one model more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everfed.core.evaluate import EvalSpec, score_tasks
from everfed.core.legacy import (
    BOUNDARIES,
    HELD_OUT,
    MODEL,
    Context,
    Data,
    Fitted,
    Message,
    Model,
    Part,
    Phase,
    Reducer,
    State,
    Sum,
    Tree,
)
from everfed.metrics.alignment import local_global_gap

COUNTS: Mapping[str, Reducer] = {"correct": Sum(), "samples": Sum()}


@dataclass(frozen=True)
class Gap(Part):
    """All logits compete, whatever eval.logits says."""

    name = "gap"
    needs = frozenset({BOUNDARIES, HELD_OUT})

    def reducers(self) -> Mapping[str, Reducer]:
        return COUNTS

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("gap", reduce=COUNTS, run=self._score_shared, measure=self._compare, update=self._forget),)

    # the clients' models -----------------------------------------------------------------------------------------
    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[None, Tree]:
        return None, self._counts(fitted.model, client, {}, ctx)

    def update(self, server: State, reduced: Tree, ctx: Context) -> Tree:
        """The server keeps the accuracy of the clients' models until that of the shared one is known."""
        accuracy = _accuracy(reduced)
        return {} if accuracy is None else {"local": accuracy}

    # the shared model --------------------------------------------------------------------------------------------
    def _score_shared(self, client: State, message: Message, data: Data, ctx: Context) -> tuple[None, Tree]:
        """On the clients that trained, so that both models are scored on the same tests."""
        return None, self._counts(message[MODEL], client, message, ctx) if len(data) else {}

    def _compare(self, server: State, reduced: Tree, ctx: Context) -> dict[str, float]:
        local, shared = server.get(self.name, {}).get("local"), _accuracy(reduced)
        if local is None or shared is None:
            return {}
        gap = local_global_gap([local], shared)
        return {"local_accuracy": local, "global_accuracy": shared, "local_global_gap": float(gap or 0.0)}

    def _forget(self, server: State, reduced: Tree, ctx: Context) -> Tree:
        return {}

    def _counts(self, model: Model, client: State, message: Message, ctx: Context) -> Tree:
        """Plain numbers, which cost no payload."""
        task = ctx.current_task or 0
        spec = EvalSpec((task,), task + 1)
        samples, correct, *_ = score_tasks(ctx.train, ctx.held_out, model, spec, client, message, ctx.client)[0]
        return {"correct": int(correct), "samples": int(samples)}


def _accuracy(reduced: Tree) -> float | None:
    return float(reduced["correct"] / reduced["samples"]) if reduced.get("samples") else None
