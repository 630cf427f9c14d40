"""Gap: how much accuracy aggregation costs (STAMP, Fig. 1). A part that only measures.

After local training every participant scores its own model on the tests of its current task, and after aggregation the
shared one on the same tests:

    gap = correct answers of the clients' models / samples - those of the shared model / samples

It is reported as an event of every round ("measure"); all logits compete, whatever eval.logits says. Added to a method
as `everfed.methods.project.gap:Gap`; it changes no result. Its phase sends the new model to the clients a little
earlier than the next round would; at the very end of a run that is one model more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everfed.core.evaluate import EvalSpec, score_tasks
from everfed.method import BOUNDARIES, HELD_OUT, Client, Part, Phase, Reducer, Server, Sum

COUNTS: Mapping[str, Reducer] = {"correct": Sum(), "samples": Sum()}


@dataclass(frozen=True)
class Gap(Part):
    name = "gap"

    def needs(self):
        return {BOUNDARIES, HELD_OUT}

    def reducers(self):
        return COUNTS

    def phases(self):
        return [Phase("gap", reduce=COUNTS, run=self.score_shared, update=self.compare)]

    # the clients' models -----------------------------------------------------------------------------------------
    def reply(self, client: Client):
        return _counts(client, {})

    def update(self, server: Server) -> None:
        """The server keeps the accuracy of the clients' models until that of the shared one is known."""
        accuracy = _accuracy(server.reduced)
        server.state = {} if accuracy is None else {"local": accuracy}

    # the shared model --------------------------------------------------------------------------------------------
    def score_shared(self, client: Client):
        """On the clients that trained, so that both models are scored on the same tests."""
        return _counts(client, client.messages) if len(client.data) else {}

    def compare(self, server: Server) -> None:
        local, shared = server.state.get("local"), _accuracy(server.reduced)
        if local is not None and shared is not None:
            server.report("local_accuracy", local)
            server.report("global_accuracy", shared)
            server.report("local_global_gap", local - shared)
        server.state = {}


def _counts(client: Client, messages: Mapping[str, Any]):
    """Of the client's current model. Plain numbers, which cost no payload."""
    task = client.task or 0
    spec, where = EvalSpec((task,), task + 1), (client.states, dict(messages), client.id)
    samples, correct, *_ = score_tasks(client.trainer, client.held_out, client.model, spec, *where)[0]
    return {"correct": int(correct), "samples": int(samples)}


def _accuracy(reduced: Mapping[str, Any]) -> float | None:
    return float(reduced["correct"] / reduced["samples"]) if reduced.get("samples") else None
