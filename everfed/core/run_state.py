"""The state of a run on the server, and its form in a checkpoint."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from everfed.core.context import Place
from everfed.core.message import MODEL, Traffic
from everfed.core.part import Model, State, with_slots
from everfed.core.tree import Tree


@dataclass
class RunState:
    """Position, slots, what was measured. Its trees are replaced, never changed in place."""

    server: State
    round: int = 0
    position: int = 0  # in the round's list of phases
    repeat: int = 0  # of the phase at that position
    version: int = 0  # of the shared model
    held: dict[int, dict[str, int | str]] = field(default_factory=dict)  # what each client holds of `Once` payloads
    traffic: Traffic = field(default_factory=Traffic)
    rows: dict[int, list[list[float] | None]] = field(default_factory=dict)  # task -> counts per task, at its end
    initial: list[list[float]] | None = None  # counts per task of the untrained model, with eval.zero_shot
    curves: list[dict[str, Any]] = field(default_factory=list)
    samples: int = 0
    seconds: float = 0.0
    absent: Counter[str] = field(default_factory=Counter)  # how often clients did not count, by kind
    watched: dict[str, dict[str, Any]] = field(default_factory=dict)  # the monitors' own state
    pieces: dict[str, int] = field(default_factory=dict)  # versions of the shared vector's pieces

    @property
    def place(self) -> Place:
        """What comes next."""
        return self.round, self.position, self.repeat, 0

    @property
    def model(self) -> Model:
        return self.server[MODEL]

    def set_model(self, model: Model) -> None:
        """A new version, which clients receive with the next message. The same tensors, where no client sent any, are
        the same version."""
        if all(tensor is self.model.get(name) for name, tensor in model.items()):
            return
        self.server = {**self.server, MODEL: model}
        self.version += 1

    def set_slots(self, part: str, slots: Tree | None) -> None:
        """None leaves them as they are, {} removes them."""
        self.server = with_slots(self.server, part, slots)

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
            "initial": self.initial,
            "curves": self.curves,
            "samples": self.samples,
            "seconds": self.seconds,
            "absent": self.absent,
            "watched": self.watched,
            "pieces": self.pieces,
        }
        return {"server": self.server, "plain": json.dumps(plain)}

    @staticmethod
    def from_tree(tree: Tree) -> RunState:
        plain = json.loads(tree["plain"])
        state = RunState(tree["server"])
        for name in ("round", "position", "repeat", "version", "curves", "samples", "seconds"):
            setattr(state, name, plain[name])
        state.watched, state.initial = plain.get("watched", {}), plain.get("initial")
        state.pieces = plain.get("pieces", {})
        state.held = {int(client): held for client, held in plain["held"].items()}
        state.rows = {int(task): row for task, row in plain["rows"].items()}
        state.traffic.up.update(plain["up"])
        state.traffic.down.update(plain["down"])
        state.absent.update(plain.get("absent", {}))
        return state
