"""A model's trainable parameters as one vector, its statistics as a second, its counters as a third; the tensors that
parts add to it, and the pieces of the vector that a method trains at a time.

The module keeps views into these vectors, so a gradient is a vector, an aggregate is a vector, and loading a model is
one copy. Each parameter keeps its own memory order (channels-last weights stay channels-last inside the vector).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from everfed.core.message import MODEL, Cached, Message, Model
from everfed.core.tree import Tree
from everfed.errors import SettingError

if TYPE_CHECKING:
    from everfed.core.handle import Server

EXTRAS = "extras."  # what the names of all parameters that parts add begin with


@dataclass(frozen=True)
class Entry:
    """One named slice of a vector."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    size: int

    def view(self, vector: Tensor) -> Tensor:
        """This entry of `vector`, shaped; shares memory."""
        return torch.as_strided(vector, self.shape, self.stride, vector.storage_offset() + self.start)

    def flat(self, tensor: Tensor) -> Tensor:
        """A tensor of this entry's shape, as the 1-D slice of the vector it stands for."""
        return tensor.as_strided((self.size,), (1,)) if tensor.stride() == self.stride else self._reorder(tensor)

    def _reorder(self, tensor: Tensor) -> Tensor:
        order = sorted(range(len(self.shape)), key=lambda axis: (-self.stride[axis], -self.shape[axis]))
        return tensor.permute(order).reshape(-1)


@dataclass(frozen=True)
class Layout:
    """Where every tensor of a model lies. Built once per model; the same for every client, engine and checkpoint."""

    params: tuple[Entry, ...]  # the shared ones first, then those that never leave a client
    stats: tuple[Entry, ...]  # float buffers: BatchNorm's running mean and variance
    counters: tuple[Entry, ...]  # integer buffers: BatchNorm's num_batches_tracked
    shared: int  # the first `shared` numbers of a parameter vector are shared, the rest is personal

    @staticmethod
    def of(module: nn.Module, personal: Callable[[str], bool] = lambda name: False) -> Layout:
        """The layout of `module`; parameters whose name is `personal` come last in the vector."""
        trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        trainable.sort(key=lambda named: personal(named[0]))  # stable: keeps the module's order otherwise
        for name, p in trainable:
            if p.dtype != torch.float32:
                raise SettingError(
                    f"model: trainable parameters are {p.dtype} ({name}); they must be float32: call .float() on the "
                    "network. Lower precision is an option of the engine"
                )
        constants = _constants(module)
        buffers = [(n, b) for n, b in module.named_buffers() if n not in constants]
        return Layout(
            tuple(_entries(trainable)),
            tuple(_entries([(n, b) for n, b in buffers if b.is_floating_point()])),
            # other types (masks, indices) are constants of the module
            tuple(_entries([(n, b) for n, b in buffers if b.dtype == torch.int64])),
            sum(p.numel() for n, p in trainable if not personal(n)),
        )

    @property
    def size(self) -> int:
        """Number of trainable parameters, P."""
        return sum(entry.size for entry in self.params)

    def param(self, name: str) -> Entry:
        for entry in self.params:
            if entry.name == name:
                return entry
        raise KeyError(f"no parameter {name!r}; the model has {', '.join(e.name for e in self.params)}")

    def within(self, span: slice) -> tuple[Entry, ...]:
        """The parameters that lie in a slice of the vector."""
        return tuple(entry for entry in self.params if span.start <= entry.start < span.stop)

    def read(self, module: nn.Module) -> dict[str, Tensor]:
        """The model's vectors, copied: params (P,), stats (S,), counters (C,)."""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        return {
            "params": _gather(self.params, tensors, torch.float32),
            "stats": _gather(self.stats, tensors, torch.float32),
            "counters": _gather(self.counters, tensors, torch.int64),
        }

    def bind(self, module: nn.Module, params: Tensor, stats: Tensor, counters: Tensor) -> None:
        """Make the module's parameters and buffers views of the vectors."""
        parameters = dict(module.named_parameters())
        for entry in self.params:
            parameters[entry.name].data = entry.view(params)
        for entries, vector in ((self.stats, stats), (self.counters, counters)):
            for entry in entries:
                owner, _, leaf = entry.name.rpartition(".")
                module.get_submodule(owner)._buffers[leaf] = entry.view(vector)

    def flatten_gradient(self, grads: tuple[Tensor, ...], span: slice | None = None) -> Tensor:
        """Per-parameter gradients, in `params` order, of any float type -> one float32 vector (P,); of the parameters
        within `span` only, the slice of it."""
        entries = self.params if span is None else self.within(span)
        first = 0 if span is None else span.start
        vector = torch.empty(sum(entry.size for entry in entries), device=grads[0].device)
        pairs = [
            (vector[entry.start - first : entry.start - first + entry.size], entry.flat(grad))
            for entry, grad in zip(entries, grads, strict=True)
        ]
        for kind in {source.dtype for _, source in pairs}:  # one fused copy for each type
            chosen = [pair for pair in pairs if pair[1].dtype == kind]
            torch._foreach_copy_([target for target, _ in chosen], [source for _, source in chosen])
        return vector

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a parameter vector by name."""
        return {entry.name: entry.view(vector) for entry in self.params}


def _constants(module: nn.Module) -> set[str]:
    """Names of buffers that are no part of the module's state (tables of positions, say): they are built with it."""
    return {
        f"{path}.{name}" if path else name
        for path, layer in module.named_modules()
        for name in layer._non_persistent_buffers_set
    }


def _entries(tensors: Sequence[tuple[str, Tensor]]) -> Iterator[Entry]:
    start = 0
    for name, tensor in tensors:
        stride = tensor.stride() if _dense(tensor) else torch.empty(tensor.shape).stride()
        yield Entry(name, tuple(tensor.shape), tuple(stride), start, tensor.numel())
        start += tensor.numel()


def _dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _gather(entries: tuple[Entry, ...], tensors: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    if not entries:
        return torch.zeros(0, dtype=dtype)
    return torch.cat([entry.flat(tensors[entry.name].detach()) for entry in entries]).to(dtype).clone()


# what parts add to a model --------------------------------------------------------------------------------------------
class AddsParameters:
    """A part that changes which parameters there are: tensors of its own, layers of the network, personal ones."""

    def adapt(self, module: nn.Module, server: Server) -> nn.Module | None:
        """Change the network before the run, the same way in every process: further layers, frozen weights. In place,
        or the result is used instead. `server.layout` is the network's before it."""
        return None

    def parameters(self, server: Server) -> dict[str, Tensor]:
        """Trainable tensors beside the network's, with their first values: `module.extras[part][name]`."""
        return {}

    def is_personal(self, parameter: str) -> bool:
        """Does this parameter stay on the client? Asked of the network's parameters by their names, and of the part's
        own as "extras.NAME"."""
        return False


def keeps_some(part: object) -> bool:
    """May some parameters stay on the clients, because of this part?"""
    return isinstance(part, AddsParameters) and type(part).is_personal is not AddsParameters.is_personal


def head_name(module: nn.Module) -> str:
    """The name of the weight of the head, the last linear layer; trainable or not."""
    return [n for n, p in module.named_parameters() if p.dim() == 2 and not n.startswith(EXTRAS)][-1]


def registered(part: str, name: str, personal: bool) -> str:
    """The name under which a module lists a parameter that a part added."""
    return EXTRAS + f"{_scope(personal)}/{part}/{name}".replace(".", "_")


def _scope(personal: bool) -> str:
    return "personal" if personal else "shared"


def is_personal(parts: Iterable[object], parameter: str) -> bool:
    """Does this parameter stay on the client, in a method of these parts?"""
    if parameter.startswith(f"{EXTRAS}{_scope(True)}/"):
        return True
    return any(part.is_personal(parameter) for part in parts if isinstance(part, AddsParameters))


class Extras(nn.Module):
    """`module.extras[part][name]`. Personal ones are registered apart, so that they are known by their names. Attached
    to an nn.Sequential it is its last layer, so it passes its input on."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[str, dict[str, nn.Parameter]] = {}

    def forward(self, x: Any) -> Any:
        return x

    def add(self, part: str, name: str, value: nn.Parameter, personal: bool) -> None:
        self.register_parameter(registered(part, name, personal).removeprefix(EXTRAS), value)
        self._parts.setdefault(part, {})[name] = value

    def __getitem__(self, part: str) -> dict[str, nn.Parameter]:
        return self._parts[part]


def attach(module: nn.Module, parts: Iterable[Any], server: Callable[[str], Server]) -> nn.Module:
    """Let `parts` adapt `module` and register their parameters on it; a module whose method does neither is returned
    as it is. server: the handle of a part, by its name."""
    adding = [part for part in parts if isinstance(part, AddsParameters)]
    for part in adding:
        module = part.adapt(module, server(part.name)) or module  # type: ignore[attr-defined]
    extras = Extras()
    for part in adding:
        for name, value in part.parameters(server(part.name)).items():  # type: ignore[attr-defined]
            extras.add(part.name, name, nn.Parameter(value.clone()), part.is_personal(EXTRAS + name))  # type: ignore[attr-defined]
    if next(extras.parameters(), None) is not None:
        module.extras = extras
    return module


# pieces that are trained at a time -----------------------------------------------------------------------------------
# One task's adapter, one factor of a product, the head's rows of the current classes. What is trained in a round is
# sent under "model", as a shorter vector, and comes back so; every other piece has a version of its own and is sent to
# a client only while the client lacks it. Parts see whole vectors. The aggregating part works on the shorter ones,
# which are to it a smaller model.
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
