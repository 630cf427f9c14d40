"""What the server side of a run needs to go on, and how it is written down."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from everfed.core.message import MODEL, Traffic
from everfed.core.part import Model, State
from everfed.core.tree import Tree
from everfed.core.world import Place


@dataclass
class RunState:
    """Position, slots, what was measured. Its trees are replaced, never changed in place."""

    server: State
    round: int = 0
    position: int = 0  # in the round's agenda
    repeat: int = 0  # of the phase at that position
    version: int = 0  # of the shared model
    held: dict[int, dict[str, int | str]] = field(default_factory=dict)  # what each client holds of `Once` payloads
    traffic: Traffic = field(default_factory=Traffic)
    rows: dict[int, list[list[float] | None]] = field(default_factory=dict)  # task -> counts per task, at its end
    curves: list[dict[str, Any]] = field(default_factory=list)
    samples: int = 0
    seconds: float = 0.0
    absent: Counter[str] = field(default_factory=Counter)  # how often clients did not count, by kind
    watched: dict[str, dict[str, Any]] = field(default_factory=dict)  # what the watchers remember

    @property
    def place(self) -> Place:
        """What comes next."""
        return self.round, self.position, self.repeat, 0

    @property
    def model(self) -> Model:
        return self.server[MODEL]

    def set_model(self, model: Model) -> None:
        """A new version, which clients receive with the next message."""
        self.server = {**self.server, MODEL: model}
        self.version += 1

    def set_slots(self, part: str, slots: Tree) -> None:
        others = {name: tree for name, tree in self.server.items() if name != part}
        self.server = {**others, part: slots} if slots else others

    def to_tree(self) -> Tree:
        plain = {
            "round": self.round,
            "position": self.position,
            "repeat": self.repeat,
            "version": self.version,
            "held": self.held,
            "up": self.traffic.up,
            "down": self.traffic.down,
            "rows": self.rows,
            "curves": self.curves,
            "samples": self.samples,
            "seconds": self.seconds,
            "absent": self.absent,
            "watched": self.watched,
        }
        return {"server": self.server, "plain": json.dumps(plain)}

    @staticmethod
    def from_tree(tree: Tree) -> RunState:
        plain = json.loads(tree["plain"])
        state = RunState(tree["server"])
        for name in ("round", "position", "repeat", "version", "curves", "samples", "seconds"):
            setattr(state, name, plain[name])
        state.watched = plain.get("watched", {})
        state.held = {int(client): held for client, held in plain["held"].items()}
        state.rows = {int(task): row for task, row in plain["rows"].items()}
        state.traffic.up.update(plain["up"])
        state.traffic.down.update(plain["down"])
        state.absent.update(plain.get("absent", {}))
        return state
