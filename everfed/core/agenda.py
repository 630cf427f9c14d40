"""Which phases a round has, in their order, and who takes part in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from everfed.core.evaluation import EvalOptions, scored_on_clients
from everfed.core.phase import EVALUATE, Cohort, Phase, Position
from everfed.core.stream import RoundPlan
from everfed.core.world import Moment, World


def plan_of(world: World, index: int) -> RoundPlan:
    """The stream's plan; between synchronisations the participants stay those of the last synchronised round."""
    plan = world.stream.round(index)
    block = index - index % world.options.sync_every
    if block == index:
        return plan
    return replace(plan, participants=world.stream.round(block).participants, notes={})


def agenda(world: World, evaluation: EvalOptions, index: int, plan: RoundPlan) -> Iterator[Phase]:
    """The phases before aggregation, `train`, those after, evaluation."""
    every = world.options.sync_every
    if index % every == 0:
        yield from _due(world, Position.BEFORE, index, plan)
    yield world.method.train_phase()
    if (index + 1) % every == 0:
        yield from _due(world, Position.AFTER, index, plan)
        if plan.evaluate or (evaluation.every and (index + 1) % evaluation.every == 0):
            yield Phase(EVALUATE, cohort=Cohort.ALL if scored_on_clients(world) else Cohort.SERVER)


def _due(world: World, position: Position, index: int, plan: RoundPlan) -> Iterator[Phase]:
    """The parts' phases of this round, less those that their parts do not want."""
    method = world.method
    for phase in method.phases(position):
        ctx = world.server(phase.name, Moment(index, plan))
        if phase.due(index, plan) and method.part(phase.owner).wanted(phase.name, ctx):
            yield phase
