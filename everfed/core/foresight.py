"""Phases that need nothing from each other may be asked of a client together, which spares a real one a round trip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from everfed.core.message import Message
from everfed.core.method import Method
from everfed.core.part import overrides
from everfed.core.phase import EVALUATE, TRAIN, Cohort, Phase
from everfed.core.stream import RoundPlan
from everfed.core.world import Moment


@dataclass(frozen=True)
class Ahead:
    """A phase that will follow, with the message it will have whatever comes before."""

    phase: Phase
    message: Message | None
    moment: Moment


@runtime_checkable
class Foresees(Protocol):
    """An engine that asks clients for several phases at once where it can."""

    def expect(self, ahead: Sequence[Ahead]) -> None:
        """These follow the next exchange, with the same clients; each still has an exchange of its own."""


def companions(method: Method, agenda: Sequence[Phase], position: int, plan: RoundPlan) -> list[int]:
    """The positions right after `position` that can be asked together with it: same clients, and a message that does
    not hang on what comes in before. A silent phase has no message; and a phase without replies, whose part changes
    nothing on the server, teaches the server nothing."""
    found: list[int] = []
    free = _teaches_nothing(method, agenda[position])
    for index in range(position + 1, len(agenda)):
        follows = agenda[index]
        if not _can_follow(method, agenda[index - 1], follows, plan) or not (free or _is_silent(method, follows)):
            return found
        found.append(index)
        free = free and _teaches_nothing(method, follows)
    return found


def _can_follow(method: Method, before: Phase, phase: Phase, plan: RoundPlan) -> bool:
    """Both once, on the same clients; scoring is left alone."""
    alone = {before.name, phase.name} & {EVALUATE} or Cohort.SERVER in (before.cohort, phase.cohort)
    return not alone and before.repeat == phase.repeat == 1 and before.clients(plan) == phase.clients(plan) != ()


def _is_silent(method: Method, phase: Phase) -> bool:
    return phase.name != TRAIN and phase.name in method.part(phase.owner).silent


def _teaches_nothing(method: Method, phase: Phase) -> bool:
    if phase.name in (TRAIN, EVALUATE) or phase.reduce:
        return False
    return not any(overrides(method.part(phase.owner), hook) for hook in ("update", "revise"))
