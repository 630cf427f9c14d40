"""A model's trainable parameters as one vector, its statistics as a second, its counters as a third; and the trainable
tensors that parts add to it.

The module keeps views into these vectors, so a gradient is a vector, an aggregate is a vector, and loading a model is
one copy. Each parameter keeps its own memory order (channels-last weights stay channels-last inside the vector).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

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
        if any(p.dtype != torch.float32 for _, p in trainable):
            raise ValueError("trainable parameters must be float32; lower precision is an engine option")
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

    def adapt(self, module: nn.Module, server: Server) -> None:
        """Change the network in place before the run, the same way in every process: further layers, frozen weights.
        `server.layout` is the network's before it."""

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
        part.adapt(module, server(part.name))  # type: ignore[attr-defined]
    extras = Extras()
    for part in adding:
        for name, value in part.parameters(server(part.name)).items():  # type: ignore[attr-defined]
            extras.add(part.name, name, nn.Parameter(value.clone()), part.is_personal(EXTRAS + name))  # type: ignore[attr-defined]
    if next(extras.parameters(), None) is not None:
        module.extras = extras
    return module
