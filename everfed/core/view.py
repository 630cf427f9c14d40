"""What local training may know of a stream: how samples become network inputs, which classes there are, how a sample
is augmented and what is lost on it. Never the samples themselves: a client holds what it sees now, and nothing else.

It keeps honest code honest, as a real client's disk would; it is no sandbox for code that digs.
"""

from __future__ import annotations

from typing import Any

from everfed.core.context import Hidden
from everfed.core.stream import Stream

TOLD = frozenset(
    {
        "name", "clients", "tasks", "rounds", "classes", "input_shape", "score", "boundaries", "task_ids",
        "labels", "labels_of", "class_names", "inputs", "draw_augmentation", "augment", "loss", "measure",
        "measure_all", "also",
    }
)  # fmt: skip


OF_TASKS = frozenset({"tasks", "labels", "labels_of"})  # not told where tasks are hidden


class StreamView:
    """The attributes of a stream in `TOLD`, and those that the stream itself names in `told`; others are refused."""

    def __init__(self, stream: Stream) -> None:
        own: frozenset[str] = getattr(stream, "told", frozenset())
        hidden = frozenset() if stream.boundaries or stream.task_ids else OF_TASKS
        self._told = {name: getattr(stream, name) for name in (TOLD | own) - hidden if hasattr(stream, name)}
        self._known = frozenset(name for name in dir(stream) if not name.startswith("_"))
        self._round = stream.round

    def __getattr__(self, name: str) -> Any:
        told: dict[str, Any] = self.__dict__.get("_told", {})
        if name in told:
            return told[name]
        if name in self.__dict__.get("_known", ()):
            raise Hidden(
                f"a part may not use {name!r} of the stream: what a client sees now comes to its hooks as `data`; one "
                "that declares 'history' has ctx.history() for its earlier tasks, 'held_out' ctx.held_out to score on"
            )
        raise AttributeError(f"this stream has no {name!r}")

    def takes_part(self, client: int | None, index: int) -> bool:
        """Is the client among those that train in round `index`?"""
        return client in self._round(index).participants
