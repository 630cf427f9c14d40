"""The only round loop.

A round is a list of phases: those before aggregation, `train`, those after, evaluation. After every phase the run is in
a state that can be saved, so a run resumes in the middle of a round, and of a long phase of the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from everfed.core.context import Moment, World
from everfed.core.engine import Engine
from everfed.core.evaluation import EvalOptions, Evaluation, scored_on_clients
from everfed.core.events import Diverged, Event, Monitor, Reporter
from everfed.core.message import MODEL
from everfed.core.part import Model, State
from everfed.core.phase import EVALUATE, Cohort, Phase, Position
from everfed.core.phase_runner import Exchange, PhaseRunner
from everfed.core.run_state import RunState
from everfed.core.stream import RoundPlan


class Runner:
    """Drives a world through an engine, from a state to the stream's end."""

    def __init__(
        self,
        world: World,
        engine: Engine,
        model: Model,
        evaluation: EvalOptions,
        notify: Callable[[Event], None] = lambda event: None,
        save: Callable[[RunState, bool], None] = lambda state, task_end: None,
        state: RunState | None = None,
        monitors: Sequence[Monitor] = (),
    ) -> None:
        self.world, self.engine, self.save = world, engine, save
        self.state = state or RunState(_first_server_state(world, model))
        reporter = Reporter(notify, monitors, world.method.parts, self.state)
        self.exchange = Exchange(world, engine, self.state)
        self.phases = PhaseRunner(world, engine, self.exchange, reporter, self.state)
        self.evaluation = Evaluation(world, engine, self.exchange, reporter, self.state, evaluation)

    def run(self) -> RunState:
        """To the end of the stream; `save` is offered the state after every phase."""
        if self.state.place == (0, 0, 0, 0):
            self.evaluation.score_initial()
        while self.state.round < self.world.stream.rounds:
            self.round()
        return self.state

    def round(self) -> None:
        """The rest of the current round."""
        state, plan = self.state, plan_of(self.world, self.state.round)
        phases = list(phases_of(self.world, self.evaluation.options, state.round, plan))
        while state.position < len(phases):
            started = time.monotonic()
            moment = Moment(state.round, plan, state.repeat, state.position)
            self.exchange.batch(phases, moment)
            finished = self._phase(phases[state.position], moment)
            state.seconds += time.monotonic() - started
            last = finished and state.position + 1 == len(phases)
            state.repeat = 0 if finished else state.repeat + 1
            state.position += finished
            if last:
                state.round, state.position = state.round + 1, 0
            self.save(state, last and plan.evaluate)
            if last:
                return

    def _phase(self, phase: Phase, moment: Moment) -> bool:
        """One repeat of a phase; True when the phase is finished."""
        if phase.name == EVALUATE:
            self.evaluation.run(phase, moment)
            return True
        return self.phases.run(phase, moment)


def plan_of(world: World, index: int) -> RoundPlan:
    """The stream's plan; between synchronisations the participants stay those of the last synchronised round."""
    plan = world.stream.round(index)
    block = index - index % world.options.sync_every
    if block == index:
        return plan
    return replace(plan, participants=world.stream.round(block).participants, notes={})


def phases_of(world: World, evaluation: EvalOptions, index: int, plan: RoundPlan) -> Iterator[Phase]:
    """The phases of a round: those before aggregation, `train`, those after, evaluation."""
    every, rounds = world.options.sync_every, world.facts.rounds

    def due(position: Position) -> Iterator[Phase]:
        return (phase for phase in world.method.phases(position) if phase.due(index, plan, rounds))

    if index % every == 0:
        yield from due(Position.BEFORE)
    yield world.method.train_phase()
    if (index + 1) % every == 0:
        yield from due(Position.AFTER)
        if plan.evaluate or (evaluation.every and (index + 1) % evaluation.every == 0):
            yield Phase(EVALUATE, cohort=Cohort.ALL if scored_on_clients(world) else Cohort.SERVER)


def _first_server_state(world: World, model: Model) -> State:
    ctx = world.server("init")
    slots = {part.name: part.server_slots(ctx) for part in world.method.parts}
    return {MODEL: dict(model), **{name: tree for name, tree in slots.items() if tree}}


__all__ = ["Diverged", "EvalOptions", "Event", "RunState", "Runner"]
