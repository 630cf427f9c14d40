"""What ranks tell each other, with two ranks as threads of one process; `parity/test_ranks.py` has real processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from everfed.core.client import Reply
from everfed.core.engine import Replies
from everfed.core.evaluate import EvalSpec
from everfed.core.phase import Collect, Mean, Sum
from everfed.engines.ranks import Ranks
from everfed.store.clients import ClientStore
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import Bench
from tests.support.waiting import HANG

BENCH = Bench(stream=ClassToy(tasks=3, classes=6))


class Threads:
    """A group whose ranks are threads."""

    size = 2
    device = torch.device("cpu")

    def __init__(self, rank: int, shared: dict[int, Any], barrier: threading.Barrier) -> None:
        self.rank, self._shared, self._barrier = rank, shared, barrier

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def _all(self, value: Any) -> list[Any]:
        self._shared[self.rank] = value
        self._barrier.wait(HANG)
        found = [self._shared[rank] for rank in range(self.size)]
        self._barrier.wait(HANG)
        return found

    def gather(self, note: Any) -> list[Any]:
        return [json.loads(text) for text in self._all(json.dumps(note))]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return self._all(data)

    def add(self, value: Tensor) -> None:
        value.copy_(torch.stack(self._all(value.clone())).sum(0))


def on_two_ranks(work: Callable[[Ranks], Any]) -> list[Any]:
    """What `work` gives on either rank."""
    shared: dict[int, Any] = {}
    barrier = threading.Barrier(2)
    ranks = [
        Ranks(BENCH.eager(BENCH.setup(), ClientStore()), Threads(rank, shared, barrier))  # type: ignore[arg-type]
        for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, ranks))


@pytest.mark.parametrize(
    "spec", [EvalSpec((0, 1), 2), EvalSpec((0, 1, 2), 1, top_k=2), EvalSpec((2,), 3), EvalSpec((0, 2), 3)]
)
def test_tasks_are_scored_as_in_one_process(spec: EvalSpec) -> None:
    """Of every rank's tasks, too, the classes of all `seen` tasks compete, whichever rank scores them."""
    model = BENCH.run().state.model
    alone = BENCH.eager(BENCH.setup(), ClientStore()).evaluate(model, spec)
    for found in on_two_ranks(lambda rank: rank.evaluate(model, spec)):
        assert found.tolist() == alone.tolist()


def test_replies_of_all_ranks_are_reduced_in_client_order() -> None:
    """Clients 0, 2 and 10 on one rank, 1 and 3 on the other; client 3 sends no number to the sum."""
    sent = {client: torch.tensor([float(client), 1.0]) for client in (0, 1, 2, 3, 10)}

    def work(rank: Ranks) -> Replies:
        replies = Replies({"a": {"mean": Mean(weighted=True), "sum": Sum(), "each": Collect()}})
        for client, value in sent.items():
            if client % 2 == rank.group.rank:
                values = {"mean": value, "each": value, **({} if client == 3 else {"sum": 2.0})}
                replies.add(client, Reply({"a": values}, samples=client + 1, steps=1, loss=float(client)))
        rank.merge(replies)
        return replies

    for replies in on_two_ranks(work):
        found = replies.reduction.result()["a"]
        weighted = sum((client + 1) * value for client, value in sent.items()) / (1 + 2 + 3 + 4 + 11)
        torch.testing.assert_close(found["mean"], weighted)
        assert found["sum"] == 8.0
        assert [(client, value.tolist()) for client, value in found["each"].items()] == [
            (client, value.tolist()) for client, value in sent.items()
        ]
        assert [(one.client, float(one.loss), one.samples) for one in replies.trained] == [
            (client, float(client), client + 1) for client in sent
        ]
        assert replies.traffic.up == {"a": 2 * 5 * 8}
