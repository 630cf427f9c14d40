"""The base of methods that train some pieces of the shared vector at a time: all else stays bit for bit as received."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everfed.core.legacy import (
    BOUNDARIES,
    TOGETHER,
    Context,
    Data,
    Fitted,
    Layout,
    Message,
    Model,
    Part,
    Slots,
    State,
    Step,
    Tree,
)
from everfed.core.pieces import Spans, trained_spans
from everfed.methods.common.features import head_entries


@dataclass(frozen=True)
class Piecewise(Part):
    """Freezes what a round does not train: its gradient is 0, and the optimiser (weight decay) does not move it."""

    needs = frozenset({BOUNDARIES, TOGETHER})
    changes = frozenset()

    def receive(self, client: State, message: Message, model: Model, data: Data, ctx: Context) -> tuple[Slots, Model]:
        spans = trained_spans(message)
        if spans is None:
            return None, model
        mask = torch.zeros(len(model["params"]), dtype=torch.bool)
        for span in (*spans, slice(ctx.facts.layout.shared, len(mask))):  # what stays on the client is its own affair
            mask[span] = True
        return {**client.get(self.name, {}), "mask": mask.to(model["params"].device)}, model

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        mask = step.state.get(self.name, {}).get("mask")
        return gradient if mask is None else torch.where(mask, gradient, 0.0)

    def after(self, step: Step) -> None:
        mask = step.state.get(self.name, {}).get("mask")
        if mask is not None:
            step.params.copy_(torch.where(mask, step.params, step.received))

    def reply(self, client: State, message: Message, fitted: Fitted, data: Data, ctx: Context) -> tuple[Slots, Tree]:
        return {key: slot for key, slot in client.get(self.name, {}).items() if key != "mask"}, {}


def head_pieces(layout: Layout, labels: Sequence[tuple[int, ...]]) -> dict[str, Spans]:
    """The head's rows and biases, one piece for all classes of the same tasks: "head/0", or "head/0,2"."""
    found: dict[str, list[slice]] = {}
    entries = head_entries(layout)
    for label in range(entries[0].shape[0]):
        tasks = ",".join(str(task) for task, own in enumerate(labels) if label in own)
        for entry in entries:
            length = entry.size // entry.shape[0]
            start = entry.start + label * length
            found.setdefault(f"head/{tasks}", []).append(slice(start, start + length))
    return {name: tuple(spans) for name, spans in found.items()}


def of_task(piece: str, task: int) -> bool:
    """Does a piece "kind/tasks" belong to `task`?"""
    return str(task) in piece.partition("/")[2].split(",")


def task_of(ctx: Context) -> int:
    """The task that is trained now: how many have ended. A stream with boundaries shows it."""
    assert ctx.current_task is not None  # `needs` names BOUNDARIES
    return ctx.current_task
