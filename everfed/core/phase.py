"""The round protocol as data: which clients do what, when, and how their replies become one.

A round is an agenda of phases. `train` is one of them; parts add their own. Because `reduce` is data, so is what a
method reveals: a phase reduced by mean or sum can run under secure aggregation, one that collects cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from everfed.core.reduce import Reducer
from everfed.core.stream import RoundPlan


class Cohort(Enum):
    """Who takes part in a phase."""

    SAMPLED = "sampled"  # this round's participants
    ALL = "all"  # every client that has a task
    BOUNDARY = "boundary"  # the clients whose task begins or ends with this round
    SERVER = "server"  # no client


class Position(Enum):
    """Before or after this round's aggregation, or inside another phase: no phase of the agenda, but a step of how an
    engine carries one out (the rounds of secure aggregation)."""

    BEFORE = "before"
    AFTER = "after"
    INSIDE = "inside"


@dataclass(frozen=True)
class When:
    """In which rounds a phase runs."""

    kind: str
    every: int = 1
    offset: int = 0

    @property
    def needs_boundaries(self) -> bool:
        return self.kind in ("begin", "end")


ALWAYS = When("every")
FIRST = When("first")
BEGIN = When("begin")
END = When("end")


def every(rounds: int, offset: int = 0) -> When:
    """Every `rounds`-th round, starting with round `offset`."""
    if rounds < 1 or not 0 <= offset < rounds:
        raise ValueError(f"every(k, offset) needs k >= 1 and 0 <= offset < k; got {rounds}, {offset}")
    return When("every", rounds, offset)


@dataclass(frozen=True)
class Phase:
    """One exchange between the server and a cohort, or a piece of server work.

    owner: the part whose `run` serves it. reduce: reply key -> reducer. repeat: how many times it runs in a row (a
    checkpoint may fall between two repeats); `Part.done` may end it earlier.
    """

    name: str
    owner: str = ""
    cohort: Cohort = Cohort.SAMPLED
    when: When = ALWAYS
    position: Position = Position.AFTER
    reduce: Mapping[str, Reducer] = field(default_factory=dict)
    repeat: int = 1

    @property
    def needs_boundaries(self) -> bool:
        """Does it tell somebody when a task begins or ends?"""
        return self.when.needs_boundaries or self.cohort is Cohort.BOUNDARY

    def due(self, index: int, plan: RoundPlan) -> bool:
        """Does it run in this round? Tasks begin and end for the clients concerned (BOUNDARY), or for the server."""
        when = self.when
        if when.kind == "first":
            return index == 0
        if when.kind == "begin":
            return bool(plan.begins) if self.cohort is Cohort.BOUNDARY else plan.task_opens
        if when.kind == "end":
            return bool(plan.ends) if self.cohort is Cohort.BOUNDARY else plan.task_closes
        return index % when.every == when.offset

    def clients(self, plan: RoundPlan) -> tuple[int, ...]:
        if self.cohort is Cohort.SERVER:
            return ()
        if self.cohort is Cohort.SAMPLED:
            return plan.participants
        if self.cohort is Cohort.ALL:
            return tuple(sorted(plan.tasks))
        moving = plan.begins if self.when.kind == "begin" else plan.ends
        return tuple(sorted(moving))


TRAIN = "train"
EVALUATE = "evaluate"
