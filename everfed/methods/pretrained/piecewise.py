"""The base of methods that train some pieces of the shared vector at a time: all else stays bit for bit as received."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everfed.core.layout import Spans, trained_spans
from everfed.method import BOUNDARIES, TOGETHER, Client, Entry, Gradient, Layout, Model, Part, Server, Step
from everfed.methods.common.layers import head_entries


@dataclass(frozen=True)
class Piecewise(Part):
    """Freezes what a round does not train: its gradient is 0, and the optimiser (weight decay) does not move it."""

    changes = frozenset()

    def needs(self):
        return {BOUNDARIES, TOGETHER}

    def receive(self, client: Client) -> None:
        spans = trained_spans(client.messages)
        if spans is None:
            return
        mask = torch.zeros(len(client.model["params"]), dtype=torch.bool)
        for span in (*spans, slice(client.layout.shared, len(mask))):  # what stays on the client is its own affair
            mask[span] = True
        client.state["mask"] = mask.to(client.model["params"].device)

    def gradient(self, step: Step, gradient: Gradient) -> Gradient | Tensor:
        mask = step.state.get("mask")
        return gradient if mask is None else torch.where(mask, gradient.vector, 0.0)

    def after(self, step: Step) -> None:
        mask = step.state.get("mask")
        if mask is not None:
            step.params.copy_(torch.where(mask, step.params, step.received))

    def reply(self, client: Client):
        client.state.pop("mask", None)
        return None


def task_of(handle: Client | Server) -> int:
    """The task that is trained now: how many have ended. A stream with boundaries shows it."""
    assert handle.task is not None  # `needs` names BOUNDARIES
    return handle.task


def at_task(server: Server, clock: str) -> Model:
    """The model with the current task's number in it, a parameter whose name ends with `clock`."""
    model = server.model
    places = [entry for entry in server.layout.params if entry.name.endswith(clock)]
    if not places or float(model["params"][places[0].start]) == task_of(server):
        return model
    params = model["params"].clone()
    params[places[0].start] = task_of(server)
    return {**model, "params": params}


# pieces ---------------------------------------------------------------------------------------------------------------
def head_pieces(layout: Layout, labels: Sequence[tuple[int, ...]]) -> dict[str, Spans]:
    """The head's rows and biases, one piece for all classes of the same tasks: "head/0", or "head/0,2"."""
    found: dict[str, list[slice]] = {}
    entries = head_entries(layout)
    for label in range(entries[0].shape[0]):
        tasks = ",".join(str(task) for task, own in enumerate(labels) if label in own)
        found.setdefault(f"head/{tasks}", []).extend(row_of(entry, label) for entry in entries)
    return {name: tuple(spans) for name, spans in found.items()}


def row_of(entry: Entry, row: int) -> slice:
    """Where a row of an entry lies in the vector, counted along its first axis."""
    length = entry.size // entry.shape[0]
    return slice(entry.start + row * length, entry.start + (row + 1) * length)


def of_task(piece: str, task: int) -> bool:
    """Does a piece "kind/tasks" belong to `task`?"""
    return str(task) in piece.partition("/")[2].split(",")
