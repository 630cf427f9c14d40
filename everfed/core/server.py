"""The only round loop, and what the server does in a phase of it.

A round is a list of phases: those before aggregation, `train`, those after, evaluation. In each the server sends a
message, collects the replies, and lets the parts change its state. After every phase the run is in a state that can be
saved, so a run resumes in the middle of a round, and of a long phase of the server.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from everfed.core.client import Reply
from everfed.core.context import Context, Place, PlaceKey, Setup
from everfed.core.engine import Absent, Engine, PhaseCall, Replies, opened
from everfed.core.evaluate import Evaluation, scored_on_clients
from everfed.core.events import Monitor, Observer, Reporter, check_finite
from everfed.core.handle import Server, with_state
from everfed.core.layout import PIECES, TrainsPieces, cut, pasted
from everfed.core.message import (
    MODEL,
    Cached,
    Message,
    Model,
    PerClient,
    State,
    Traffic,
    Values,
    addressed,
    payload_bytes,
    unwrap,
    versions,
)
from everfed.core.option import EvalOptions
from everfed.core.part import Reduced
from everfed.core.phase import EVALUATE, TRAIN, Cohort, Phase, Reduction, When
from everfed.core.stream import RoundPlan
from everfed.core.trainer import Trainer
from everfed.core.tree import Tree
from everfed.errors import CompositionError


@dataclass
class RunState:
    """Where a run is, the server's state, what was measured. Its trees are replaced, never changed in place."""

    server: State
    round: int = 0
    position: int = 0  # in the round's list of phases
    repeat: int = 0  # of the phase at that position
    version: int = 0  # of the shared model
    held: dict[int, dict[str, int | str]] = field(default_factory=dict)  # what each client holds of `Cached` payloads
    traffic: Traffic = field(default_factory=Traffic)
    rows: dict[int, list[list[float] | None]] = field(default_factory=dict)  # task -> counts per task, at its end
    initial: list[list[float]] | None = None  # counts per task of the untrained model, with eval.zero_shot
    curves: list[dict[str, Any]] = field(default_factory=list)
    samples: int = 0
    seconds: float = 0.0
    absent: Counter[str] = field(default_factory=Counter)  # how often clients did not count, by kind
    watched: dict[str, dict[str, Any]] = field(default_factory=dict)  # the monitors' own state
    pieces: dict[str, int] = field(default_factory=dict)  # versions of the shared vector's pieces
    sent: dict[int, Tree] = field(default_factory=dict)  # messages of earlier rounds that clients still train with

    @property
    def place(self) -> PlaceKey:
        """What comes next."""
        return self.round, self.position, self.repeat, 0

    @property
    def model(self) -> Model:
        return self.server[MODEL]

    def set_model(self, model: Model) -> None:
        """A new version, which clients receive with the next message. The same tensors, where no client sent any, are
        the same version."""
        if all(tensor is self.model.get(name) for name, tensor in model.items()):
            return
        self.server = {**self.server, MODEL: model}
        self.version += 1

    def to_tree(self) -> Tree:
        names = ("round", "position", "repeat", "version", "held", "rows", "initial", "curves", "samples", "seconds",
                 "absent", "watched", "pieces")  # fmt: skip
        plain = {name: getattr(self, name) for name in names}
        plain |= {"up": self.traffic.up, "down": self.traffic.down}
        sent = {"sent": {str(index): message for index, message in self.sent.items()}} if self.sent else {}
        return {"server": self.server, "plain": json.dumps(plain), **sent}

    @staticmethod
    def from_tree(tree: Tree) -> RunState:
        plain = json.loads(tree["plain"])
        state = RunState(tree["server"])
        for name in ("round", "position", "repeat", "version", "curves", "samples", "seconds"):
            setattr(state, name, plain[name])
        state.watched, state.initial = plain.get("watched", {}), plain.get("initial")
        state.pieces = plain.get("pieces", {})
        state.sent = {int(index): message for index, message in tree.get("sent", {}).items()}
        state.held = {int(client): held for client, held in plain["held"].items()}
        state.rows = {int(task): row for task, row in plain["rows"].items()}
        state.traffic.up.update(plain["up"])
        state.traffic.down.update(plain["down"])
        state.absent.update(plain.get("absent", {}))
        return state


class Runner:
    """Drives a run through an engine, from a state to the stream's end."""

    def __init__(
        self,
        setup: Setup,
        engine: Engine,
        model: Model,
        evaluation: EvalOptions,
        notify: Observer = lambda event: None,
        save: Callable[[RunState, bool], None] = lambda state, task_end: None,
        state: RunState | None = None,
        monitors: Sequence[Monitor] = (),
    ) -> None:
        self.setup, self.engine, self.save = setup, engine, save
        self.state = state or RunState(_first_state(setup, model))
        self.reporter = Reporter(notify, monitors, setup.method.parts, self.state.watched)
        self.exchange = Exchange(setup, engine, self.state)
        self.evaluation = Evaluation(setup, engine, self.exchange, self.reporter, self.state, evaluation)

    # rounds ------------------------------------------------------------------------------------------------------
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
            place = Place(state.round, plan, state.repeat, state.position)
            self.exchange.batch(phases, place)
            finished = self.phase(phases[state.position], place)
            self.setup.method.check_unchanged()
            state.seconds += time.monotonic() - started
            last = finished and state.position + 1 == len(phases)
            state.repeat = 0 if finished else state.repeat + 1
            state.position += finished
            if last:
                state.round, state.position = state.round + 1, 0
            self.save(state, last and plan.evaluate)
            if last:
                return

    # phases ------------------------------------------------------------------------------------------------------
    def phase(self, phase: Phase, place: Place) -> bool:
        """One repeat of a phase; True when the phase is finished."""
        if phase.name == EVALUATE:
            self.evaluation.run(phase, place)
        elif phase.name == TRAIN:
            self._train(phase, place)
        elif phase.cohort is Cohort.SERVER:
            return self._on_server(phase, place)
        else:
            reduced = self._collect(phase, place).get(phase.owner, {})
            return self._update(phase, place, _worked(phase, self._server(phase.owner, phase, place, reduced)))
        return True

    def _train(self, phase: Phase, place: Place) -> None:
        """Local training on the clients; where it ends with a synchronisation, the new shared model."""
        reduced = self._collect(phase, place)
        context, before, states = self.setup.server(TRAIN, place), self.state.model, self.state.server
        if not context.synchronises:
            return
        model = self._aggregate(reduced[self.setup.method.aggregator.name], context)
        for part in self.setup.method.defining("update"):
            of_part = reduced.get(part.name, {})
            server = Server(part.name, self.state.server, context, reduced=of_part, before=before, model=model)
            part.update(server)
            self.state.server = server.states
            model = model if server.model is model else self._only_trained(server.model, context)
            self._report(place, TRAIN, part.name, server.reports)
        if self._refused(model, phase, place):
            self.state.server = states
        else:
            self._set_model(model)

    def _on_server(self, phase: Phase, place: Place) -> bool:
        """The server's own work; it is reported when it is done."""
        started = time.monotonic()
        server = self._server(phase.owner, phase, place, {})
        result = self.engine.once(lambda: _worked(phase, server, self.engine.workbench()))
        finished = self._update(phase, place, result)
        self.reporter.phase(phase, place, Replies({}), 0, started)
        check_finite(phase, place, result["reports"])
        return finished

    def _collect(self, phase: Phase, place: Place) -> Reduced:
        """Send, wait, reduce in client order, report, unprotect."""
        message = self.exchange.message(phase, place)
        started = time.monotonic()
        replies = Replies(self.setup.method.reducers(phase))
        down = self.exchange.collect(replies, phase, place, message)
        self.state.samples += sum(one.samples for one in replies.trained) * self.setup.options.local_epochs
        self.reporter.phase(phase, place, replies, down, started)
        return self._release(phase, place, replies.reduction)

    def _release(self, phase: Phase, place: Place, reduction: Reduction) -> Reduced:
        """What was reduced, as the protections let the parts read it."""
        reduced, weights = reduction.result(), reduction.weights()
        for part in self.setup.method.protections:
            server = self._server(part.name, phase, place, {})
            reduced = part.release(server, phase, reduced, weights)
            self.state.server = server.states
            self._report(place, phase.name, part.name, server.reports)
        return reduced

    # the server's state ------------------------------------------------------------------------------------------
    def _server(self, part: str, phase: Phase, place: Place, reduced: Mapping[str, Any]) -> Server:
        return Server(part, self.state.server, self.setup.server(phase.name, place), reduced=reduced)

    def _aggregate(self, reduced: Tree, context: Context) -> Model:
        """The new shared model. Of one in pieces, the aggregating part reduces what was trained, as a smaller model."""
        aggregator, pieces, states = self.setup.method.aggregator, self.setup.pieces, self.state.server
        if pieces is None or isinstance(aggregator, TrainsPieces):
            server = Server(aggregator.name, states, context, reduced=reduced)
            model = dict(aggregator.aggregate(server))
            self.state.server = server.states
            return model
        old, spans = self.state.model, pieces.moving(chooser(self.setup, states, context))
        short = {**old, "params": cut(old["params"], spans)}
        server = Server(aggregator.name, {**states, MODEL: short}, context, reduced=reduced)
        trained = aggregator.aggregate(server)
        self.state.server = {**server.states, MODEL: old}
        return {**trained, "params": pasted(old["params"], spans, trained["params"])}

    def _only_trained(self, model: Model, context: Context) -> Model:
        """The model without what a rule (server momentum, say) changed outside the trained pieces."""
        pieces = self.setup.pieces
        if pieces is None:
            return model
        spans = pieces.moving(chooser(self.setup, self.state.server, context))
        return {**model, "params": pasted(self.state.model["params"], spans, cut(model["params"], spans))}

    def _refused(self, model: Model, phase: Phase, place: Place) -> bool:
        """Does the engine refuse the new model? The run then goes on with the one that it has."""
        problem = self.engine.refusal(model)
        if problem:
            text = f"the new model of phase {phase.name!r} in round {place.round + 1} is not adopted: {problem}"
            self.reporter.notify({"event": "warning", "message": text})
        return bool(problem)

    def _set_model(self, model: Model) -> None:
        """A new model; its pieces that differ from the old one's have new versions."""
        old = self.state.model
        self.state.set_model(model)
        if self.setup.pieces is not None:
            changed = self.setup.pieces.changed(old, model)
            self.state.pieces = {**self.state.pieces, **dict.fromkeys(changed, self.state.version)}

    def _update(self, phase: Phase, place: Place, result: Tree) -> bool:
        """Take over what a part's phase made; True when the phase is finished."""
        if result["model"] is not None and self._refused(result["model"], phase, place):
            result = {**result, "state": None, "model": None}
        if result["state"] is not None:
            self.state.server = with_state(self.state.server, phase.owner, result["state"])
        if result["model"] is not None:
            self._set_model(result["model"])
        self._report(place, phase.name, phase.owner, result["reports"])
        finished: bool = result["done"] or place.repeat + 1 >= phase.repeat
        return finished

    def _report(self, place: Place, phase: str, part: str, values: Mapping[str, float]) -> None:
        if values:
            self.reporter.measured(place, phase, part, values)


class Exchange:
    """Messages to an engine's clients and replies from them, with the traffic they make."""

    def __init__(self, setup: Setup, engine: Engine, state: RunState) -> None:
        self.setup, self.engine, self.state = setup, engine, state

    # what is sent ------------------------------------------------------------------------------------------------
    def message(self, phase: Phase, place: Place) -> Message | None:
        """The model and what the parts broadcast; empty where a phase sends nothing; None for training between
        synchronisations."""
        context = self.setup.server(phase.name, place)
        if phase.name == TRAIN:
            if place.round % self.setup.options.sync_every != 0:
                return None
            sending: dict[str, Callable[[Server], Values]] = {p.name: p.broadcast for p in self.setup.method.parts}
        elif not phase.sends:
            return {}
        else:
            sending = {phase.owner: phase.broadcast} if phase.broadcast else {}
        message = self.model(phase, place)
        for name, broadcast in sending.items():
            values = dict(broadcast(Server(name, self.state.server, context, read_only=True)))
            if values:
                message[name] = values
        return message

    def model(self, phase: Phase, place: Place) -> Message:
        """Each version reaches a client once; local statistics are sent at the beginning only."""
        message: Message = {MODEL: {k: Cached(self.state.version, v) for k, v in self.state.model.items()}}
        if self.setup.options.batchnorm == "local":
            message[MODEL] |= {k: Cached(0, self.state.model[k]) for k in ("stats", "counters")}
        pieces = self.setup.pieces
        if pieces is None:
            return message
        server = chooser(self.setup, self.state.server, self.setup.server(phase.name, place))
        return pieces.split(message, self.state.pieces, server)

    def batch(self, phases: Sequence[Phase], place: Place) -> None:
        """Name the phases that an engine may send together with the next one."""
        if not self.engine.batches_phases:
            return
        calls = []
        for position in batchable(phases, place.position, place.plan):
            phase, then = phases[position], Place(place.round, place.plan, 0, position)
            calls.append(PhaseCall(phase, self.message(phase, then), then))
        self.engine.batch(calls)

    # what comes back ---------------------------------------------------------------------------------------------
    def collect(self, replies: Replies, phase: Phase, place: Place, message: Message | None) -> int:
        """Run a phase on its clients and add their replies in client order; returns the bytes sent to them."""
        clients = phase.clients(place.plan)
        if not clients:
            return 0
        if phase.name == TRAIN and place.plan.began:
            down = self._count_down(place.plan.starts, message)
            found = iter(self._arriving(phase, place, message))
        else:
            down, found = self._count_down(clients, message), self._opened(phase, clients, message, place)
        for client, reply in found:
            replies.add(client, reply)
        self.engine.merge(replies)
        self.state.traffic.up.update(replies.traffic.up)
        self.state.traffic.down.update(replies.traffic.down)  # what the engine sent beside the message
        self.state.absent.update(one.kind for one in replies.absent.values())
        return down + sum(replies.traffic.down.values())

    def _opened(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place, age: int = 0
    ) -> Iterator[tuple[int, Reply | Absent]]:
        """The replies of clients that received `message`, as they are reduced."""
        for client, reply in self.engine.exchange(phase, clients, message, place):
            if not isinstance(reply, Absent):
                reply = opened(self.setup, phase, place, message, replace(reply, age=age), self.state.model)
            yield client, reply

    def _arriving(self, phase: Phase, place: Place, message: Message | None) -> list[tuple[int, Reply | Absent]]:
        """The replies that arrive in this round, each of a client in the round whose message it received."""
        plan, index, found = place.plan, place.round, dict[int, Reply | Absent]()
        for since in sorted(set(plan.began.values())):
            clients = [client for client in sorted(plan.began) if plan.began[client] == since]
            given = message if since == index else self.state.sent[since]
            then = place if since == index else replace(place, round=since, plan=self.setup.stream.round(since))
            found.update(self._opened(phase, clients, given, then, index - since))
        kept = {**self.state.sent, index: _plain(message or {}, phase)}
        self.state.sent = {since: kept[since] for since in sorted(plan.awaited)}
        return sorted(found.items())

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


def _plain(message: Message, phase: Phase) -> Tree:
    """A message that clients still train with in later rounds, as a tree."""
    if any(isinstance(value, PerClient) for values in message.values() for value in values.values()):
        raise CompositionError(
            f"phase {phase.name!r} sends clients messages of their own, which stream.arrivals cannot keep"
        )
    return unwrap(message)


def _worked(phase: Phase, server: Server, trainer: Trainer | None = None) -> Tree:
    """Let the part change its state, as a tree: {state, model (None where unchanged), reports, done}."""
    before = server.model
    if trainer is not None:
        server.context = server.context.at(trainer=trainer)
    done = bool(phase.update(server)) if phase.update else False
    model = None if server.model is before else dict(server.model)
    return {"state": server.changed, "model": model, "reports": server.reports, "done": done}


def chooser(setup: Setup, states: State, context: Context) -> Server:
    """The handle of the part that chooses which pieces of the model a round trains."""
    assert setup.pieces is not None
    return Server(setup.pieces.owner.name, states, context, read_only=True)


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
    return phase.name not in (TRAIN, EVALUATE) and not (phase.reduce or phase.update)


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

    def due(when: When) -> Iterator[Phase]:
        return (phase for phase in setup.method.phases(when) if phase.due(index, plan, rounds))

    if index % every == 0:
        yield from due(When.BEFORE)
    yield setup.method.train_phase()
    if (index + 1) % every == 0:
        yield from due(When.AFTER)
        if plan.evaluate or (evaluation.every and (index + 1) % evaluation.every == 0):
            yield Phase(EVALUATE, cohort=Cohort.ALL if scored_on_clients(setup) else Cohort.SERVER)


def _first_state(setup: Setup, model: Model) -> State:
    """The server's state before the first round."""
    states: State = {MODEL: dict(model)}
    for part in setup.method.defining("init"):
        server = Server(part.name, states, setup.server("init"))
        part.init(server)
        states = server.states
    return states
