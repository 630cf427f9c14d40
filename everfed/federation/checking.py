"""Is this reply one that the server may take in? Replies come from other people's machines: nothing in them is trusted.

A reply is refused with a named reason, and the round goes on with the others. `check_reply` is a pure function; `ReplyChecker`
remembers, for one phase, who has answered and what was refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from everfed.core import tree
from everfed.core.client import Reply, synchronises
from everfed.core.context import Moment, World
from everfed.core.message import MODEL
from everfed.core.part import Model
from everfed.core.phase import EVALUATE, TRAIN, Phase, Position
from everfed.core.reduce import Collect
from everfed.core.tree import Tree


class Reason(StrEnum):
    """Why a reply is not taken in."""

    NOT_ASKED = "not asked"  # from a client that this phase did not call
    DUPLICATE = "duplicate"  # the client has answered already
    LATE = "late"  # after the deadline, or to an earlier call
    WRONG_CALL = "wrong call"  # of another run or federation, or to a call that was never made
    WRONG_VERSION = "wrong version"  # of the protocol
    MALFORMED = "malformed"  # not a reply at all, or with values that nobody declared
    WRONG_SHAPE = "wrong shape"
    WRONG_DTYPE = "wrong dtype"
    NOT_FINITE = "not finite"
    TOO_LARGE = "too large"  # more bytes, samples or steps, or larger numbers, than can be


@dataclass(frozen=True)
class Refusal:
    """A reason, and what exactly was wrong; a sentence that an event can carry."""

    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


PROTOCOL = 1  # changes whenever messages or replies change their form


@dataclass(frozen=True)
class Call:
    """What a reply answers. run: an identity that no other run shares."""

    run: str
    round: int
    phase: str
    repeat: int = 0
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Spec:
    """What a tensor must look like."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Spec:
        return Spec(tensor.dtype, tuple(tensor.shape))


@dataclass(frozen=True)
class Limits:
    """bytes: of all tensors of a reply. magnitude: of any number in it. samples, steps: of one local training."""

    bytes: int = 1 << 30
    magnitude: float = 1e8
    samples: int = 10**9
    steps: int = 10**9


@dataclass(frozen=True)
class Expected:
    """What a reply to `call` must be.

    declared: {part: keys} that may be in it. like: {"part/key": Spec} of the tensors whose form is known. alike: the
    "part/key" that all clients must send in the same form, because they are added up.
    """

    call: Call
    clients: frozenset[int]
    declared: Mapping[str, frozenset[str]]
    like: Mapping[str, Spec] = field(default_factory=dict)
    alike: frozenset[str] = frozenset()
    limits: Limits = Limits()
    deadline: float = math.inf


@dataclass(frozen=True)
class Arrived:
    """A reply as it came: from whom, to which call, when (on the clock of the deadline)."""

    client: int
    call: Call
    reply: Reply
    at: float = 0.0


def expected_reply(
    world: World, phase: Phase, moment: Moment, model: Model, run: str, limits: Limits | None = None
) -> Expected:
    """What clients may answer in `phase`. The form of the trained model is known from a dry call of the aggregating
    part's own `upload` on the server's model; other values that are added up take the form of the first one accepted.
    By default a reply may be as large as 64 models (a collected pool of tasks, say)."""
    reducers = {EVALUATE: {"counts": None}} if phase.name == EVALUATE else world.method.reducers(phase)
    silent = phase.name == TRAIN and not synchronises(world.server(TRAIN, moment))
    added_up = {f"{p}/{k}" for p, keys in reducers.items() for k, r in keys.items() if not isinstance(r, Collect)}
    inside = phase.position is Position.INSIDE
    added = {} if inside else {part.name: part.adds for part in world.method.protections if part.adds}
    return Expected(
        Call(run, moment.round, phase.name, moment.repeat),
        frozenset(range(world.facts.clients) if inside else phase.clients(moment.plan)),  # inside: whoever began it
        {**({} if silent else {part: frozenset(keys) for part, keys in reducers.items()}), **added},
        _uploaded(world, moment, model) if phase.name == TRAIN and not silent else {},
        frozenset(added_up),
        limits or Limits(bytes=largest_reply(model)),
    )


def largest_reply(model: Model) -> int:
    """Bytes: as many as 64 models have, since a phase may collect a pool of them."""
    return 64 * tree.tensor_bytes({MODEL: dict(model)}) + (1 << 20)


def _uploaded(world: World, moment: Moment, model: Model) -> dict[str, Spec]:
    aggregator = world.method.aggregator
    sent = aggregator.upload(model, {MODEL: dict(model)}, world.server(TRAIN, moment))
    return {f"{aggregator.name}/{key}": Spec.of(value) for key, value in sent.items() if isinstance(value, Tensor)}


def check_reply(arrived: Arrived, expected: Expected) -> Refusal | None:
    """None when the reply may be taken in; otherwise the first thing that is wrong with it."""
    return _check_sender(arrived, expected) or _check_content(arrived.reply, expected)


def _check_sender(arrived: Arrived, expected: Expected) -> Refusal | None:
    call, asked = arrived.call, expected.call
    if call.protocol != asked.protocol:
        return Refusal(Reason.WRONG_VERSION, f"protocol {call.protocol!r}, this server speaks {asked.protocol}")
    if call.run != asked.run:
        return Refusal(Reason.WRONG_CALL, f"of run {call.run!r}, this is {asked.run!r}")
    if call != asked:
        where = f"to {call.phase!r} of round {call.round}, now is {asked.phase!r} of round {asked.round}"
        earlier = _whole(call.round) and call.round <= asked.round
        return Refusal(Reason.LATE if earlier else Reason.WRONG_CALL, where)
    if not _whole(arrived.client) or arrived.client not in expected.clients:
        return Refusal(Reason.NOT_ASKED, f"client {arrived.client!r} was not called")
    if arrived.at > expected.deadline:
        return Refusal(Reason.LATE, f"{arrived.at - expected.deadline:.1f} s after the deadline")
    return None


def _check_content(reply: Any, expected: Expected) -> Refusal | None:
    if not isinstance(reply, Reply) or not isinstance(reply.values, dict):
        return Refusal(Reason.MALFORMED, f"a reply has values by part, not {type(reply).__name__}")
    limits = expected.limits
    return (
        _check_count("samples", reply.samples, limits.samples)
        or _check_count("steps", reply.steps, limits.steps)
        or _check_loss(reply.loss)
        or _check_declared(reply.values, expected)
        or _check_bytes(reply.values, limits)
        or _check_leaves(reply.values, expected)
    )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_count(name: str, value: Any, limit: int) -> Refusal | None:
    if not _whole(value) or value < 0:
        return Refusal(Reason.MALFORMED, f"{name} must be a whole number from 0 on, not {_shown(value)}")
    return Refusal(Reason.TOO_LARGE, f"{_shown(value)} {name}, at most {limit}") if value > limit else None


def _check_loss(loss: Any) -> Refusal | None:
    if loss is None:
        return None
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        loss = float(loss)
    if isinstance(loss, bool) or not isinstance(loss, int | float):
        return Refusal(Reason.MALFORMED, f"loss must be a number, not {type(loss).__name__}")
    return None if math.isfinite(loss) else Refusal(Reason.NOT_FINITE, f"loss is {loss}")


def _check_declared(values: dict[str, Any], expected: Expected) -> Refusal | None:
    for part, keys in values.items():
        if part not in expected.declared:
            return Refusal(Reason.MALFORMED, f"part {_shown(part)} has nothing to say in this phase")
        if not isinstance(keys, dict):
            return Refusal(Reason.MALFORMED, f"{part} must hold values by name, not {type(keys).__name__}")
        for key in keys:
            if key not in expected.declared[part]:
                return Refusal(Reason.MALFORMED, f"{part}/{_shown(key)} is not declared")
    return None


def _check_bytes(values: dict[str, Tree], limits: Limits) -> Refusal | None:
    size = tree.tensor_bytes(values)
    return Refusal(Reason.TOO_LARGE, f"{size} bytes, at most {limits.bytes}") if size > limits.bytes else None


def _check_leaves(values: dict[str, Tree], expected: Expected) -> Refusal | None:
    for path, value in _values(values):
        if path in expected.like and value is not None:
            refusal = _check_form(path, value, expected.like[path])
        elif path in expected.alike and isinstance(value, dict | str):
            refusal = Refusal(Reason.MALFORMED, f"{path} is added up, so it must be a tensor or a number")
        else:
            refusal = None
        refusal = refusal or _check_numbers(path, value, expected)
        if refusal:
            return refusal
    return None


def _values(values: dict[str, Tree]) -> list[tuple[str, Any]]:
    return [(f"{part}/{key}", value) for part, keys in values.items() for key, value in keys.items()]


def _check_form(path: str, value: Any, spec: Spec) -> Refusal | None:
    if not isinstance(value, Tensor):
        return Refusal(Reason.MALFORMED, f"{path} must be a tensor, not {type(value).__name__}")
    if value.dtype != spec.dtype:
        return Refusal(Reason.WRONG_DTYPE, f"{path} is {value.dtype}, not {spec.dtype}")
    if tuple(value.shape) != spec.shape:
        return Refusal(Reason.WRONG_SHAPE, f"{path} is {_shown(tuple(value.shape))}, not {spec.shape}")
    return None


def _check_numbers(path: str, value: Any, expected: Expected) -> Refusal | None:
    """Every number below `path` is finite and not absurdly large. Integers that are not added up may be anything: keys,
    masked vectors."""
    limits = expected.limits
    for name, leaf in tree.leaves({path: value}):
        largest = _largest(leaf)
        if largest is None:
            return Refusal(Reason.WRONG_DTYPE, f"{name} is {getattr(leaf, 'dtype', type(leaf).__name__)}")
        if not math.isfinite(largest):
            return Refusal(Reason.NOT_FINITE, f"{name} holds {largest}")
        counts = isinstance(leaf, Tensor) and not leaf.is_floating_point() and path not in expected.alike
        if largest > limits.magnitude and not counts:
            return Refusal(Reason.TOO_LARGE, f"{name} holds {largest:.3g}, at most {limits.magnitude:g}")
    return None


def _largest(leaf: Any) -> float | None:
    """The largest magnitude in a leaf (NaN when there is one); None for what holds no real numbers."""
    if isinstance(leaf, Tensor):
        if leaf.is_complex() or leaf.is_sparse or leaf.layout != torch.strided:
            return None
        if leaf.numel() == 0:
            return 0.0
        # the smallest and the largest need no copy of the vector; NaN passes through both
        low, high = (leaf if leaf.is_floating_point() and leaf.element_size() > 1 else leaf.double()).aminmax()
        return _either(float(low), float(high))
    if leaf is None or isinstance(leaf, bool | str):
        return 0.0
    try:
        return abs(float(leaf)) if isinstance(leaf, int | float) else None
    except OverflowError:  # an integer beyond every float
        return math.inf


def _either(low: float, high: float) -> float:
    return math.nan if math.isnan(low) or math.isnan(high) else max(abs(low), abs(high))


def _shown(value: Any) -> str:
    """What came from outside, short enough for a log."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:80]}..."


class ReplyChecker:
    """Takes the replies of one phase in, once each, and keeps account of what it refused."""

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self.answered: set[int] = set()
        self.refused: list[tuple[int, Refusal]] = []

    def take(self, arrived: Arrived) -> Refusal | None:
        """None when the reply counts from now on."""
        refusal = check_reply(arrived, self.expected)
        if refusal is None and arrived.client in self.answered:
            refusal = Refusal(Reason.DUPLICATE, f"client {arrived.client} has answered already")
        if refusal is None:
            self.answered.add(arrived.client)
            self._agree(arrived.reply)
        else:
            self.refuse(arrived.client, refusal)
        return refusal

    def refuse(self, client: int, refusal: Refusal) -> None:
        """Keep account of something that could not even be read."""
        self.refused.append((client, refusal))

    def counts(self) -> dict[str, int]:
        """Refusals by reason, for the event of the phase."""
        return dict(Counter(str(refusal.reason) for _, refusal in self.refused))

    def _agree(self, reply: Reply) -> None:
        """Values that are added up have the form of the first."""
        new = {
            path: Spec.of(value)
            for path, value in _values(reply.values)
            if path in self.expected.alike and path not in self.expected.like and isinstance(value, Tensor)
        }
        if new:
            self.expected = replace(self.expected, like={**self.expected.like, **new})


__all__ = [
    "Arrived",
    "Call",
    "ReplyChecker",
    "Expected",
    "Limits",
    "Reason",
    "Refusal",
    "Spec",
    "check_reply",
    "expected_reply",
]
