"""Checks the replies of untrusted clients before they are used.

A reply is refused with a named reason, and the round goes on with the others. `check_reply` is a pure function;
`ReplyChecker` records, for one phase, which clients have replied and which replies were refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

import torch
from torch import Tensor

from everfed.core import tree
from everfed.core.client import Reply, synchronises
from everfed.core.context import Moment, World
from everfed.core.message import MODEL
from everfed.core.part import Model, overrides
from everfed.core.phase import EVALUATE, TRAIN, Phase, Position
from everfed.core.reduce import Collect, Mean
from everfed.core.tree import Tree


class Reason(StrEnum):
    """Why a reply is refused."""

    NOT_ASKED = "not asked"  # from a client that is not in this phase
    DUPLICATE = "duplicate"  # the client has replied already
    LATE = "late"  # after the deadline, or to an earlier call
    WRONG_CALL = "wrong call"  # of another run or federation, or to a call that was never made
    WRONG_VERSION = "wrong version"  # of the protocol
    MALFORMED = "malformed"  # not a reply at all, or with values that no part declared
    WRONG_SHAPE = "wrong shape"
    WRONG_DTYPE = "wrong dtype"
    NOT_FINITE = "not finite"
    TOO_LARGE = "too large"  # more bytes, samples or steps, or larger numbers, than the limits
    OUTLIER = "outlier"  # far longer than the other replies of the phase


@dataclass(frozen=True)
class Refusal:
    """A reason and its detail; as a string, the text of an event."""

    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


PROTOCOL = 1  # changes with the form of messages or replies


@dataclass(frozen=True)
class Call:
    """The call that a reply answers. run: the run's unique identity."""

    run: str
    round: int
    phase: str
    repeat: int = 0
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Spec:
    """The dtype and shape that a tensor must have."""

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

    declared: {part: keys} that may be in it. like: {"part/key": Spec} of the tensors whose shape is known. alike: the
    "part/key" that all clients must send in the same shape, because they are added up.
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
    """A reply as received: its client, its call, and the time (on the clock of the deadline)."""

    client: int
    call: Call
    reply: Reply
    at: float = 0.0


def expected_reply(
    world: World, phase: Phase, moment: Moment, model: Model, run: str, limits: Limits | None = None
) -> Expected:
    """What clients may reply in `phase`. The shapes of the trained model come from a call of the aggregating part's
    `upload` on the server's model; other values that are added up must have the form that most clients send.
    By default a reply may be as large as 64 models (a collected pool of tasks, say)."""
    reducers = {EVALUATE: {"counts": None}} if phase.name == EVALUATE else world.method.reducers(phase)
    silent = phase.name == TRAIN and not synchronises(world.server(TRAIN, moment))
    added_up = {f"{p}/{k}" for p, keys in reducers.items() for k, r in keys.items() if not isinstance(r, Collect)}
    inside = phase.position is Position.INSIDE
    added = {} if inside else {part.name: part.adds for part in world.method.protections if part.adds}
    return Expected(
        Call(run, moment.round, phase.name, moment.repeat),
        frozenset(range(world.facts.clients) if inside else phase.clients(moment.plan)),  # inside: of the outer phase
        {**({} if silent else {part: frozenset(keys) for part, keys in reducers.items()}), **added},
        _uploaded(world, moment, model) if phase.name == TRAIN and not silent else {},
        frozenset(added_up),
        limits or Limits(bytes=largest_reply(model)),
    )


def largest_reply(model: Model) -> int:
    """Bytes of 64 models, since a phase may collect a pool of them."""
    return 64 * tree.tensor_bytes({MODEL: dict(model)}) + (1 << 20)


def _uploaded(world: World, moment: Moment, model: Model) -> dict[str, Spec]:
    aggregator = world.method.aggregator
    sent = aggregator.upload(model, {MODEL: dict(model)}, world.server(TRAIN, moment))
    return {f"{aggregator.name}/{key}": Spec.of(value) for key, value in sent.items() if isinstance(value, Tensor)}


def check_reply(arrived: Arrived, expected: Expected) -> Refusal | None:
    """None when the reply may be used; otherwise the first problem found."""
    return _check_sender(arrived, expected) or _check_content(arrived.reply, expected)


def _check_sender(arrived: Arrived, expected: Expected) -> Refusal | None:
    call, current = arrived.call, expected.call
    if call.protocol != current.protocol:
        return Refusal(Reason.WRONG_VERSION, f"protocol {call.protocol!r}, this server has {current.protocol}")
    if call.run != current.run:
        return Refusal(Reason.WRONG_CALL, f"of run {call.run!r}, this is {current.run!r}")
    if call != current:
        where = f"to {call.phase!r} of round {call.round}, now is {current.phase!r} of round {current.round}"
        earlier = _whole(call.round) and call.round <= current.round
        return Refusal(Reason.LATE if earlier else Reason.WRONG_CALL, where)
    if not _whole(arrived.client) or arrived.client not in expected.clients:
        return Refusal(Reason.NOT_ASKED, f"client {arrived.client!r} is not in this phase")
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
            return Refusal(Reason.MALFORMED, f"part {_shown(part)} sends nothing in this phase")
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
    """Every number below `path` must be finite and within the limits. Integers that are not added up may have any
    value: keys, masked vectors."""
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
    """A client's value, shortened for a log."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:80]}..."


def find_other_forms(expected: Expected, replies: Mapping[int, Reply]) -> dict[int, Refusal]:
    """The clients with a value of another form than most clients' value. What is added up must have one shape; what is
    collected one structure (names, types and numbers of dimensions), since parts and other clients read it."""
    refused: dict[int, Refusal] = {}
    paths = {f"{part}/{key}" for part, keys in expected.declared.items() for key in keys} - set(expected.like)
    for path in sorted(paths):
        part, key = path.split("/", 1)
        sent = {client: reply.values.get(part, {}).get(key) for client, reply in replies.items()}
        forms = {client: _form(value, path in expected.alike) for client, value in sent.items() if value is not None}
        usual = Counter(forms.values()).most_common(1)
        for client, form in forms.items():
            if form != usual[0][0]:
                detail = f"{path} is {form} of client {client} and {usual[0][0]} of most"
                refused.setdefault(client, Refusal(Reason.WRONG_SHAPE, detail[:300]))
    return refused


def _form(value: Any, exact: bool) -> str:
    """exact: with the shape of a tensor, not only its number of dimensions. Names that are numbers, as of clients or
    classes, may differ."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape) if exact else f'of {value.dim()} dimensions'}"
    if isinstance(value, dict):
        inner = {"0" if str(name).isdecimal() else str(name): _form(one, exact) for name, one in value.items()}
        return f"{{{', '.join(f'{name}: {form}' for name, form in sorted(inner.items()))}}}"
    return "text" if isinstance(value, str) else "a number"


FEWEST = 3  # replies below which there is no majority to compare with


def find_outliers(
    world: World, moment: Moment, model: Model, replies: Mapping[int, Reply], factor: float
) -> dict[int, Refusal]:
    """The clients whose trained models are too far from the model that they were sent: more than `factor` times the
    median of all replies, which a minority cannot move beyond what honest clients send."""
    part = world.method.aggregator
    unmoved = part.upload(model, {MODEL: dict(model)}, world.server(TRAIN, moment))
    refused: dict[int, Refusal] = {}
    for key, base in unmoved.items():
        if not isinstance(base, Tensor) or not base.is_floating_point():
            continue
        sent = {client: reply.values.get(part.name, {}).get(key) for client, reply in replies.items()}
        norms = {client: _distance(value, base) for client, value in sent.items() if value is not None}
        middle = median(norms.values()) if len(norms) >= FEWEST else 0.0
        for client, norm in norms.items():
            if 0.0 < factor * middle < norm:
                detail = f"{part.name}/{key} moved by {norm:.3g}, that of the median client by {middle:.3g}"
                refused.setdefault(client, Refusal(Reason.OUTLIER, f"{detail}; at most {factor:g} times that"))
    return refused


def _distance(value: Tensor, base: Tensor) -> float:
    return float(torch.linalg.vector_norm(value - base.to(value.device), dtype=torch.float64))


class SampleClaims:
    """Caps the number of samples that clients claim, where replies are weighed by it.

    allowed: (client) -> at most so many, or None where the roster does not name the client. It then counts for what the
    server's own stream holds for it; where a client's data is known to itself alone, for the median of the phase's
    claims.
    """

    def __init__(self, world: World, allowed: Callable[[int], int | None] = lambda client: None) -> None:
        self.world, self.allowed = world, allowed
        self._rehearses = any(overrides(part, "dataset") for part in world.method.parts)  # samples of earlier tasks
        self._held: dict[tuple[int, int], int] = {}  # (client, task) -> samples in the server's own stream

    def capped(self, phase: Phase, moment: Moment, claims: Mapping[int, int]) -> dict[int, int]:
        """{client: as how many it counts}, for those whose claim is larger."""
        reducers = self.world.method.reducers(phase)
        if not any(isinstance(r, Mean) and r.weighted for keys in reducers.values() for r in keys.values()):
            return {}
        middle = int(median(sorted(claims.values()))) if claims else 0
        most = {client: self._most(client, moment, middle) for client in claims}
        return {client: most[client] for client, claim in claims.items() if claim > most[client]}

    def _most(self, client: int, moment: Moment, middle: int) -> int:
        allowed = self.allowed(client)
        if allowed is not None:
            return allowed
        if self.world.stream.private_data:
            return middle
        own = moment.plan.tasks.get(client, moment.plan.task)
        earlier = range(own) if self._rehearses else ()
        return self._size(client, own) + sum(self._size(client, task) for task in earlier)

    def _size(self, client: int, task: int) -> int:
        if (client, task) not in self._held:
            self._held[client, task] = len(self.world.stream.data(client, task))
        return self._held[client, task]


class ReplyChecker:
    """Checks the replies of one phase, accepts one per client, and records the refused ones."""

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self.answered: set[int] = set()
        self.refused: list[tuple[int, Refusal]] = []

    def check(self, arrived: Arrived) -> Refusal | None:
        """None when the reply is accepted."""
        refusal = check_reply(arrived, self.expected)
        if refusal is None and arrived.client in self.answered:
            refusal = Refusal(Reason.DUPLICATE, f"client {arrived.client} has replied already")
        if refusal is None:
            self.answered.add(arrived.client)
        else:
            self.refuse(arrived.client, refusal)
        return refusal

    def refuse(self, client: int, refusal: Refusal) -> None:
        """Record a reply that could not be read."""
        self.refused.append((client, refusal))

    def counts(self) -> dict[str, int]:
        """Refusals by reason, for the event of the phase."""
        return dict(Counter(str(refusal.reason) for _, refusal in self.refused))


__all__ = [
    "Arrived",
    "Call",
    "Expected",
    "Limits",
    "Reason",
    "Refusal",
    "ReplyChecker",
    "SampleClaims",
    "Spec",
    "check_reply",
    "expected_reply",
    "find_other_forms",
    "find_outliers",
]
