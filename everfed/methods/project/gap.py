"""Gap: how much accuracy aggregation costs (STAMP, Fig. 1). A part that only measures.

After local training every participant scores its own model on the tests of its current task (or of all so far), and
after aggregation the shared one on the same tests:

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
from everfed.method import BOUNDARIES, HELD_OUT, Client, Part, Phase, Reducer, Server, Sum, option

COUNTS: Mapping[str, Reducer] = {"correct": Sum(), "samples": Sum()}


@dataclass(frozen=True)
class Gap(Part):
    seen: bool = option(False, about="score the tests of all tasks so far, not of the current one alone")

    name = "gap"

    def needs(self):
        return {BOUNDARIES, HELD_OUT}

    def reducers(self):
        return COUNTS

    def phases(self):
        return [Phase("gap", reduce=COUNTS, run=self.score_shared, update=self.compare)]

    def _counts(self, client: Client, messages: Mapping[str, Any]):
        """Of the client's current model. Plain numbers, which cost no payload."""
        task = client.task or 0
        tasks = tuple(range(task + 1)) if self.seen else (task,)
        where = client.states, dict(messages), client.id
        found = score_tasks(client.trainer, client.held_out, client.model, EvalSpec(tasks, task + 1), *where)
        return {"correct": int(found[:, 1].sum()), "samples": int(found[:, 0].sum())}

    # the clients' models -----------------------------------------------------------------------------------------
    def reply(self, client: Client):
        return self._counts(client, {})

    def update(self, server: Server) -> None:
        """The server keeps the accuracy of the clients' models until that of the shared one is known."""
        accuracy = _accuracy(server.reduced)
        server.state = {} if accuracy is None else {"local": accuracy}

    # the shared model --------------------------------------------------------------------------------------------
    def score_shared(self, client: Client):
        """On the clients that trained, so that both models are scored on the same tests."""
        return self._counts(client, client.messages) if len(client.data) else {}

    def compare(self, server: Server) -> None:
        local, shared = server.state.get("local"), _accuracy(server.reduced)
        if local is not None and shared is not None:
            server.report("local_accuracy", local)
            server.report("global_accuracy", shared)
            server.report("local_global_gap", local - shared)
        server.state = {}


def _accuracy(reduced: Mapping[str, Any]) -> float | None:
    return float(reduced["correct"] / reduced["samples"]) if reduced.get("samples") else None
