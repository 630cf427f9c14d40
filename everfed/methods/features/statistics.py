"""Sums over samples of frozen features, as whole numbers.

Features are rounded once to multiples of 2^-bits, and clipped; all their products and sums are then whole numbers below
2^53 for fewer than 2^24 samples, so float64 adds them without any rounding, in any order. What a server adds up does
not depend on how samples are divided among clients and tasks, on the engine, or on secure aggregation, to the bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed.core.layout import head_name, keeps_some
from everfed.core.tree import on_device
from everfed.method import CLASSES, Client, CompositionError, Data, Part, Personal, Server
from everfed.methods.common.layers import head, head_inputs, head_weight, in_precision

LARGEST = 2**14  # of a rounded feature, in steps
MOST_SAMPLES = 2**24
_BATCH = 64  # samples in a forward pass: always so many, for kernels may round differently for other numbers
_ROWS = 1024  # samples whose features are multiplied at once


def feature_rows(client: Client, data: Data) -> Iterator[tuple[Tensor, Tensor]]:
    """(features (n, F) float32, labels (n,)), some samples at a time, under the client's model: eval mode, no
    augmentation, no gradients."""
    trainer, part = client.trainer, client.trainer.forward_part
    state = on_device(dict(client.of(part.name)), trainer.device) if part else {}
    sent = on_device(client.messages.get(part.name, {}), trainer.device) if part else {}
    trainer.replica.load(client.model)
    module = trainer.replica.module.eval()
    for start in range(0, len(data), _ROWS):
        x, y = data.x[start : start + _ROWS].to(trainer.device), data.y[start : start + _ROWS].to(trainer.device)
        found = []
        for some in x.split(_BATCH):
            full = torch.cat([some, some[-1:].expand(_BATCH - len(some), *some.shape[1:])])
            with torch.no_grad(), in_precision(trainer), head_inputs(module) as seen:
                inputs = trainer.stream.inputs(full)
                _ = module(inputs) if part is None else part.forward(module, inputs, state, sent)
            found.append(seen[-1][: len(some)].float())
        yield torch.cat(found), y


def class_moments(client: Client) -> tuple[Tensor, Tensor, Tensor]:
    """(counts (classes,), sums of features (classes, F), sums of their squares) over a client's samples, float64 on the
    host."""
    classes = client.facts.classes
    counts = torch.zeros(classes, dtype=torch.float64)
    sums = torch.zeros(classes, head_weight(client.layout).shape[1], dtype=torch.float64)
    squares = torch.zeros_like(sums)
    for features, y in feature_rows(client, client.data):
        labels, h = functional.one_hot(y, classes).double(), features.double()
        counts += labels.sum(0).cpu()
        sums += (labels.T @ h).cpu()
        squares += (labels.T @ h.square()).cpu()
    return counts, sums, squares


@dataclass(frozen=True)
class ReplacesHead(Part):
    """A part whose server makes the classifier's head, from features that are the same on every client."""

    def needs(self):
        return {CLASSES}

    def check(self, parts, optimizer):
        others = [part.name for part in parts if isinstance(part, ReplacesHead)]
        if len(others) > 1:
            raise CompositionError(f"one part at most may replace the head; got {', '.join(others)}")
        for part in parts:
            if keeps_some(part) or isinstance(part, Personal):
                raise CompositionError(
                    f"part {self.name!r} needs the same features on every client; {part.name!r} personalises the model"
                )

    def init(self, side: Client | Server) -> None:
        """Refuse a network without a head that can be replaced, and data without one label a sample."""
        weight, facts = head_weight(side.layout), side.facts
        if isinstance(side, Server) and (weight.shape[0] != facts.classes or facts.blank.y.dim() != 1):
            raise CompositionError(
                f"part {self.name!r} replaces a classifier's head, the last linear layer, if it is trainable; the last "
                f"trainable one here is {weight.name}, with {weight.shape[0]} outputs for {facts.classes} classes"
            )

    def check_head(self, client: Client) -> None:
        """On a client, which has the network: refuse one whose last linear layer is frozen, or whose outputs are not
        that layer's (two heads, distances to prototypes)."""
        module = client.trainer.replica.module
        name = head_name(module)
        if name != head_weight(client.layout).name:
            raise CompositionError(f"the head, {name}, is frozen, but {self.name!r} replaces it: let it be trainable")
        if len(client.data) and not _gives_outputs(self.head_layer(module), client):
            raise CompositionError(
                f"part {self.name!r} replaces a linear head, but the network's outputs are not those of {name}"
            )

    def head_layer(self, module: nn.Module) -> nn.Module:
        """The layer whose outputs must be the network's."""
        return head(module)


def _gives_outputs(layer: nn.Module, client: Client) -> bool:
    """Is `layer` linear in its input, and are its outputs the network's?"""
    trainer, seen = client.trainer, list[Tensor]()
    module = trainer.replica.module.eval()
    handle = layer.register_forward_hook(lambda _, args, outputs: seen.append(outputs))
    try:
        with torch.no_grad(), in_precision(trainer):
            outputs = module(trainer.stream.inputs(client.data.x[:1].to(trainer.device)))
    finally:
        handle.remove()
    return isinstance(head(module), nn.Linear) and len(seen) == 1 and torch.equal(seen[0], outputs)


def task_classes(client: Client) -> Tensor:
    """The current task's classes, the same for all clients; all classes where clients' tasks differ or are hidden."""
    stream, task = client.trainer.stream, client.task
    hidden = stream.asynchronous or task is None
    return torch.arange(client.facts.classes) if hidden else torch.tensor(stream.labels(task))


def class_numbers(mean: Tensor, count: int) -> Tensor | None:
    """The classes that clients sent sums of, from the mean of their numbers; None where they are no classes, because a
    client sent other numbers than all others: nothing can be made of the sums then."""
    numbers = mean.round().long()
    valid = ((numbers >= 0) & (numbers < count)).all() and len(numbers.unique()) == len(numbers)
    return numbers if valid else None


def of_all_classes(rows: Tensor, classes: Tensor, count: int) -> Tensor:
    """(count, ...) the rows of some classes, and zeros for the others."""
    found = rows.new_zeros(count, *rows.shape[1:])
    found[classes] = rows
    return found


def columns_of(classes: Tensor, count: int) -> Tensor:
    """(count,) the position of every class among `classes`; for another class one that is out of range."""
    return torch.full((count,), len(classes)).scatter(0, classes, torch.arange(len(classes)))


def rounded(features: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(features in whole steps of 2^-bits as float64, how many were clipped)."""
    steps = (features.double() * 2.0**bits).round()
    return steps.clamp(-LARGEST, LARGEST), (steps.abs() > LARGEST).sum()


def held_out(x: Tensor) -> Tensor:
    """(n,) bool: about a fifth of the samples, by a hash of their content: the same fifth on any client."""
    rows = x.numpy(force=True)
    return torch.tensor([hashlib.blake2b(row.tobytes(), digest_size=8).digest()[0] % 5 == 0 for row in rows])


def triangle(matrix: Tensor) -> Tensor:
    """The entries on and above the diagonal of (..., M, M), as (..., M (M + 1) / 2)."""
    return matrix[..., _upper(matrix.shape[-1], matrix.device)]


def symmetric(entries: Tensor, size: int) -> Tensor:
    """The symmetric matrices (..., M, M) with these entries on and above the diagonal."""
    upper = entries.new_zeros(*entries.shape[:-1], size, size)
    upper[..., _upper(size, entries.device)] = entries
    return upper + upper.transpose(-1, -2) - torch.diag_embed(upper.diagonal(dim1=-2, dim2=-1))


def _upper(size: int, device: torch.device) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).triu()
