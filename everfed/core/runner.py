"""The only round loop.

A round is an agenda of phases: those before aggregation, `train`, those after, evaluation. After every phase the run is
in a state that can be saved, so a run resumes in the middle of a round, and of a long phase of the server.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from everfed.core import compact
from everfed.core.context import Context
from everfed.core.engine import ClientError, Engine
from everfed.core.foresight import Ahead, Foresees, companions
from everfed.core.held_out import has_own_tests
from everfed.core.intake import Intake, Spread, Trained
from everfed.core.message import MODEL, Message, Once, Traffic, addressed, payload_bytes, versions
from everfed.core.part import Model, Part, State, overrides
from everfed.core.phase import EVALUATE, TRAIN, Cohort, Phase, Position
from everfed.core.reduce import Reduction, Sum
from everfed.core.score import Exam, score_value
from everfed.core.stream import RoundPlan
from everfed.core.tree import Tree
from everfed.core.watch import Watcher
from everfed.core.world import Moment, Place, World

Event = dict[str, Any]


@dataclass(frozen=True)
class EvalOptions:
    """logits: the rule that result.json reports; every: also score the tasks seen so far every so many rounds (0: only
    at task ends); zero_shot: fill the matrix above its diagonal too; split: "test" or "validation"; top_k: how many
    highest logits count as the answer."""

    logits: str = "full"
    every: int = 0
    zero_shot: bool = False
    split: str = "test"
    top_k: int = 1


@dataclass
class RunState:
    """Everything the server side of a run needs to go on: position, slots, what was measured."""

    server: State
    round: int = 0
    position: int = 0  # in the round's agenda
    repeat: int = 0  # of the phase at that position
    version: int = 0  # of the shared model
    held: dict[int, dict[str, int | str]] = field(default_factory=dict)  # what each client holds of `Once` payloads
    traffic: Traffic = field(default_factory=Traffic)
    rows: dict[int, list[list[float] | None]] = field(default_factory=dict)  # task -> counts per task, at its end
    curves: list[dict[str, Any]] = field(default_factory=list)
    samples: int = 0
    seconds: float = 0.0
    absent: Counter[str] = field(default_factory=Counter)  # how often clients did not count, by kind
    watched: dict[str, dict[str, Any]] = field(default_factory=dict)  # what the watchers remember

    @property
    def place(self) -> Place:
        """What comes next."""
        return self.round, self.position, self.repeat, 0

    @property
    def model(self) -> Model:
        return self.server[MODEL]

    def to_tree(self) -> Tree:
        plain = {
            "round": self.round,
            "position": self.position,
            "repeat": self.repeat,
            "version": self.version,
            "held": self.held,
            "up": self.traffic.up,
            "down": self.traffic.down,
            "rows": self.rows,
            "curves": self.curves,
            "samples": self.samples,
            "seconds": self.seconds,
            "absent": self.absent,
            "watched": self.watched,
        }
        return {"server": self.server, "plain": json.dumps(plain)}

    @staticmethod
    def from_tree(tree: Tree) -> RunState:
        plain = json.loads(tree["plain"])
        state = RunState(tree["server"])
        for name in ("round", "position", "repeat", "version", "curves", "samples", "seconds"):
            setattr(state, name, plain[name])
        state.watched = plain.get("watched", {})
        state.held = {int(client): held for client, held in plain["held"].items()}
        state.rows = {int(task): row for task, row in plain["rows"].items()}
        state.traffic.up.update(plain["up"])
        state.traffic.down.update(plain["down"])
        state.absent.update(plain.get("absent", {}))
        return state


class Diverged(RuntimeError):
    """A loss is no longer finite."""


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
        self.watchers = tuple(watchers)
        self.world, self.engine, self.evaluation = world, engine, evaluation
        self.notify, self.save = notify, save
        self.state = state or RunState(self._first_server_state(model))

    def run(self) -> RunState:
        """To the end of the stream; `save` is offered the state after every phase."""
        while self.state.round < self.world.stream.rounds:
            self.round()
        return self.state

    def _first_server_state(self, model: Model) -> State:
        ctx = self.world.server("init")
        slots = {part.name: part.server_slots(ctx) for part in self.world.method.parts}
        return {MODEL: dict(model), **{name: tree for name, tree in slots.items() if tree}}

    # rounds ------------------------------------------------------------------------------------------------------
    def round(self) -> None:
        """The rest of the current round."""
        state, plan = self.state, self._plan(self.state.round)
        agenda = list(self._agenda(state.round, plan))
        while state.position < len(agenda):
            phase = agenda[state.position]
            started = time.monotonic()
            moment = Moment(state.round, plan, state.repeat, state.position)
            self._foresee(agenda, moment)
            finished = self._phase(phase, moment)
            state.seconds += time.monotonic() - started
            last = finished and state.position + 1 == len(agenda)
            state.repeat = 0 if finished else state.repeat + 1
            state.position += finished
            if last:
                state.round, state.position = state.round + 1, 0
            self.save(state, last and plan.evaluate)
            if last:
                return

    def _foresee(self, agenda: list[Phase], moment: Moment) -> None:
        """Tell an engine that wants to know which of the next phases clients can be asked for along with this one."""
        if not isinstance(self.engine, Foresees):
            return
        ahead = []
        for position in companions(self.world.method, agenda, moment.position, moment.plan):
            phase, then = agenda[position], Moment(moment.round, moment.plan, 0, position)
            ahead.append(Ahead(phase, self._asked(phase, then), then))
        self.engine.expect(ahead)

    def _plan(self, index: int) -> RoundPlan:
        """The stream's plan; between synchronisations the participants stay those of the last synchronised round."""
        plan = self.world.stream.round(index)
        block = index - index % self.world.options.sync_every
        if block == index:
            return plan
        first = self.world.stream.round(block).participants
        return replace(plan, participants=first, notes={})

    def _agenda(self, index: int, plan: RoundPlan) -> Iterator[Phase]:
        method, every = self.world.method, self.world.options.sync_every
        if index % every == 0:
            yield from self._due(Position.BEFORE, index, plan)
        yield method.train_phase()
        if (index + 1) % every == 0:
            yield from self._due(Position.AFTER, index, plan)
            if plan.evaluate or (self.evaluation.every and (index + 1) % self.evaluation.every == 0):
                yield Phase(EVALUATE, cohort=Cohort.ALL if self._scored_on_clients else Cohort.SERVER)

    def _due(self, position: Position, index: int, plan: RoundPlan) -> Iterator[Phase]:
        """The parts' phases of this round, less those that their parts do not want."""
        method = self.world.method
        for phase in method.phases(position):
            ctx = self.world.server(phase.name, Moment(index, plan))
            if phase.due(index, plan) and method.part(phase.owner).wanted(phase.name, ctx):
                yield phase

    # phases ------------------------------------------------------------------------------------------------------
    def _phase(self, phase: Phase, moment: Moment) -> bool:
        """Run one repeat of a phase; True when the phase is finished."""
        if phase.name == EVALUATE:
            self._evaluate(phase, moment)
            return True
        if phase.name == TRAIN:
            self._train(phase, moment)
            return True
        if phase.cohort is Cohort.SERVER:
            return self._work(phase, moment)
        ctx = self.world.server(phase.name, moment)
        reduced = self._exchange(phase, moment, self._message(phase, moment)).get(phase.owner, {})
        part = self.world.method.part(phase.owner)
        self._measure(moment, {phase.owner: reduced}, ctx)
        self._set_slots(phase.owner, part.update(self.state.server, phase.name, reduced, ctx))
        self._revise(part, ctx)
        return moment.repeat + 1 >= phase.repeat or part.done(self.state.server, phase.name, ctx)

    def _revise(self, part: Part, ctx: Context) -> None:
        """A model that a phase changed is a new version, which clients receive with the next message."""
        model = part.revise(self.state.server, ctx.phase, self.state.model, ctx)
        if model is not self.state.model:
            self.state.server = {**self.state.server, MODEL: model}
            self.state.version += 1

    def _work(self, phase: Phase, moment: Moment) -> bool:
        """One repeat of the server's own work, told when it is done; True when the phase is finished."""
        started = time.monotonic()
        part, ctx = self.world.method.part(phase.owner), self.world.server(phase.name, moment, self.engine.workbench())
        self._set_slots(phase.owner, part.update(self.state.server, phase.name, {}, ctx))
        self._revise(part, ctx)
        finished = moment.repeat + 1 >= phase.repeat or part.done(self.state.server, phase.name, ctx)
        measured = self._measure(moment, {phase.owner: {}}, ctx)
        self._report(phase, moment, Intake({}), 0, started)
        bad = [name for name, value in measured.items() if not math.isfinite(value)]
        if bad:
            raise Diverged(
                f"{bad[0]} is not finite in the server's phase {phase.name!r} of round {moment.round}, repeat "
                f"{moment.repeat}; lower the learning rate of part {phase.owner!r}, or its weights"
            )
        return finished

    def _train(self, phase: Phase, moment: Moment) -> None:
        every = self.world.options.sync_every
        reduced = self._exchange(phase, moment, self._asked(phase, moment))
        if (moment.round + 1) % every:
            return
        method, ctx = self.world.method, self.world.server(TRAIN, moment)
        self._measure(moment, reduced, ctx)
        model = method.aggregator.aggregate(self.state.server, reduced[method.aggregator.name], ctx)
        for part in method.parts:
            model = part.transform(self.state.server, model, ctx)
        self.state.server = {**self.state.server, MODEL: model}
        self.state.version += 1
        for part in method.parts:
            self._set_slots(part.name, part.update(self.state.server, TRAIN, reduced.get(part.name, {}), ctx))

    def _measure(self, moment: Moment, reduced: dict[str, dict[str, Any]], ctx: Context) -> dict[str, float]:
        """Tell what the parts measure."""
        told: dict[str, float] = {}
        for name, replies in reduced.items():
            values = self.world.method.part(name).measure(self.state.server, replies, ctx)
            if values:
                place = {"round": moment.round, "task": moment.plan.task, "phase": ctx.phase, "repeat": moment.repeat}
                event = {"event": "measure", **place, "part": name}
                self.notify({**event, **values})
                told |= values
        return told

    def _set_slots(self, part: str, slots: Tree) -> None:
        others = {name: tree for name, tree in self.state.server.items() if name != part}
        self.state.server = {**others, part: slots} if slots else others

    def _asked(self, phase: Phase, moment: Moment) -> Message | None:
        """The message of a phase; none for training between synchronisations."""
        between = phase.name == TRAIN and moment.round % self.world.options.sync_every != 0
        return None if between else self._message(phase, moment)

    def _message(self, phase: Phase, moment: Moment) -> Message:
        """The model and what the parts broadcast; nothing in a silent phase."""
        method, ctx = self.world.method, self.world.server(phase.name, moment)
        if phase.name != TRAIN and phase.name in method.part(phase.owner).silent:
            return {}
        message = self._model_message()
        for part in method.parts:
            if phase.name == TRAIN or part.name == phase.owner:
                values = part.broadcast(self.state.server, phase.name, ctx)
                if values:
                    message[part.name] = values
        return message

    def _model_message(self) -> Message:
        """Each version reaches a client once; local statistics are sent at the beginning only."""
        message: Message = {MODEL: {k: Once(self.state.version, v) for k, v in self.state.model.items()}}
        if self.world.options.batchnorm == "local":
            message[MODEL] |= {k: Once(0, self.state.model[k]) for k in ("stats", "counters")}
        return message

    def _exchange(self, phase: Phase, moment: Moment, message: Message | None) -> dict[str, dict[str, Any]]:
        """Send, wait, reduce in client order, and account for it."""
        started = time.monotonic()
        intake = Intake(self.world.method.reducers(phase))
        down = self._take_in(intake, phase, moment, message)
        self.state.samples += sum(one.samples for one in intake.trained) * self.world.options.local_epochs
        self._report(phase, moment, intake, down, started)
        return self._release(phase, moment, intake.reduction)

    def _release(self, phase: Phase, moment: Moment, reduction: Reduction) -> dict[str, dict[str, Any]]:
        """What was reduced, after the parts that protect it."""
        reduced, weights = reduction.result(), reduction.weights()
        ctx = self.world.server(phase.name, moment)
        for part in self.world.method.parts:
            if overrides(part, "release"):
                slots, reduced = part.release(self.state.server, phase, reduced, weights, ctx)
                self._set_slots(part.name, slots)
                if part.name not in reduced:  # it is asked with the others where it has a say
                    self._measure(moment, {part.name: {}}, ctx)
        return reduced

    def _take_in(self, intake: Intake, phase: Phase, moment: Moment, message: Message | None) -> int:
        """Run a phase on its clients and take their replies in; returns the bytes sent to them."""
        clients = phase.clients(moment.plan)
        if not clients:
            return 0
        down = self._account_down(clients, message)
        for client, reply in self.engine.exchange(phase, clients, message, moment):
            intake.add(client, reply)
        if isinstance(self.engine, Spread):
            self.engine.merge(intake)
        self.state.traffic.up.update(intake.traffic.up)
        self.state.traffic.down.update(intake.traffic.down)  # what the engine sent beside the message
        self.state.absent.update(one.kind for one in intake.absent.values())
        return down + sum(intake.traffic.down.values())

    def _account_down(self, clients: tuple[int, ...], message: Message | None) -> int:
        if message is None:
            return 0
        name, new, down = self.world.method.aggregator.name, versions(message), 0
        for client in clients:
            sizes = payload_bytes(addressed(message, client), self.state.held.get(client, {}))
            sizes[name] = sizes.get(name, 0) + sizes.pop(MODEL, 0)
            self.state.traffic.sent(sizes)
            self.state.held[client] = self.state.held.get(client, {}) | new
            down += sum(sizes.values())
        return down

    def _report(self, phase: Phase, moment: Moment, intake: Intake, down: int, started: float) -> None:
        # reading the losses waits for a device that is still at work, so the time is taken afterwards
        losses = self._losses(phase, moment, intake.trained) if intake.trained else None
        event: Event = {
            "event": "phase",
            "round": moment.round,
            "task": moment.plan.task,
            "phase": phase.name,
            "repeat": moment.repeat,
            "repeats": phase.repeat,
            **_who(phase, moment.plan),
            "bytes_up": sum(intake.traffic.up.values()),
            "bytes_down": down,
            "seconds": time.monotonic() - started,
        }
        if phase.name == TRAIN:
            event |= moment.plan.notes
        if losses is not None:
            event["loss"] = float(losses.mean())
            event["trained"] = len(intake.trained)
        self.notify({**event, **_absences(intake)})
        if losses is not None:
            self._watch(moment, {one.client: loss for one, loss in zip(intake.trained, losses.tolist(), strict=True)})

    def _watch(self, moment: Moment, losses: dict[int, float]) -> None:
        """Let the watchers look, and tell what they say."""
        for watcher in self.watchers:
            memory = self.state.watched.get(watcher.name, {})
            self.state.watched[watcher.name], said = watcher.watch(memory, moment.round, losses)
            for event in said:
                self.notify({"round": moment.round, "task": moment.plan.task, **event})

    def _losses(self, phase: Phase, moment: Moment, trained: list[Trained]) -> Tensor:
        """(clients,) float64, each client's mean step loss; reads the device once. Raises Diverged."""
        sums = torch.stack([torch.as_tensor(one.loss).detach() for one in trained]).cpu().double()
        steps = torch.tensor([one.steps for one in trained], dtype=torch.float64)
        bad = [one.client for one, total in zip(trained, sums.tolist(), strict=True) if not math.isfinite(total)]
        if bad:
            raise Diverged(
                f"the loss of client {bad[0]} is not finite in phase {phase.name!r} of round {moment.round} "
                f"({len(bad)} of {len(trained)} clients); lower train.optimizer.lr or the method's weights"
            )
        return sums / steps

    # evaluation --------------------------------------------------------------------------------------------------
    def _evaluate(self, phase: Phase, moment: Moment) -> None:
        seen = moment.plan.task + 1
        begun = max(moment.plan.task, *moment.plan.tasks.values()) + 1 if moment.plan.tasks else seen
        at_end = moment.plan.evaluate
        tasks = list(range(self.world.stream.tasks if self.evaluation.zero_shot and at_end else seen))
        exam = Exam(tuple(tasks), begun, self.evaluation.split, self.evaluation.top_k)
        counts = self._counts(phase, moment, exam).tolist()
        if at_end:
            missing = [None] * (self.world.stream.tasks - len(tasks))
            self.state.rows[moment.plan.task] = [*counts, *missing]
        column = 1 + ("full", "seen", "task").index(self.evaluation.logits)
        score = self.world.stream.score
        accuracies = [score_value(score, row[column], row[0]) for row in counts]
        self.state.curves.append({"round": moment.round, "task": moment.plan.task, "accuracy": accuracies})
        known = [a for a in accuracies[:seen] if a is not None]
        self.notify(
            {
                "event": "evaluation",
                "round": moment.round,
                "task": moment.plan.task,
                "task_end": at_end,
                "score": score,  # what the numbers under "accuracy" and "acc" are
                "accuracy": accuracies,
                "acc": sum(known) / len(known) if known else None,
            }
        )

    @property
    def _scored_on_clients(self) -> bool:
        return self.world.personal or has_own_tests(self.world.stream)

    def _counts(self, phase: Phase, moment: Moment, exam: Exam) -> Tensor:
        if not self._scored_on_clients:
            return self.engine.evaluate(self.state.model, exam)
        message: Message = {**self._model_message(), EVALUATE: exam.to_tree()}
        intake = Intake({EVALUATE: {"counts": Sum()}})
        self._take_in(intake, phase, moment, message)
        if intake.absent:
            self.notify({"event": "absent", "round": moment.round, "phase": EVALUATE, **_absences(intake)})
        counts: Tensor | None = intake.reduction.result()[EVALUATE]["counts"]
        return torch.zeros((len(exam.tasks), 4), dtype=torch.int64) if counts is None else counts  # nobody was there


def _who(phase: Phase, plan: RoundPlan) -> Event:
    """The clients of a phase, and their tasks where they differ from the round's; in short where they are many."""
    clients = phase.clients(plan)
    tasks = [plan.tasks.get(client, plan.task) for client in clients]
    few = len(clients) <= compact.NAMED
    event: Event = {"clients": list(clients) if few else compact.spans(clients)}
    if any(task != plan.task for task in tasks):
        event["tasks"] = tasks if few else compact.repeats(tasks)
    return event


def _absences(intake: Intake) -> Event:
    """For an event: who did not count, and why."""
    named = {str(client): f"{one.kind}: {one.reason}" for client, one in intake.absent.items()}
    return {"absent": named} if named else {}


__all__ = ["ClientError", "Diverged", "EvalOptions", "Event", "RunState", "Runner"]
