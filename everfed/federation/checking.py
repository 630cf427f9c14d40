"""Checks what untrusted clients reply before it is used.

A reply is refused with a named reason, and the round goes on with the others. Which client answers which request is
known before (`everfed.federation.phase_requests`); `everfed.federation.cross_checks` compares a phase's replies with
each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from everfed.core import tree
from everfed.core.client import Reply
from everfed.core.context import Place, Setup
from everfed.core.handle import Client
from everfed.core.message import MODEL, Model
from everfed.core.phase import EVALUATE, TRAIN, Collect, Phase, When
from everfed.core.tree import Tree


class Reason(StrEnum):
    """Why a reply is refused."""

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
    """bytes: of all tensors of a reply. magnitude: of any number in it; total: of one of 64 bits in a sum, as far
    as sums are exact. samples, steps: of one local training."""

    bytes: int = 1 << 30
    magnitude: float = 1e8
    total: float = 2.0**53
    samples: int = 10**9
    steps: int = 10**9


@dataclass(frozen=True)
class Expected:
    """What a reply must be.

    declared: {part: keys} that may be in it. like: {"part/key": Spec} of the tensors whose shape is known. alike: the
    "part/key" that all clients must send in the same shape, because they are added up.
    """

    declared: Mapping[str, frozenset[str]]
    like: Mapping[str, Spec] = field(default_factory=dict)
    alike: frozenset[str] = frozenset()
    limits: Limits = Limits()


def expected_reply(setup: Setup, phase: Phase, place: Place, model: Model) -> Expected:
    """What clients may reply in `phase`. The shapes of the trained model come from a call of the aggregating part's
    `upload` on the server's model; other values that are added up must have the form that most clients send."""
    reducers = {EVALUATE: {"counts": None}} if phase.name == EVALUATE else setup.method.reducers(phase)
    silent = phase.name == TRAIN and not setup.server(TRAIN, place).synchronises
    training = phase.name == TRAIN and not silent
    added_up = {f"{p}/{k}" for p, keys in reducers.items() for k, r in keys.items() if not isinstance(r, Collect)}
    outer = phase.when is not When.INSIDE
    added = {part.name: part.adds for part in setup.method.protections if part.adds and outer}
    return Expected(
        {**({} if silent else {part: frozenset(keys) for part, keys in reducers.items()}), **added},
        {path: Spec.of(value) for path, value in uploaded_tensors(setup, place, model).items()} if training else {},
        frozenset(added_up),
        Limits(bytes=largest_reply(setup, phase, model)),
    )


def largest_reply(setup: Setup, phase: Phase, model: Model) -> int:
    """Bytes of 64 models, since a phase may collect a pool of them, and of what the values declare beyond."""
    declared = setup.method.declared_numbers(phase, setup.facts)
    return 64 * tree.tensor_bytes({MODEL: dict(model)}) + (1 << 20) + 8 * declared


def uploaded_tensors(setup: Setup, place: Place, model: Model) -> dict[str, Tensor]:
    """{"part/key": tensor} of what a client would send that left the model as it was."""
    aggregator, context = setup.method.aggregator, setup.server(TRAIN, place)
    client = Client(aggregator.name, {}, context, {MODEL: dict(model)}, model, setup.facts.blank, read_only=True)
    sent = aggregator.upload(client)
    return {f"{aggregator.name}/{key}": value for key, value in sent.items() if isinstance(value, Tensor)}


def check_reply(reply: Any, expected: Expected) -> Refusal | None:
    """None when the reply may be used; otherwise the first problem found."""
    if not isinstance(reply, Reply) or not isinstance(reply.values, dict):
        return Refusal(Reason.MALFORMED, f"a reply has values by part, not {type(reply).__name__}")
    limits = expected.limits
    return (
        _check_count("samples", reply.samples, limits.samples)
        or _check_count("steps", reply.steps, limits.steps)
        or _check_loss(reply.loss, limits.magnitude * max(1, reply.steps))
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


def _check_loss(loss: Any, limit: float) -> Refusal | None:
    if loss is None:
        return None
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        loss = float(loss)
    if isinstance(loss, bool) or not isinstance(loss, int | float):
        return Refusal(Reason.MALFORMED, f"loss must be a number, not {type(loss).__name__}")
    largest = _largest(loss)
    if largest is None or not math.isfinite(largest):
        return Refusal(Reason.NOT_FINITE, f"loss is {_shown(loss)}")
    return Refusal(Reason.TOO_LARGE, f"a loss of {loss:g}, at most {limit:g}") if largest > limit else None


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
        refusal = refusal or check_numbers(path, value, expected.limits, path in expected.alike)
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


def check_numbers(path: str, value: Any, limits: Limits, added_up: bool = True) -> Refusal | None:
    """Every number below `path` must be finite and within the limits. Integers that are not added up may have any
    value: keys, masked vectors."""
    for name, leaf in tree.leaves({path: value}):
        largest = _largest(leaf)
        if largest is None:
            return Refusal(Reason.WRONG_DTYPE, f"{name} is {getattr(leaf, 'dtype', type(leaf).__name__)}")
        if not math.isfinite(largest):
            return Refusal(Reason.NOT_FINITE, f"{name} holds {largest}")
        if not added_up and isinstance(leaf, Tensor) and not leaf.is_floating_point():
            continue
        exact = added_up and isinstance(leaf, Tensor) and leaf.dtype in (torch.int64, torch.float64)
        most = limits.total if exact else limits.magnitude
        if largest > most:
            return Refusal(Reason.TOO_LARGE, f"{name} holds {largest:.3g}, at most {most:g}")
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
