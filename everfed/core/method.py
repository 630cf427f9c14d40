"""compose(*parts): a method, checked before anything runs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache, cached_property
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from everfed.core import layout
from everfed.core.layout import TrainsPieces
from everfed.core.optimizer import Optimizer
from everfed.core.part import (
    BOUNDARIES,
    CLASSES,
    EAGER,
    HELD_OUT,
    HISTORY,
    HOOKS,
    PLAIN,
    SHARED,
    STALE,
    TASK_ID,
    TOGETHER,
    WHOLE,
    Aggregator,
    Part,
    Personal,
    Protection,
    changed,
    overrides,
)
from everfed.core.phase import EVALUATE, TRAIN, Cohort, Phase, Reducer, When
from everfed.core.stream import Stream
from everfed.errors import CompositionError

if TYPE_CHECKING:
    from everfed.core.context import Facts

_ONE_OWNER = ("objective", "forward")
SGD = Optimizer()
_NO_PARTS = frozenset({BOUNDARIES, TASK_ID, HISTORY, HELD_OUT, TOGETHER, CLASSES, EAGER, SHARED, WHOLE, PLAIN, STALE})


@dataclass(frozen=True)
class Method:
    """Parts in order. Build one with `compose`."""

    name: str
    parts: tuple[Part, ...]
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part in self.parts:
            object.__setattr__(part, "_composed", True)
        object.__setattr__(self, "_watched", [(part, _changeable(part)) for part in self.parts])

    def check_unchanged(self) -> None:
        """Raises CompositionError where a part keeps something on itself: it would be shared by clients, differ from
        process to process, and be lost when a run is resumed."""
        for part, before in self.__dict__["_watched"]:
            for name, marks in before.items():
                if _marks(part, name) != marks:
                    raise changed(part, name)

    @property
    def aggregator(self) -> Aggregator:
        return next(part for part in self.parts if isinstance(part, Aggregator))

    @property
    def protections(self) -> tuple[Protection, ...]:
        return tuple(part for part in self.parts if isinstance(part, Protection))

    @property
    def opening(self) -> list[Protection]:
        """Those that change single replies on the server, the last of the clients' first."""
        return [part for part in reversed(self.protections) if overrides(part, "open")]

    @property
    def personal(self) -> bool:
        """Are models scored on the clients?"""
        return any(isinstance(part, Personal) or layout.keeps_some(part) for part in self.parts)

    def defining(self, hook: str) -> list[Part]:
        """The parts that define `hook`, in part order."""
        return [part for part in self.parts if overrides(part, hook)]

    def owner(self, hook: str) -> Part | None:
        """The one part that defines `hook`, for hooks that at most one part may define."""
        return next((part for part in self.parts if overrides(part, hook)), None)

    def is_personal(self, parameter: str) -> bool:
        """Does this parameter stay on the client?"""
        return layout.is_personal(self.parts, parameter)

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    def needs(self, what: str) -> bool:
        return any(what in part.needs() for part in self.parts)

    @cached_property
    def own_phases(self) -> tuple[Phase, ...]:
        """The parts' own phases, in part order, each with its owner."""
        return tuple(replace(phase, owner=part.name) for part in self.parts for phase in part.phases())

    def phases(self, when: When) -> tuple[Phase, ...]:
        """The parts' own phases before or after aggregation, in part order."""
        return tuple(phase for phase in self.own_phases if phase.when is when)

    def phases_by_name(self) -> dict[str, Phase]:
        """Everything a client may be asked to do."""
        own = {phase.name: phase for phase in self.own_phases}
        return {**own, TRAIN: self.train_phase(), EVALUATE: Phase(EVALUATE)}

    def scheduled_phases(self) -> tuple[Phase, ...]:
        """`train` and the parts' own phases, without the steps that an engine runs inside them."""
        return (self.train_phase(), *self.phases(When.BEFORE), *self.phases(When.AFTER))

    def train_phase(self) -> Phase:
        return Phase(TRAIN, owner=self.aggregator.name)

    def reducers(self, phase: Phase) -> dict[str, dict[str, Reducer]]:
        """{part: {reply key: reducer}} of a phase."""
        if phase.name == TRAIN:
            return {part.name: dict(part.reducers()) for part in self.parts}
        return {phase.owner: dict(phase.reduce)}

    def declared_numbers(self, phase: Phase, facts: Facts) -> int:
        """How many numbers the values of a reply declare to have."""
        reducers = [reducer for keys in self.reducers(phase).values() for reducer in keys.values()]
        return sum(reducer.numbers(facts) for reducer in reducers if reducer.numbers)

    def reveals(self) -> dict[str, list[str]]:
        """Phases whose replies the server sees one by one, with the parts that ask for it (no secure aggregation)."""
        seen = {
            phase.name: [p for p, keys in self.reducers(phase).items() if any(not r.secure for r in keys.values())]
            for phase in self.scheduled_phases()
        }
        if self.opening:
            seen[TRAIN] = [self.aggregator.name, *(part for part in seen[TRAIN] if part != self.aggregator.name)]
        return {phase: parts for phase, parts in seen.items() if parts}

    def fit_stream(self, stream: Stream) -> None:
        """Refuse a stream that hides what a part needs, on which clients change tasks at different rounds where a part
        needs them to do so together, or whose samples have no class where a part needs it."""
        if stream.stale != self.needs(STALE):
            raise CompositionError(
                f"method {self.name!r}, stream {stream.name!r}: replies that arrive in later rounds (stream.arrivals) "
                "and a part that weighs them belong together: set stream.arrivals, and put `+fedbuff` or `+fedasync` "
                "behind the method's name"
            )
        for part in self.parts:
            hidden = []
            if not stream.boundaries and needs_boundaries(part):
                hidden.append("when a task begins or ends")
            if not stream.task_ids and TASK_ID in part.needs():
                hidden.append("which task a client is in")
            if hidden:
                raise CompositionError(
                    f"method {self.name!r}: part {part.name!r} must know {' and '.join(hidden)}, "
                    f"but stream {stream.name!r} does not tell; choose another method or a stream with boundaries"
                )
            if stream.asynchronous and TOGETHER in part.needs():
                raise CompositionError(
                    f"method {self.name!r}: part {part.name!r} needs all clients to end a task in the same round, but "
                    f"on stream {stream.name!r} each does by its own clock; choose another method, or leave out "
                    "stream.asynchronous"
                )
            if stream.score != "accuracy" and CLASSES in part.needs():
                raise CompositionError(
                    f"method {self.name!r}: part {part.name!r} needs one class for every sample, but stream "
                    f"{stream.name!r}, scored by {stream.score}, has other targets; choose a method that works with "
                    "any loss: `everfed show METHOD` lists what a method needs"
                )


def needs_boundaries(part: Part) -> bool:
    """Must the part know when a task begins or ends, or does one of its phases show it?"""
    return BOUNDARIES in part.needs() or any(phase.needs_boundaries for phase in part.phases())


def _changeable(part: Part) -> dict[str, Any]:
    """The marks of what of a part can change: attributes in place, those of its class at all. A field with
    compare=False is its own affair (a test's list of what it saw)."""
    apart = {entry.name for entry in fields(part) if not entry.compare}
    of_class = [entry for kind in type(part).__mro__[: -len(Part.__mro__)] for entry in vars(kind).items()]
    plain = {name for name, value in of_class if name[:2] != "__" and not hasattr(value, "__get__")}
    names = {*plain, *(name for name, value in _lasting(part) if _mark(value) is not None)} - apart
    return {name: _marks(part, name) for name in names if _marks(part, name) != (None, "")}


def _marks(part: Part, name: str) -> tuple[Any, str]:
    """Of an attribute as it lies on the part or on its class, without the code of a property."""
    holders = (part, *type(part).__mro__)
    value = next((vars(holder)[name] for holder in holders if name in vars(holder)), None)
    return _mark(value), _plain(value)


def _mark(value: Any, depth: int = 4) -> Any:
    """What differs once the value was changed in place; None for one that cannot be, or lies too deep."""
    if depth == 0 or value is None or isinstance(value, str | bytes | int | float | type):
        return None
    if isinstance(value, Tensor):
        return value._version
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, nn.Module):
        return [tensor._version for tensor in value.state_dict(keep_vars=True).values()]
    if isinstance(value, tuple):
        marks = [_mark(inner, depth - 1) for inner in value]
        return marks if any(mark is not None for mark in marks) else None
    if isinstance(value, Mapping):
        inside: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, Sequence | Set | deque):
        inside = list(enumerate(value))
    elif callable(value) or not hasattr(value, "__dict__"):
        return None
    else:
        inside = _lasting(value)
    return [(key, _mark(inner, depth - 1), _plain(inner)) for key, inner in inside]


def _plain(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, str | bytes | int | float) else ""


def _lasting(value: Any) -> list[tuple[str, Any]]:
    """Attributes by name, without what is computed once and kept."""
    return [(k, v) for k, v in vars(value).items() if not isinstance(getattr(type(value), k, None), cached_property)]


def compose(*parts: Part, name: str = "", optimizer: Optimizer = SGD) -> Method:
    """A method from parts, in the order in which their hooks run. Raises CompositionError when they do not fit."""
    _check_names(parts)
    aggregators = [part.name for part in parts if isinstance(part, Aggregator)]
    if len(aggregators) != 1:
        raise CompositionError(f"exactly one part must own aggregation (such as FedAvg); got {aggregators or 'none'}")
    for hook in _ONE_OWNER:
        owners = [part.name for part in parts if overrides(part, hook)]
        if len(owners) > 1:
            raise CompositionError(f"only one part may define {hook}(); got {', '.join(owners)}")
    trainers = [part.name for part in parts if isinstance(part, TrainsPieces)]
    if len(trainers) > 1:
        raise CompositionError(f"only one part may train the model in pieces; got {', '.join(trainers)}")
    warnings: list[str] = []
    for part in parts:
        _check_hooks(part)
        _check_needs(part, parts)
        _check_phases(part)
        warnings.extend(part.check(parts, optimizer) or ())
    return Method(name or "+".join(part.name for part in parts), tuple(parts), tuple(warnings))


def _check_names(parts: tuple[Part, ...]) -> None:
    twice = [name for name, count in Counter(part.name for part in parts).items() if count > 1]
    if twice:
        raise CompositionError(f"parts appear more than once: {', '.join(twice)}")
    nameless = [type(part).__name__ for part in parts if not part.name or "/" in part.name]
    if nameless:
        raise CompositionError(f"parts need a name without '/': {', '.join(nameless)}")


def _check_needs(part: Part, parts: tuple[Part, ...]) -> None:
    present = {other.name for other in parts}
    before = {other.name for other in parts[: parts.index(part)]}
    for need in frozenset(part.needs()) - _NO_PARTS:
        if need in present - before:
            raise CompositionError(f"part {part.name!r} needs part {need!r} before it")
        if need not in present:
            raise CompositionError(f"part {part.name!r} needs part {need!r}; there are {', '.join(sorted(present))}")
    for other in parts:
        for problem in _conflicts(frozenset(part.needs()), other):
            raise CompositionError(f"part {part.name!r} {problem}")


def _conflicts(needs: Set[str], other: Part) -> Iterator[str]:
    """What another part does that SHARED, WHOLE or PLAIN rules out."""
    if SHARED in needs and layout.keeps_some(other):
        yield f"sends all parameters, but {other.name!r} keeps some personal"
    if WHOLE in needs and isinstance(other, TrainsPieces):
        yield f"follows all parameters; {other.name!r} trains some at a time"
    if PLAIN in needs and overrides(other, "forward"):
        yield f"compares features of the network itself; {other.name!r} changes its forward pass"


def _check_hooks(part: Part) -> None:
    """Refuse a misspelt hook: it would never be called."""
    kind: Any = type(part)  # mypy takes no class for hashable whose instances define equality
    for name, hook in _misspelt(kind):
        raise CompositionError(f"part {part.name!r} has a method {name!r}, which is no hook: {hook!r}?")


@cache
def _misspelt(part: type) -> tuple[tuple[str, str], ...]:
    """Methods of a class that are nearly called like a hook, with its name; kept, since comparing names is slow."""
    own = [
        name
        for cls in part.__mro__[: -len(Part.__mro__)]
        for name, value in vars(cls).items()
        if callable(value) and not name.startswith("_") and name not in HOOKS
    ]
    return tuple((name, hook) for name in own for hook in get_close_matches(name, HOOKS, n=1, cutoff=0.87))


def _check_phases(part: Part) -> None:
    phases = part.phases()
    if isinstance(phases, Phase):
        raise CompositionError(f"part {part.name!r}: phases() must return a tuple, (Phase(...),), not a Phase")
    for phase in phases:
        if phase.name in (TRAIN, EVALUATE) or (phase.cohort is Cohort.SERVER and (phase.reduce or phase.run)):
            raise CompositionError(f"part {part.name!r}: phase {phase.name!r} is not a legal phase of a part")
        if phase.cohort is not Cohort.SERVER and phase.run is None:
            raise CompositionError(f"part {part.name!r}: phase {phase.name!r} has clients, but no run=")
