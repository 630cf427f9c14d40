"""The same run on several GPUs or machines: clients sharded over the ranks of torch.distributed, started by torchrun.

    torchrun --nproc-per-node 4 -m everfed run RECIPE --set engine.kind=ranks

Every rank runs the same loop and holds the same server state (the server's own training is done by the first and given
to the others); each runs its own clients (client modulo ranks) with one
of the other engines inside. After a phase the ranks add their sums in float64, so a round moves two models per rank
however many clients there are, and the number of ranks changes a result by at most a float32 rounding. Where a method
or a robust reducer needs more than sums, every rank gets what all of them hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from everfed.core import tree
from everfed.core.client import Reply
from everfed.core.context import Place
from everfed.core.engine import Absent, Engine, Replies, Trained
from everfed.core.evaluate import EvalSpec, stacked
from everfed.core.message import Message, Model
from everfed.core.phase import Phase, Reducing, Shared, Total
from everfed.core.server import RunState
from everfed.core.trainer import Trainer
from everfed.core.tree import Tree
from everfed.engines.group import Group
from everfed.errors import UserError
from everfed.store.checkpoint import Checkpoints


class Ranks(Engine):
    """Wraps the engine that runs this rank's clients."""

    name = "ranks"
    sharded = True

    def __init__(self, inner: Engine, group: Group) -> None:
        self.inner, self.group = inner, group

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply | Absent]]:
        """The replies of this rank's own clients; `merge` brings in the rest."""
        return self.inner.exchange(phase, [c for c in clients if self.group.owns(c)], message, place)

    def merge(self, replies: Replies) -> None:
        """Add up what all ranks took in."""
        here = [[one.client, float(one.loss), one.steps, one.samples] for one in replies.trained]
        reducing = [(part, key, r) for part, keys in replies.reduction.under_way.items() for key, r in keys.items()]
        notes = {
            "trained": here,
            "up": dict(replies.traffic.up),
            "totals": [_note(r) for _, _, r in reducing],
        }
        everybody = self.group.gather(notes)
        replies.trained = sorted(
            (Trained(*one) for note in everybody for one in note["trained"]), key=lambda t: t.client
        )
        replies.traffic.up.clear()
        for note in everybody:
            replies.traffic.up.update(note["up"])
        for index, (_, _, r) in enumerate(reducing):
            self._merge_one(r, [note["totals"][index] for note in everybody])

    def _merge_one(self, reducing: Reducing, notes: list[dict[str, Any]]) -> None:
        if isinstance(reducing, Total):
            self._merge_total(reducing, notes)
        elif isinstance(reducing, Shared):
            exported = self.group.gather_bytes(tree.to_bytes(reducing.export()))
            reducing.merge([tree.from_bytes(data) for data in exported])
        else:
            kind = type(reducing).__name__
            raise UserError(
                f"engine.kind = 'ranks' cannot merge {kind}: it must be a Shared; use eager, processes or graphs"
            )

    def _merge_total(self, total: Total, notes: list[dict[str, Any]]) -> None:
        """Sums of tensors are added on the device; a rank whose clients sent nothing adds zeros."""
        total.weight = sum(note["weight"] for note in notes)
        sent = [note for note in notes if note["kind"] != "nothing"]
        if not sent:
            return
        if sent[0]["kind"] == "number":
            total.total = sum(note["value"] for note in sent)
            return
        total.dtype = getattr(torch, sent[0]["dtype"])
        value = total.total
        if not isinstance(value, Tensor):
            value = torch.zeros(sent[0]["shape"], dtype=torch.float64, device=self.group.device)
        value = value.contiguous()
        self.group.add(value)
        total.total = value

    # the rest ----------------------------------------------------------------------------------------------------
    def workbench(self) -> Trainer:
        return self.inner.workbench()

    def once(self, work: Callable[[], Tree]) -> Tree:
        """Rank 0 does the server's work and gives it to the others: on GPUs two ranks that train the same generator may
        end with different ones."""
        return self.group.share(work() if self.group.leads else None)

    def evaluate(self, model: Model, spec: EvalSpec) -> Tensor:
        """Each rank scores some of the tasks."""
        own = spec.tasks[self.group.rank :: self.group.size]
        rows: dict[str, list[float]] = {}
        if own:
            counts = self.inner.evaluate(model, EvalSpec(own, spec.seen, spec.split, spec.top_k))
            rows = {str(task): row for task, row in zip(own, counts.tolist(), strict=True)}
        found = {int(task): row for part in self.group.gather(rows) for task, row in part.items()}
        return stacked([found[task] for task in spec.tasks])

    def total(self, value: int) -> int:
        return sum(self.group.gather(value))

    def describe(self) -> dict[str, Any]:
        inner = self.inner.describe()
        return {**inner, "engine": self.name, "inner": inner["engine"], "ranks": self.group.size}

    def close(self) -> None:
        self.inner.close()
        self.group.close()


def _note(reducing: Reducing) -> dict[str, Any]:
    """What the others must know of a sum before they add theirs."""
    if not isinstance(reducing, Total) or reducing.total is None:
        return {"kind": "nothing", "weight": getattr(reducing, "weight", 0.0)}
    if isinstance(reducing.total, Tensor):
        kind = str(reducing.dtype).removeprefix("torch.")
        return {"kind": "tensor", "weight": reducing.weight, "shape": list(reducing.total.shape), "dtype": kind}
    return {"kind": "number", "weight": reducing.weight, "value": reducing.total}


# checkpoints ----------------------------------------------------------------------------------------------------------
class RankCheckpoints:
    """All ranks save together, when it is time by the clock of rank 0."""

    def __init__(self, inner: Checkpoints, group: Group) -> None:
        self.inner, self.group = inner, group
        inner.store.keep(group.owns)
        group.gather(None)  # every rank has looked at the folder before any writes to it
        self._last = time.monotonic()

    def offer(self, state: RunState, must: bool) -> bool:
        due = must or self.group.gather(time.monotonic() - self._last >= self.inner.every)[0]
        if not due:
            return False
        self._last = time.monotonic()
        store = self.inner.store
        versions, dirty = store.snapshot()
        store.write(versions, dirty)
        everybody, together = self.group.gather(versions), {}
        if self.group.leads:
            together = {int(client): version for own in everybody for client, version in own.items()}
            self.inner.write(state.to_tree(), together, {})
        together = self.group.gather(together if self.group.leads else None)[0]  # nobody goes on before it is durable
        store.collect({int(client): version for client, version in together.items()})
        return True

    def wait(self) -> None:
        """Nothing is written in the background."""

    def close(self) -> None:
        """Nothing to close."""
