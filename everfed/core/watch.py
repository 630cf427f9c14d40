"""Somebody who looks on: told what clients report of their training, heard in the events, and by nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

Memory = dict[str, Any]
LOSS = "loss"
Seen = Mapping[str, Mapping[int, float]]  # signal -> client -> value; "loss": its mean step loss; others: from parts


class Watcher(Protocol):
    """A monitor. What it remembers is JSON-ready and kept with the run's state, so that a resumed run tells the same.

    A method has no way to ask a watcher; a run with one has the same numbers as without.
    """

    name: str

    def watch(self, memory: Memory, index: int, seen: Seen) -> tuple[Memory, list[dict[str, Any]]]:
        """After the training of round `index`: what is known of each participant. Returns what to remember and the
        events to tell; `memory` is empty at first."""
