"""How a phase is carried out on the server's side: training, a part's own phase on clients, the server's own work."""

from __future__ import annotations

import time

from everfed.core.context import Context
from everfed.core.divergence import check_work
from everfed.core.engine import Engine, Leading
from everfed.core.exchange import Exchange
from everfed.core.intake import Intake
from everfed.core.part import Part, Reduced, overrides
from everfed.core.phase import TRAIN, Cohort, Phase
from everfed.core.reduce import Reduction
from everfed.core.run_state import RunState
from everfed.core.telling import Teller
from everfed.core.tree import Tree
from everfed.core.world import Moment, World


class Conductor:
    """Carries phases out: asks the clients, then lets the parts change the server's state."""

    def __init__(self, world: World, engine: Engine, exchange: Exchange, teller: Teller, state: RunState) -> None:
        self.world, self.engine, self.exchange = world, engine, exchange
        self.teller, self.state = teller, state

    def run(self, phase: Phase, moment: Moment) -> bool:
        """One repeat of a phase; True when the phase is finished."""
        if phase.name == TRAIN:
            self._train(phase, moment)
            return True
        return self._work(phase, moment) if phase.cohort is Cohort.SERVER else self._ask(phase, moment)

    # the kinds of phases -----------------------------------------------------------------------------------------
    def _train(self, phase: Phase, moment: Moment) -> None:
        reduced = self._gather(phase, moment)
        if (moment.round + 1) % self.world.options.sync_every:
            return
        method, ctx = self.world.method, self.world.server(TRAIN, moment)
        self._measure(moment, reduced, ctx)
        model = method.aggregator.aggregate(self.state.server, reduced[method.aggregator.name], ctx)
        for part in method.parts:
            model = part.transform(self.state.server, model, ctx)
        self.state.set_model(model)
        for part in method.parts:
            self.state.set_slots(part.name, part.update(self.state.server, TRAIN, reduced.get(part.name, {}), ctx))

    def _ask(self, phase: Phase, moment: Moment) -> bool:
        ctx = self.world.server(phase.name, moment)
        reduced = self._gather(phase, moment).get(phase.owner, {})
        self._measure(moment, {phase.owner: reduced}, ctx)
        return self._update(phase, moment, reduced, ctx)

    def _work(self, phase: Phase, moment: Moment) -> bool:
        """The server's own work, told when it is done."""
        started = time.monotonic()
        ctx = self.world.server(phase.name, moment, self.engine.workbench())
        finished = self._update(phase, moment, {}, ctx)
        measured = self._measure(moment, {phase.owner: {}}, ctx)
        self.teller.phase(phase, moment, Intake({}), 0, started)
        check_work(phase, moment, measured)
        return finished

    # their pieces ------------------------------------------------------------------------------------------------
    def _gather(self, phase: Phase, moment: Moment) -> Reduced:
        """Ask, wait, reduce in client order, and tell."""
        message = self.exchange.message(phase, moment)
        started = time.monotonic()
        intake = Intake(self.world.method.reducers(phase))
        down = self.exchange.take_in(intake, phase, moment, message)
        self.state.samples += sum(one.samples for one in intake.trained) * self.world.options.local_epochs
        self.teller.phase(phase, moment, intake, down, started)
        return self._release(phase, moment, intake.reduction)

    def _release(self, phase: Phase, moment: Moment, reduction: Reduction) -> Reduced:
        """What was reduced, after the parts that protect it."""
        reduced, weights = reduction.result(), reduction.weights()
        ctx = self.world.server(phase.name, moment)
        for part in self.world.method.parts:
            if overrides(part, "release"):
                slots, reduced = part.release(self.state.server, phase, reduced, weights, ctx)
                self.state.set_slots(part.name, slots)
                if part.name not in reduced:  # it is asked with the others where it has a say
                    self._measure(moment, {part.name: {}}, ctx)
        return reduced

    def _update(self, phase: Phase, moment: Moment, reduced: Tree, ctx: Context) -> bool:
        """What the phase's part learns of it; True when the phase is finished."""
        part = self.world.method.part(phase.owner)

        def work() -> Tree:
            return part.update(self.state.server, phase.name, reduced, ctx)

        if phase.cohort is Cohort.SERVER and isinstance(self.engine, Leading):
            slots = self.engine.once(work)
        else:
            slots = work()
        self.state.set_slots(phase.owner, slots)
        self._revise(part, ctx)
        return moment.repeat + 1 >= phase.repeat or part.done(self.state.server, phase.name, ctx)

    def _revise(self, part: Part, ctx: Context) -> None:
        model = part.revise(self.state.server, ctx.phase, self.state.model, ctx)
        if model is not self.state.model:
            self.state.set_model(model)

    def _measure(self, moment: Moment, reduced: Reduced, ctx: Context) -> dict[str, float]:
        """Tell what the parts measure."""
        told: dict[str, float] = {}
        for name, replies in reduced.items():
            values = self.world.method.part(name).measure(self.state.server, replies, ctx)
            if values:
                self.teller.measured(moment, ctx.phase, name, values)
                told |= values
        return told
