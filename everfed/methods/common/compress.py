"""Compressed updates: fewer bytes for what a client adds to the model, decoded before the server reduces it.

    bf16   every number of the update rounded to 8 bits of precision: an error of 2^-8 of it at most
    int8   of every parameter tensor with s = max |u| / 127: floor(u / s + r), r uniform in [0, 1). Unbiased; an error
           of s at most (stochastic quantisation; Alistarh et al., 2017)
    top-k  the largest share of u + e; e is what earlier rounds left out (error feedback; Stich et al., 2018). So what a
           client sent in all rounds is the sum of its updates without the last e

Compressed is what the aggregating part sends as `params`, as the difference from the model that was received, or as
`update`; statistics and what other parts send stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from everfed.core.client import Reply
from everfed.core.layout import cut, trained_spans
from everfed.core.phase import TRAIN
from everfed.method import MODEL, Client, CompositionError, Phase, Protection, Server, Tree, option

_KEYS = ("params", "update")
_FORMS: dict[str, dict[str, torch.dtype]] = {  # of what is sent
    "bf16": {"values": torch.bfloat16},
    "int8": {"values": torch.int8, "scales": torch.float32, "lengths": torch.int32},
    "top-k": {"values": torch.float32, "at": torch.int32},
}


@dataclass(frozen=True)
class Compress(Protection):
    kind: str = option("int8", one_of=tuple(_FORMS), about="how numbers are sent")
    share: float = option(0.01, above=0, at_most=1, about="of top-k: the share of the numbers that is sent")

    name = "compress"

    def check(self, parts, optimizer):
        owner = next(part for part in parts if hasattr(part, "upload"))
        if not set(_KEYS) & set(owner.reducers()):
            raise CompositionError(f"part 'compress': {owner.name!r} sends no update of the whole model to compress")

    def init(self, side):
        if side.options.sync_every > 1:
            raise CompositionError("part 'compress' needs train.sync_every = 1: it sends the update of one round")

    # on the client ---------------------------------------------------------------------------------------------------
    def seal(self, client: Client, phase: Phase, reply: Reply) -> Reply:
        own = reply.values.get(phase.owner, {}) if phase.name == TRAIN else {}
        return _changed(phase, reply, {key: self._encoded(client, key, own[key]) for key in _KEYS if key in own})

    def _encoded(self, client: Client, key: str, value: Tensor) -> Tree:
        if key == "params":
            value = value - client.messages[MODEL]["params"].to(value.device)
        if self.kind == "bf16":
            return {"values": value.bfloat16()}
        if self.kind == "int8":
            draws = torch.from_numpy(client.rng("compress").random(len(value), dtype="float32"))
            return quantised(value, draws.to(value.device), lengths_of(client))
        found, client.state[key] = largest(value + client.state.get(key, 0.0), self.share)
        return found

    # on the server ---------------------------------------------------------------------------------------------------
    def open(self, server: Server, phase: Phase, reply: Reply, received) -> Reply:
        own = reply.values.get(phase.owner, {}) if phase.name == TRAIN else {}
        size = len(received["params"])
        found = {key: self._decoded(key, own[key], size) for key in _KEYS if key in own}
        if "params" in found:
            found["params"] += received["params"].to(found["params"].device)
        return _changed(phase, reply, found)

    def _decoded(self, key: str, sent: Any, size: int) -> Tensor:
        """(size,) the update; ValueError for what no client of this part sends."""
        kinds = _FORMS[self.kind]
        tensors = (
            {k: v for k, v in sent.items() if isinstance(v, Tensor) and v.dim() == 1} if isinstance(sent, dict) else {}
        )
        if {k: v.dtype for k, v in tensors.items()} != kinds or len(sent) != len(kinds):
            raise ValueError(f"{key} must be compressed as {self.kind}: {', '.join(kinds)}")
        return _DECODE[self.kind](size=size, **tensors)


def _changed(phase: Phase, reply: Reply, values: Tree) -> Reply:
    """The reply with these values of the aggregating part."""
    if not values:
        return reply
    return replace(reply, values={**reply.values, phase.owner: {**reply.values[phase.owner], **values}})


# the codes ------------------------------------------------------------------------------------------------------------
def lengths_of(client: Client) -> Tensor:
    """Sizes of the parameter tensors in the vector that is sent, of the trained pieces where there are any."""
    sizes = torch.tensor([entry.size for entry in client.layout.params])
    index = torch.repeat_interleave(torch.arange(len(sizes)), sizes)[: client.layout.shared]
    spans = trained_spans(client.messages)
    lengths: Tensor = torch.unique_consecutive(index if spans is None else cut(index, spans), return_counts=True)[1]
    return lengths.int()


def quantised(value: Tensor, draws: Tensor, lengths: Tensor) -> Tree:
    """8-bit integers with one scale for each stretch of `lengths`; draws: (n,) uniform in [0, 1)."""
    scales = torch.stack([part.abs().max() / 127.0 for part in value.split(lengths.tolist())]) if len(value) else value
    spread = _spread(scales, lengths, len(value))
    whole = (value / torch.where(spread > 0, spread, 1.0) + draws).floor()
    return {"values": whole.clamp(-127, 127).to(torch.int8), "scales": scales, "lengths": lengths}


def _unquantised(values: Tensor, scales: Tensor, lengths: Tensor, size: int) -> Tensor:
    if len(values) != size or len(lengths) != len(scales) or bool((lengths < 0).any()) or int(lengths.sum()) != size:
        raise ValueError(f"{len(values)} numbers of {len(lengths)} tensors where there are {size}")
    return values * _spread(scales, lengths, size)


def _spread(scales: Tensor, lengths: Tensor, size: int) -> Tensor:
    """(size,) the scale of every number."""
    return torch.repeat_interleave(scales, lengths.to(scales.device), output_size=size)


def largest(value: Tensor, share: float) -> tuple[Tree, Tensor]:
    """The largest numbers by magnitude, with their places, and the vector without them."""
    at = value.abs().topk(math.ceil(share * len(value))).indices.sort().values
    return {"values": value[at], "at": at.int()}, value.index_fill(0, at, 0.0)


def _placed(values: Tensor, at: Tensor, size: int) -> Tensor:
    if len(values) != len(at) or (len(at) and not 0 <= int(at.min()) <= int(at.max()) < size):
        raise ValueError(f"{len(values)} numbers at {len(at)} places, which must lie in 0..{size - 1}")
    return torch.zeros(size, device=values.device).index_copy_(0, at.long(), values)


def _rounded(values: Tensor, size: int) -> Tensor:
    if len(values) != size:
        raise ValueError(f"{len(values)} numbers where there are {size}")
    return values.float()


_DECODE: dict[str, Callable[..., Tensor]] = {"bf16": _rounded, "int8": _unquantised, "top-k": _placed}
