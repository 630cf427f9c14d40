"""Pieces of the shared parameter vector, for methods that train only some of it at a time: one task's adapter, one
factor of a product, the head's rows of the current classes.

What is trained in a round is sent under "model", as a shorter vector, and comes back so; every other piece has a
version of its own and is sent to a client only while the client lacks it. Parts see whole vectors. The aggregating part
works on the shorter ones, which are to it a smaller model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from everfed.core.layout import Layout
from everfed.core.message import MODEL, Cached, Message, Model
from everfed.core.tree import Tree

if TYPE_CHECKING:
    from everfed.core.handle import Server

PIECES = "pieces"  # in a message: the pieces that are not trained, and where the trained ones lie
TRAINED = "trained"
Spans = tuple[slice, ...]


@runtime_checkable
class TrainsPieces(Protocol):
    """A part that chooses which pieces of the shared vector a round trains."""

    @property
    def name(self) -> str: ...

    def pieces(self, layout: Layout, labels: Sequence[tuple[int, ...]]) -> Mapping[str, Spans]:
        """Disjoint pieces by name; what none covers is trained in every round. labels: the classes of every task."""

    def trained(self, piece: str, server: Server) -> bool:
        """Does this round train the piece of that name?"""


def cut(vector: Tensor, spans: Spans) -> Tensor:
    """These spans of a vector, one after the other."""
    return torch.cat([vector[span] for span in spans]) if spans else vector[:0]


def paste(vector: Tensor, spans: Spans, values: Tensor) -> None:
    """The inverse of `cut`, in place."""
    place = 0
    for span in spans:
        length = span.stop - span.start
        vector[span] = values[place : place + length]
        place += length


def pasted(vector: Tensor, spans: Spans, values: Tensor) -> Tensor:
    """A copy of `vector`, on the device of `values`, with these spans replaced."""
    copy = vector.to(values.device, copy=True)
    paste(copy, spans, values)
    return copy


def joined(spans: Iterable[slice]) -> Spans:
    """The same places in ascending order, neighbours as one span."""
    found: list[slice] = []
    for span in sorted(spans, key=lambda one: one.start):
        if found and found[-1].stop == span.start:
            span = slice(found.pop().start, span.stop)
        found.append(span)
    return tuple(span for span in found if span.stop > span.start)


def rest(spans: Iterable[slice], size: int) -> Spans:
    """What of a vector of `size` numbers the spans leave out."""
    edges = [slice(0, 0), *joined(spans), slice(size, size)]
    return joined(slice(a.stop, b.start) for a, b in pairwise(edges))


def to_text(spans: Spans) -> str:
    return ",".join(f"{span.start}:{span.stop}" for span in spans)


def from_text(text: str) -> Spans:
    pairs = (pair.split(":") for pair in text.split(",") if pair)
    return tuple(slice(int(start), int(stop)) for start, stop in pairs)


@dataclass(frozen=True)
class Pieces:
    """All pieces of a run's vector, on the server. owner: the part that names them."""

    owner: TrainsPieces
    spans: Mapping[str, Spans]
    size: int

    @staticmethod
    def of(owner: TrainsPieces, layout: Layout, labels: Sequence[tuple[int, ...]]) -> Pieces:
        named = {name: joined(spans) for name, spans in owner.pieces(layout, labels).items()}
        return Pieces(owner, {name: spans for name, spans in named.items() if spans}, layout.shared)

    def moving(self, server: Server) -> Spans:
        """Where this round trains. server: the handle of the part that names the pieces."""
        return rest((span for spans in self.resting(server).values() for span in spans), self.size)

    def resting(self, server: Server) -> dict[str, Spans]:
        """The other pieces."""
        return {name: spans for name, spans in self.spans.items() if not self.owner.trained(name, server)}

    def split(self, message: Message, versions: Mapping[str, int], server: Server) -> Message:
        """The message with the trained pieces under "model" and the others by version."""
        whole: Cached = message[MODEL]["params"]
        moving = self.moving(server)
        others = {
            name: Cached(versions.get(name, 0), {"at": to_text(spans), "values": cut(_tensor(whole.value), spans)})
            for name, spans in self.resting(server).items()
        }
        # the spans are part of the version: another choice of pieces is another vector
        short = Cached(f"{whole.version}/{to_text(moving)}", cut(_tensor(whole.value), moving))
        model = {**message[MODEL], "params": short}
        return {**message, MODEL: model, PIECES: {TRAINED: to_text(moving), **others}}

    def changed(self, old: Model, new: Model) -> list[str]:
        """The pieces in which two models differ."""
        before, after = old["params"], new["params"].to(old["params"].device)
        return [n for n, spans in self.spans.items() if not torch.equal(cut(before, spans), cut(after, spans))]


def _tensor(value: Tree | Tensor) -> Tensor:
    assert isinstance(value, Tensor)
    return value


# on clients -----------------------------------------------------------------------------------------------------------
def assembled(message: Message) -> Message:
    """A received message with the whole shared vector under "model"; of the pieces only the places of the trained ones
    stay. Without pieces the message is returned as it is."""
    if PIECES not in message or MODEL not in message:
        return message
    others = {name: piece for name, piece in message[PIECES].items() if name != TRAINED}
    if not others:
        return message
    moving, short = from_text(message[PIECES][TRAINED]), message[MODEL]["params"]
    placed = [(from_text(piece["at"]), piece["values"]) for piece in others.values()]
    whole = short.new_empty(len(short) + sum(len(values) for _, values in placed))
    paste(whole, moving, short)
    for spans, values in placed:
        paste(whole, spans, values.to(short.device))
    return {**message, MODEL: {**message[MODEL], "params": whole}, PIECES: {TRAINED: message[PIECES][TRAINED]}}


def trained_spans(message: Mapping[str, Any]) -> Spans | None:
    """Where the round trains; None where it trains everything."""
    return from_text(message[PIECES][TRAINED]) if PIECES in message else None


def shortened(model: Model, message: Message) -> Model:
    """The model with the trained pieces of its vector only."""
    spans = trained_spans(message)
    return model if spans is None else {**model, "params": cut(model["params"], spans)}


def only_trained(vector: Tensor, message: Mapping[str, Any]) -> Tensor:
    """A vector over all parameters, zero where the round trains nothing."""
    spans = trained_spans(message)
    return vector if spans is None else pasted(torch.zeros_like(vector), spans, cut(vector, spans))
