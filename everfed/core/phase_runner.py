"""What the server does in a phase: send messages, collect and reduce replies, update its state."""

from __future__ import annotations

import time
from collections.abc import Sequence

from everfed.core.context import Context, Moment, Setup
from everfed.core.engine import Engine, PhaseCall, Replies
from everfed.core.events import Reporter, check_finite
from everfed.core.message import MODEL, Message, Once, addressed, payload_bytes, versions
from everfed.core.part import Model, Reduced, with_slots
from everfed.core.phase import EVALUATE, TRAIN, Cohort, Phase
from everfed.core.pieces import PIECES, TrainsPieces, cut, pasted
from everfed.core.reduce import Reduction
from everfed.core.run_state import RunState
from everfed.core.stream import RoundPlan
from everfed.core.tree import Tree


class Exchange:
    """Messages to an engine's clients and replies from them, with the traffic they make."""

    def __init__(self, setup: Setup, engine: Engine, state: RunState) -> None:
        self.setup, self.engine, self.state = setup, engine, state

    # what is sent ------------------------------------------------------------------------------------------------
    def message(self, phase: Phase, moment: Moment) -> Message | None:
        """The model and what the parts broadcast; empty where a phase sends nothing; None for training between
        synchronisations."""
        ctx = self.setup.server(phase.name, moment)
        if phase.name == TRAIN:
            if moment.round % self.setup.options.sync_every != 0:
                return None
            broadcasts = {part.name: part.broadcast(self.state.server, ctx) for part in self.setup.method.parts}
        elif not phase.sends:
            return {}
        else:
            broadcasts = {phase.owner: phase.broadcast(self.state.server, ctx) if phase.broadcast else {}}
        return {**self.model(phase, moment), **{part: values for part, values in broadcasts.items() if values}}

    def model(self, phase: Phase, moment: Moment) -> Message:
        """Each version reaches a client once; local statistics are sent at the beginning only."""
        message: Message = {MODEL: {k: Once(self.state.version, v) for k, v in self.state.model.items()}}
        if self.setup.options.batchnorm == "local":
            message[MODEL] |= {k: Once(0, self.state.model[k]) for k in ("stats", "counters")}
        pieces = self.setup.pieces
        if pieces is None:
            return message
        return pieces.split(message, self.state.pieces, self.state.server, self.setup.server(phase.name, moment))

    def batch(self, phases: Sequence[Phase], moment: Moment) -> None:
        """Name the phases that an engine may send together with the next one."""
        if not self.engine.batches_phases:
            return
        calls = []
        for position in batchable(phases, moment.position, moment.plan):
            phase, then = phases[position], Moment(moment.round, moment.plan, 0, position)
            calls.append(PhaseCall(phase, self.message(phase, then), then))
        self.engine.batch(calls)

    # what comes back ---------------------------------------------------------------------------------------------
    def collect(self, replies: Replies, phase: Phase, moment: Moment, message: Message | None) -> int:
        """Run a phase on its clients and add their replies in client order; returns the bytes sent to them."""
        clients = phase.clients(moment.plan)
        if not clients:
            return 0
        down = self._count_down(clients, message)
        for client, reply in self.engine.exchange(phase, clients, message, moment):
            replies.add(client, reply)
        self.engine.merge(replies)
        self.state.traffic.up.update(replies.traffic.up)
        self.state.traffic.down.update(replies.traffic.down)  # what the engine sent beside the message
        self.state.absent.update(one.kind for one in replies.absent.values())
        return down + sum(replies.traffic.down.values())

    def _count_down(self, clients: tuple[int, ...], message: Message | None) -> int:
        if message is None:
            return 0
        name, new, down = self.setup.method.aggregator.name, versions(message), 0
        for client in clients:
            sizes = payload_bytes(addressed(message, client), self.state.held.get(client, {}))
            sizes[name] = sizes.get(name, 0) + sizes.pop(MODEL, 0) + sizes.pop(PIECES, 0)
            self.state.traffic.sent(sizes)
            self.state.held[client] = self.state.held.get(client, {}) | new
            down += sum(sizes.values())
        return down


class PhaseRunner:
    """Runs phases: `train`, a part's phase on clients, a part's phase on the server."""

    def __init__(self, setup: Setup, engine: Engine, exchange: Exchange, reporter: Reporter, state: RunState) -> None:
        self.setup, self.engine, self.exchange = setup, engine, exchange
        self.reporter, self.state = reporter, state

    def run(self, phase: Phase, moment: Moment) -> bool:
        """One repeat of a phase; True when the phase is finished."""
        if phase.name == TRAIN:
            self._train(phase, moment)
            return True
        if phase.cohort is Cohort.SERVER:
            return self._on_server(phase, moment)
        ctx = self.setup.server(phase.name, moment)
        reduced = self._collect(phase, moment).get(phase.owner, {})
        self._measure(phase, moment, reduced, ctx)
        return self._update(phase, moment, reduced, ctx)

    def _train(self, phase: Phase, moment: Moment) -> None:
        reduced = self._collect(phase, moment)
        if (moment.round + 1) % self.setup.options.sync_every:
            return
        method, ctx = self.setup.method, self.setup.server(TRAIN, moment)
        for part in method.parts:
            self._report(moment, TRAIN, part.name, part.measure(self.state.server, reduced.get(part.name, {}), ctx))
        model = self._aggregate(reduced[method.aggregator.name], ctx)
        for part in method.parts:
            slots, updated = part.update_model(self.state.server, model, ctx)
            self.state.set_slots(part.name, slots)
            model = self._only_trained(updated, ctx)
        self._set_model(model)
        for part in method.parts:
            self.state.set_slots(part.name, part.update(self.state.server, reduced.get(part.name, {}), ctx))

    def _aggregate(self, reduced: Tree, ctx: Context) -> Model:
        """The new shared model. Of one in pieces, the aggregating part reduces what was trained, as a smaller model."""
        aggregator, server, pieces = self.setup.method.aggregator, self.state.server, self.setup.pieces
        if pieces is None or isinstance(aggregator, TrainsPieces):
            return aggregator.aggregate(server, reduced, ctx)
        old, spans = server[MODEL], pieces.moving(server, ctx)
        short = aggregator.aggregate({**server, MODEL: {**old, "params": cut(old["params"], spans)}}, reduced, ctx)
        return {**short, "params": pasted(old["params"], spans, short["params"])}

    def _only_trained(self, model: Model, ctx: Context) -> Model:
        """The model without what a rule (server momentum, say) changed outside the trained pieces."""
        pieces, server = self.setup.pieces, self.state.server
        if pieces is None:
            return model
        spans = pieces.moving(server, ctx)
        return {**model, "params": pasted(server[MODEL]["params"], spans, cut(model["params"], spans))}

    def _set_model(self, model: Model) -> None:
        """A new model; its pieces that differ from the old one's have new versions."""
        old = self.state.model
        self.state.set_model(model)
        if self.setup.pieces is not None:
            changed = self.setup.pieces.changed(old, model)
            self.state.pieces = {**self.state.pieces, **dict.fromkeys(changed, self.state.version)}

    def _on_server(self, phase: Phase, moment: Moment) -> bool:
        """The server's own work; it is measured and reported when it is done."""
        started = time.monotonic()
        ctx = self.setup.server(phase.name, moment, self.engine.workbench())
        finished = self._update(phase, moment, {}, ctx)
        measured = self._measure(phase, moment, {}, ctx)
        self.reporter.phase(phase, moment, Replies({}), 0, started)
        check_finite(phase, moment, measured)
        return finished

    def _collect(self, phase: Phase, moment: Moment) -> Reduced:
        """Send, wait, reduce in client order, report, protect."""
        message = self.exchange.message(phase, moment)
        started = time.monotonic()
        replies = Replies(self.setup.method.reducers(phase))
        down = self.exchange.collect(replies, phase, moment, message)
        self.state.samples += sum(one.samples for one in replies.trained) * self.setup.options.local_epochs
        self.reporter.phase(phase, moment, replies, down, started)
        return self._release(phase, moment, replies.reduction)

    def _release(self, phase: Phase, moment: Moment, reduction: Reduction) -> Reduced:
        """What was reduced, as the protections let the parts read it."""
        reduced, weights = reduction.result(), reduction.weights()
        ctx = self.setup.server(phase.name, moment)
        for part in self.setup.method.protections:
            slots, reduced = part.release(self.state.server, phase, reduced, weights, ctx)
            self.state.set_slots(part.name, slots)
            if part.name not in reduced:  # in `train` it is measured with the other parts
                self._report(moment, phase.name, part.name, part.measure(self.state.server, {}, ctx))
        return reduced

    def _update(self, phase: Phase, moment: Moment, reduced: Tree, ctx: Context) -> bool:
        """The functions of the phase that change the server's state; True when the phase is finished."""

        def work() -> Tree:
            return _worked(phase, self.state, reduced, ctx)

        changed = self.engine.once(work) if phase.cohort is Cohort.SERVER else work()
        self.state.set_slots(phase.owner, changed["slots"])
        if changed["model"] is not None:
            self._set_model(changed["model"])
        return moment.repeat + 1 >= phase.repeat or (phase.done is not None and phase.done(self.state.server, ctx))

    def _measure(self, phase: Phase, moment: Moment, reduced: Tree, ctx: Context) -> dict[str, float]:
        values = phase.measure(self.state.server, reduced, ctx) if phase.measure else {}
        self._report(moment, phase.name, phase.owner, values)
        return values

    def _report(self, moment: Moment, phase: str, part: str, values: dict[str, float]) -> None:
        if values:
            self.reporter.measured(moment, phase, part, values)


def _worked(phase: Phase, state: RunState, reduced: Tree, ctx: Context) -> Tree:
    """{slots, model} after a part's phase; None where one is unchanged."""
    slots = phase.update(state.server, reduced, ctx) if phase.update else None
    if phase.update_model is None:
        return {"slots": slots, "model": None}
    changed, model = phase.update_model(with_slots(state.server, phase.owner, slots), state.model, ctx)
    return {"slots": slots if changed is None else changed, "model": None if model is state.model else model}


def batchable(phases: Sequence[Phase], position: int, plan: RoundPlan) -> list[int]:
    """The positions right after `position` whose phases can be sent together with it: same clients, and a message that
    does not depend on the replies before it. That holds for a phase that sends nothing, and for any phase while those
    before it leave the server's state unchanged."""
    found: list[int] = []
    unchanged = _leaves_server_unchanged(phases[position])
    for index in range(position + 1, len(phases)):
        before, phase = phases[index - 1], phases[index]
        if not _same_clients(before, phase, plan) or not (unchanged or not phase.sends):
            return found
        found.append(index)
        unchanged = unchanged and _leaves_server_unchanged(phase)
    return found


def _same_clients(before: Phase, phase: Phase, plan: RoundPlan) -> bool:
    """True if both run once, on the same clients, and neither is an evaluation."""
    if EVALUATE in (before.name, phase.name) or Cohort.SERVER in (before.cohort, phase.cohort):
        return False
    return before.repeat == phase.repeat == 1 and before.clients(plan) == phase.clients(plan) != ()


def _leaves_server_unchanged(phase: Phase) -> bool:
    return phase.name not in (TRAIN, EVALUATE) and not (phase.reduce or phase.update or phase.update_model)
