"""The samples that models are scored on. Only scoring is given them, and parts that say they measure on them."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Any

import torch

from everfed.core.data import Data
from everfed.core.stream import Stream

_SHARE = 0.1  # of the device memory that is free when the first test set is copied


def has_own_tests(stream: Stream) -> bool:
    """Has every client tests of its own? Such a stream tells them by `test_of(client, task, split)` and
    `labels_of(client, task)`, and every model is scored on the clients."""
    return bool(getattr(stream, "own_tests", False))


class HeldOut:
    """The test sets of a stream. On a GPU the copies are kept, so that each crosses once.

    budget: bytes of copies kept on the device; by default a share of its free memory. First come, first kept: tasks are
    scored in the same order every time, where dropping the oldest would never find one again.
    """

    def __init__(self, stream: Stream, budget: int | None = None) -> None:
        self.stream: Any = stream
        self.budget = budget
        self.bytes = 0
        self._own = has_own_tests(stream)
        self._kept: dict[Hashable, Data] = {}
        self._lock = Lock()

    def labels(self, client: int | None, task: int) -> tuple[int, ...]:
        """The classes of a task: the client's own, where the stream has them."""
        found: tuple[int, ...] = (
            self.stream.labels(task) if self._shared(client) else self.stream.labels_of(client, task)
        )
        return found

    def get(self, client: int | None, task: int, split: str, device: torch.device) -> Data:
        """The samples of a task, on the device if its budget allows, else where the stream has them."""
        if device.type == "cpu":
            return self._made(client, task, split)
        key = (None if self._shared(client) else client, task, split, device)
        with self._lock:  # several slots of a GPU may score at once
            return self._kept[key] if key in self._kept else self._copied(key, self._made(client, task, split), device)

    def _shared(self, client: int | None) -> bool:
        return client is None or not self._own

    def _made(self, client: int | None, task: int, split: str) -> Data:
        data: Data = self.stream.test(task, split) if self._shared(client) else self.stream.test_of(client, task, split)
        return data

    def _copied(self, key: Hashable, data: Data, device: torch.device) -> Data:
        if self.budget is None:
            self.budget = int(torch.cuda.mem_get_info(device)[0] * _SHARE) if device.type == "cuda" else 0
        size = data.x.nbytes + data.y.nbytes
        if self.bytes + size > self.budget:
            return data
        copy = data.to(device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # whichever stream reads it next finds it there
        self.bytes += size
        self._kept[key] = copy
        return copy
