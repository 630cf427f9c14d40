"""compose(*parts): a method, checked before anything runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from everfed.core.optimizer import Optimizer
from everfed.core.part import BOUNDARIES, HELD_OUT, HISTORY, TASK_ID, TOGETHER, CompositionError, Part, overrides
from everfed.core.phase import EVALUATE, TRAIN, Cohort, Phase, Position
from everfed.core.reduce import Reducer
from everfed.core.stream import Stream

PERSONAL = "extras.personal/"  # where personal extra parameters are registered on a module
_ONE_OWNER = ("objective", "forward")
SGD = Optimizer()
_STREAM_NEEDS = frozenset({BOUNDARIES, TASK_ID, HISTORY, HELD_OUT, TOGETHER})


@dataclass(frozen=True)
class Method:
    """Parts in order. Build one with `compose`."""

    name: str
    parts: tuple[Part, ...]
    warnings: tuple[str, ...] = ()

    @property
    def aggregator(self) -> Part:
        return next(part for part in self.parts if part.aggregates)

    @property
    def personal(self) -> bool:
        """Are models scored on the clients?"""
        return any(part.personal for part in self.parts)

    def owner(self, hook: str) -> Part | None:
        """The one part that defines `hook`, for hooks that at most one part may define."""
        return next((part for part in self.parts if overrides(part, hook)), None)

    def is_personal(self, parameter: str) -> bool:
        """Does this parameter stay on the client?"""
        return parameter.startswith(PERSONAL) or any(part.is_personal(parameter) for part in self.parts)

    def part(self, name: str) -> Part:
        return next(part for part in self.parts if part.name == name)

    def needs(self, what: str) -> bool:
        return any(what in part.needs for part in self.parts)

    def phases(self, position: Position) -> tuple[Phase, ...]:
        """The parts' own phases at `position`, in part order."""
        return tuple(phase for part in self.parts for phase in part.phases() if phase.position is position)

    def phases_by_name(self) -> dict[str, Phase]:
        """Everything a client may be asked to do."""
        own = {phase.name: phase for position in Position for phase in self.phases(position)}
        return {**own, TRAIN: self.train_phase(), EVALUATE: Phase(EVALUATE)}

    def train_phase(self) -> Phase:
        return Phase(TRAIN, owner=self.aggregator.name)

    def reducers(self, phase: Phase) -> dict[str, dict[str, Reducer]]:
        """{part: {reply key: reducer}} of a phase."""
        if phase.name == TRAIN:
            return {part.name: dict(part.reducers()) for part in self.parts}
        return {phase.owner: dict(phase.reduce)}

    def reveals(self) -> dict[str, list[str]]:
        """Phases whose replies the server sees one by one, with the parts that ask for it (no secure aggregation)."""
        phases = [self.train_phase(), *self.phases(Position.BEFORE), *self.phases(Position.AFTER)]
        seen = {
            phase.name: [p for p, keys in self.reducers(phase).items() if any(not r.secure for r in keys.values())]
            for phase in phases
        }
        return {phase: parts for phase, parts in seen.items() if parts}

    def fit_stream(self, stream: Stream) -> None:
        """Refuse a stream that hides what a part needs, or on which clients change tasks at different rounds where a
        part needs them to do so together."""
        for part in self.parts:
            hidden = []
            if not stream.boundaries and (
                BOUNDARIES in part.needs or any(phase.needs_boundaries for phase in part.phases())
            ):
                hidden.append("when a task begins or ends")
            if not stream.task_ids and TASK_ID in part.needs:
                hidden.append("which task a client is in")
            if hidden:
                raise CompositionError(
                    f"method {self.name!r}: part {part.name!r} must know {' and '.join(hidden)}, "
                    f"but stream {stream.name!r} does not tell; choose another method or a stream with boundaries"
                )
            if getattr(stream, "asynchronous", False) and TOGETHER in part.needs:
                raise CompositionError(
                    f"method {self.name!r}: part {part.name!r} needs all clients to end a task in the same round, but "
                    f"on stream {stream.name!r} each does by its own clock; choose another method, or leave out "
                    "stream.asynchronous"
                )


def compose(*parts: Part, name: str = "", optimizer: Optimizer = SGD) -> Method:
    """A method from parts, in the order in which their hooks run. Raises CompositionError when they do not fit."""
    _check_names(parts)
    aggregators = [part.name for part in parts if part.aggregates]
    if len(aggregators) != 1:
        raise CompositionError(f"exactly one part must own aggregation (such as FedAvg); got {aggregators or 'none'}")
    for hook in _ONE_OWNER:
        owners = [part.name for part in parts if overrides(part, hook)]
        if len(owners) > 1:
            raise CompositionError(f"only one part may define {hook}(); got {', '.join(owners)}")
    warnings: list[str] = []
    for part in parts:
        _check_needs(part, parts)
        _check_phases(part)
        warnings.extend(part.check(parts, optimizer))
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
    for need in part.needs - _STREAM_NEEDS:
        if need in present - before:
            raise CompositionError(f"part {part.name!r} needs part {need!r} before it")
        if need not in present:
            raise CompositionError(f"part {part.name!r} needs part {need!r}; there are {', '.join(sorted(present))}")


def _check_phases(part: Part) -> None:
    for phase in part.phases():
        if phase.owner != part.name:
            raise CompositionError(f"phase {phase.name!r} of part {part.name!r} must name it as its owner")
        if phase.name in (TRAIN, EVALUATE) or (phase.cohort is Cohort.SERVER and phase.reduce):
            raise CompositionError(f"part {part.name!r}: phase {phase.name!r} is not a legal phase of a part")
