"""Checkpoints of a run on several ranks: each writes its own clients, rank 0 the rest.

All ranks stop for it, so the states on disk belong together. The files are those of any other run: it can be resumed on
another number of ranks, or on none.
"""

from __future__ import annotations

import time

from everfed.core.server import RunState
from everfed.engines.group import Group
from everfed.store.checkpoint import Checkpoints


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
