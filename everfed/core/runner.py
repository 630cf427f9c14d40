"""The only round loop.

A round is a list of phases: those before aggregation, `train`, those after, evaluation. After every phase the run is in
a state that can be saved, so a run resumes in the middle of a round, and of a long phase of the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from everfed.core.context import Moment, Setup
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
    """Drives a run through an engine, from a state to the stream's end."""

    def __init__(
        self,
        setup: Setup,
        engine: Engine,
        model: Model,
        evaluation: EvalOptions,
        notify: Callable[[Event], None] = lambda event: None,
        save: Callable[[RunState, bool], None] = lambda state, task_end: None,
        state: RunState | None = None,
        monitors: Sequence[Monitor] = (),
    ) -> None:
        self.setup, self.engine, self.save = setup, engine, save
        self.state = state or RunState(_first_server_state(setup, model))
        reporter = Reporter(notify, monitors, setup.method.parts, self.state)
        self.exchange = Exchange(setup, engine, self.state)
        self.phases = PhaseRunner(setup, engine, self.exchange, reporter, self.state)
        self.evaluation = Evaluation(setup, engine, self.exchange, reporter, self.state, evaluation)

    def run(self) -> RunState:
        """To the end of the stream; `save` is offered the state after every phase."""
        if self.state.place == (0, 0, 0, 0):
            self.evaluation.score_initial()
        while self.state.round < self.setup.stream.rounds:
            self.round()
        return self.state

    def round(self) -> None:
        """The rest of the current round."""
        state, plan = self.state, plan_of(self.setup, self.state.round)
        phases = list(phases_of(self.setup, self.evaluation.options, state.round, plan))
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


def plan_of(setup: Setup, index: int) -> RoundPlan:
    """The stream's plan; between synchronisations the participants stay those of the last synchronised round."""
    plan = setup.stream.round(index)
    block = index - index % setup.options.sync_every
    if block == index:
        return plan
    return replace(plan, participants=setup.stream.round(block).participants, notes={})


def phases_of(setup: Setup, evaluation: EvalOptions, index: int, plan: RoundPlan) -> Iterator[Phase]:
    """The phases of a round: those before aggregation, `train`, those after, evaluation."""
    every, rounds = setup.options.sync_every, setup.facts.rounds

    def due(position: Position) -> Iterator[Phase]:
        return (phase for phase in setup.method.phases(position) if phase.due(index, plan, rounds))

    if index % every == 0:
        yield from due(Position.BEFORE)
    yield setup.method.train_phase()
    if (index + 1) % every == 0:
        yield from due(Position.AFTER)
        if plan.evaluate or (evaluation.every and (index + 1) % evaluation.every == 0):
            yield Phase(EVALUATE, cohort=Cohort.ALL if scored_on_clients(setup) else Cohort.SERVER)


def _first_server_state(setup: Setup, model: Model) -> State:
    ctx = setup.server("init")
    slots = {part.name: part.server_slots(ctx) for part in setup.method.parts}
    return {MODEL: dict(model), **{name: tree for name, tree in slots.items() if tree}}


__all__ = ["Diverged", "EvalOptions", "Event", "RunState", "Runner"]
