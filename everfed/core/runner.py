"""The only round loop.

A round is an agenda of phases: those before aggregation, `train`, those after, evaluation. After every phase the run is
in a state that can be saved, so a run resumes in the middle of a round, and of a long phase of the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from everfed.core.agenda import agenda, plan_of
from everfed.core.conduct import Conductor
from everfed.core.divergence import Diverged
from everfed.core.engine import Engine
from everfed.core.evaluation import EvalOptions, Evaluation
from everfed.core.exchange import Exchange
from everfed.core.message import MODEL
from everfed.core.part import Model, State
from everfed.core.phase import EVALUATE, Phase
from everfed.core.run_state import RunState
from everfed.core.telling import Event, Teller
from everfed.core.watch import Watcher
from everfed.core.world import Moment, World


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
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self.world, self.engine, self.save = world, engine, save
        self.state = state or RunState(_first_server_state(world, model))
        teller = Teller(notify, watchers, world.method.parts, self.state)
        self.exchange = Exchange(world, engine, self.state)
        self.conductor = Conductor(world, engine, self.exchange, teller, self.state)
        self.evaluation = Evaluation(world, engine, self.exchange, teller, self.state, evaluation)

    def run(self) -> RunState:
        """To the end of the stream; `save` is offered the state after every phase."""
        while self.state.round < self.world.stream.rounds:
            self.round()
        return self.state

    def round(self) -> None:
        """The rest of the current round."""
        state, plan = self.state, plan_of(self.world, self.state.round)
        phases = list(agenda(self.world, self.evaluation.options, state.round, plan))
        while state.position < len(phases):
            started = time.monotonic()
            moment = Moment(state.round, plan, state.repeat, state.position)
            self.exchange.foresee(phases, moment)
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
        return self.conductor.run(phase, moment)


def _first_server_state(world: World, model: Model) -> State:
    ctx = world.server("init")
    slots = {part.name: part.server_slots(ctx) for part in world.method.parts}
    return {MODEL: dict(model), **{name: tree for name, tree in slots.items() if tree}}


__all__ = ["Diverged", "EvalOptions", "Event", "RunState", "Runner"]
