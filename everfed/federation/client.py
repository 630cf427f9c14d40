"""A client of a federation: answers the server's packets, with its data and its state on its own disk."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from everfed.core.client import Reply, new_state, sealed
from everfed.core.context import Attempt, Credentials, Fewest, Place, Setup, TooFewSamples
from everfed.core.engine import Absent, ClientError, Engine
from everfed.core.handle import Client
from everfed.core.message import Message, State, unwrap
from everfed.core.phase import When
from everfed.core.server import plan_of
from everfed.core.stream import RoundPlan
from everfed.core.tree import to_bytes
from everfed.federation.codec import reply_to_tree, to_message
from everfed.federation.journal import Journal, Stale
from everfed.federation.packet import PROTOCOL, Packet, PacketError, Value, digest
from everfed.federation.payloads import PayloadCache
from everfed.federation.request import (
    FAILED,
    HELLO,
    MISSING,
    NOTICE,
    RECIPE,
    REFUSED,
    REPLY,
    Answer,
    Request,
    Step,
    fingerprint,
    require_protocol,
)
from everfed.federation.runs import KEPT, STEPS, Runs
from everfed.naming import NotAllowed
from everfed.privacy.differential import NAME, BudgetSpent
from everfed.privacy.secure_client import ProtocolError
from everfed.privacy.spending import DELTA, ClientLedger, hides_failures, protection
from everfed.session import OtherWeights
from everfed.store.clients import ClientStore
from everfed.store.files import make_folder, write_atomic
from everfed.store.ledger import LedgerFile


@dataclass(frozen=True)
class ClientRuntime:
    """The setup of a recipe, and an engine over `store`, which holds the state of this client alone. fewest: from how
    many samples this client computes anything."""

    setup: Setup
    engine: Engine
    store: ClientStore
    fewest: Fewest = field(default_factory=Fewest)


LEDGER = "ledger.jsonl"  # what this client has revealed, in all runs: never rolled back, never removed with a run
# what the server is told: the same words whatever the samples, files and folders here are
STEP_FAILED = "the step failed; the reason is in the client's log"
DISK_FULL = "the client's disk is full"
OTHER_WEIGHTS = "model.frozen_sha256: the frozen weights here are not the run's; see the client's log"
_LOG = logging.getLogger("everfed.client")
BuildRuntime = Callable[[str, float], ClientRuntime]  # recipe in TOML, scale


@dataclass(frozen=True)
class Identity:
    """name: under which the server enrols the client; client: the index that it requests, -1 for any."""

    name: str
    client: int = -1


class ClientRun:
    """The files of one run on this client."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self.recipe_file = folder / "recipe.toml"
        self.journal = Journal(folder / STEPS)
        self.payloads = PayloadCache(folder / "once")

    def recipe(self, name: str) -> str | None:
        """The recipe's text, if its digest is `name`."""
        if not self.recipe_file.exists():
            return None
        data = self.recipe_file.read_bytes()
        return data.decode() if digest(data) == name else None

    def keep_recipe(self, text: str) -> None:
        data = text.encode()
        if self.recipe(digest(data)) is None:
            write_atomic(self.recipe_file, data)


class RealClient:
    """Answers a server's packets for one real client. folder: of its state, with one folder per run; keep_runs: how
    many runs are kept beside the current one; budget: the epsilon that its replies may cost in all runs together, 0 for
    no limit, at `delta`; credentials: its long-lived key, if it has one. One process at a time."""

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        build: BuildRuntime,
        keep_runs: int = KEPT,
        budget: float = 0.0,
        delta: float = DELTA,
        credentials: Credentials | None = None,
    ) -> None:
        make_folder(folder)
        self.folder, self.identity, self._build, self._credentials = folder, identity, build, credentials
        self._spending = ClientLedger(folder, budget, delta)
        self._on_disk = Runs(folder, keep_runs)
        self._ledger = LedgerFile(folder / LEDGER)
        self._current = ""
        self._runs: dict[str, ClientRun] = {}
        self._runtime: tuple[tuple[str, float], ClientRuntime] | None = None

    def answer(self, packet: Packet) -> Packet:
        """Never raises, whatever a server sends or the client's own code does: the answer contains the error."""
        try:
            require_protocol(packet)
            if packet.text("kind") == HELLO:
                return self._hello()
            if packet.text("kind") == NOTICE:
                _LOG.warning("the server refuses %s: %s", self.identity.name, packet.text("reason")[:1000])
                return Answer(REPLY).packet()
            return self._steps(packet, Request.of(packet)).packet()
        except (PacketError, Stale, BudgetSpent, NotAllowed) as error:
            _LOG.warning("a request was refused: %s", error)
            return Answer(REFUSED, reason=f"{type(error).__name__}: {error}").packet()
        except OtherWeights as error:
            _LOG.warning("a request was refused: %s", error)
            return Answer(REFUSED, reason=OTHER_WEIGHTS).packet()
        except ClientError as error:
            if not isinstance(error.__cause__, ProtocolError | TooFewSamples):
                return self._failed()
            _LOG.warning("a request was refused: %s", error)
            return Answer(REFUSED, reason=str(error.__cause__)).packet()  # without the place in the code
        except OSError as error:
            return self._failed(DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else STEP_FAILED)
        except Exception:  # a user's own stream or part may raise anything, and name samples, files and folders in it
            return self._failed()

    def _failed(self, reason: str = STEP_FAILED) -> Packet:
        _LOG.exception("a step failed")
        return Answer(FAILED, reason=reason).packet()

    def _hello(self) -> Packet:
        _LOG.info("%s is connected to a server", self.identity.name)
        header: dict[str, Value] = {"protocol": PROTOCOL, "kind": HELLO}
        header |= {"name": self.identity.name, "client": self.identity.client}
        return Packet(header)

    def _steps(self, packet: Packet, request: Request) -> Answer:
        text = self._recipe(request, packet)
        if text is None:
            return Answer(MISSING, fingerprint(request), missing=(RECIPE, *_contents(request, packet)))
        runtime = self._runtime_for(text, request)  # before anything is stored: its recipe may be refused
        self._spending.check(runtime.setup.method)
        run = self._run(request.run)
        run.journal.accept_epoch(request.epoch)
        run.keep_recipe(text)
        missing = tuple(name for name in _contents(request, packet) if not run.payloads.has(name))
        if missing:
            return Answer(MISSING, fingerprint(request), missing=missing, holds=tuple(run.payloads.names()))
        run.journal.forget(request.durable)
        fresh = run.journal.before(request.steps[0].place) is None
        replies = tuple(self._step(run, runtime, request, step, packet) for step in request.steps)
        self._mark_active(request.run)
        return Answer(REPLY, fingerprint(request), holds=tuple(run.payloads.names()), fresh=fresh, replies=replies)

    def _step(self, run: ClientRun, runtime: ClientRuntime, request: Request, step: Step, packet: Packet) -> bytes:
        """Make a step, or repeat the reply of one that was made before."""
        name = f"{step.name}.{request.client}"
        if any(part.per_epoch for part in runtime.setup.method.protections):
            name = f"{name}.{request.epoch}"  # masked with other keys for a server that was started again
        known = run.journal.find(step.place, name)
        where = f"round {step.place[0] + 1}, {step.phase}"
        if known is not None:
            _LOG.info("%s: reply repeated", where)
            return to_bytes(known)
        for part, key, content in step.once:
            if content in packet.pieces:
                run.payloads.put(part, key, content, packet.pieces[content])
        message = to_message(packet.piece(step.body), step.once, run.payloads.get) if step.body else None
        state, reply = self._computed(run, runtime, request, step, message)
        tree = reply_to_tree(reply)
        data = to_bytes(tree)
        run.journal.record(step.place, name, state, tree)
        _LOG.info("%s: done", where)
        return data

    def _computed(
        self, run: ClientRun, runtime: ClientRuntime, request: Request, step: Step, message: Message | None
    ) -> tuple[State, Reply]:
        """(state, reply) of a step, which is charged before it is computed."""
        before, method = run.journal.before(step.place), runtime.setup.method
        asked = _asked_alike(runtime.setup, request, step)
        known = (self._ledger, self._credentials, request.recipe, asked, runtime.fewest)
        attempt = Attempt(request.run, request.epoch, *known)
        call = _Call(runtime, request.client, step, message, before, attempt)
        charged = _computed_from(request, step, before)
        self._spending.charge(method, call.phase, request.run, step.place, charged)
        try:
            state, reply = call.answered()
        except PacketError:
            raise
        except Exception:
            if call.phase.when is When.INSIDE or not hides_failures(method):
                raise
            _LOG.exception("a step failed; its reply is noise alone")
            state, reply = call.nothing()
        self._spending.record(method, request.run, step.place, charged, state)
        return state, reply

    def _recipe(self, request: Request, packet: Packet) -> str | None:
        """The text of the run's recipe, as it is stored or was sent."""
        known = self._run(request.run).recipe(request.recipe) if (self.folder / request.run).is_dir() else None
        if known is not None or RECIPE not in packet.pieces:
            return known
        data = packet.pieces[RECIPE]
        if digest(data) != request.recipe:
            raise PacketError("the recipe was damaged in transit")
        return data.decode()

    def _mark_active(self, name: str) -> None:
        if name != self._current:
            self._on_disk.mark_active(name)
            self._current = name

    def _run(self, name: str) -> ClientRun:
        if name in self._runs and not self._runs[name].journal.folder.is_dir():
            _LOG.warning("the state of run %s was removed from %s; it starts without", name, self.folder)
            self._runs = {}
        if name not in self._runs:
            self._runs = {name: ClientRun(self.folder / name)}  # one at a time is kept in memory
        return self._runs[name]

    def _runtime_for(self, recipe: str, request: Request) -> ClientRuntime:
        """Model, data and captured steps, reused from one request to the next."""
        key = (request.recipe, request.scale)
        if self._runtime is None or self._runtime[0] != key:
            if self._runtime is not None:
                self._runtime[1].engine.close()
            self._runtime = (key, self._build(recipe, request.scale))
        return self._runtime[1]


def _asked_alike(setup: Setup, request: Request, step: Step) -> str:
    """Digest of what a server must ask of every client alike, or their sum may be that of one. Clients may be in
    different tasks where the recipe says so; else the task itself is a part of it."""
    index = step.place[0]
    plan = plan_of(setup, index) if index < setup.stream.rounds else RoundPlan(0, (), {})
    here = (step.task, step.drifting)
    planned = (plan.tasks.get(request.client, -1), request.client in plan.drifting)
    tasks = [sorted(plan.tasks.items()), sorted(plan.drifting)] if here == planned else [*here]
    return digest(json.dumps([request.recipe, request.scale, step.phase, step.body, step.once, tasks]).encode())


def _contents(request: Request, packet: Packet) -> tuple[str, ...]:
    """The names of the payloads and trees that a request needs and does not hold."""
    wanted = {name for step in request.steps for _, _, name in step.once}
    return tuple(sorted((wanted | {step.body for step in request.steps if step.body}) - set(packet.pieces)))


def _computed_from(request: Request, step: Step, before: State | None) -> str:
    """Digest of all that a reply is computed from, but for the client's samples. Its state follows from the messages
    before, whose digest differential privacy keeps."""
    history = (before or {}).get(NAME, {}).get("history")
    earlier = "" if history is None else bytes(history.tolist()).hex()
    return digest(json.dumps([request.recipe, request.scale, request.client, step.name, earlier]).encode())


class _Call:
    """A call of one step on the client's engine. Raises PacketError where the recipe has no such phase or client."""

    def __init__(
        self,
        runtime: ClientRuntime,
        client: int,
        step: Step,
        message: Message | None,
        before: State | None,
        attempt: Attempt,
    ) -> None:
        phases, setup = runtime.setup.method.phases_by_name(), runtime.setup
        if step.phase not in phases:
            raise PacketError(f"the recipe's method has no phase {step.phase[:80]!r}")
        if not 0 <= client < setup.facts.clients:
            raise PacketError(f"no client {client}: the recipe has {setup.facts.clients}")
        self.runtime, self.client, self.message, self.before = runtime, client, message, before
        self.phase = phases[step.phase]
        round_index, position, repeat, stage = step.place
        tasks = {client: step.task} if step.task >= 0 else {}
        plan = RoundPlan(max(step.task, 0), (client,), tasks, drifting=frozenset({client} if step.drifting else ()))
        self.place = Place(round_index, plan, repeat, position, stage, attempt)

    def answered(self) -> tuple[State, Reply]:
        store = self.runtime.store
        store.clear()
        if self.before is not None:
            store.put(self.client, self.before)
        ((_, reply),) = self.runtime.engine.exchange(self.phase, (self.client,), self.message, self.place)
        if isinstance(reply, Absent):
            raise ClientError(self.client, self.phase.name, self.place.round, reply.reason)
        return store.get(self.client) or {}, reply

    def nothing(self) -> tuple[State, Reply]:
        """The reply to a step that failed, under noise of the client's own: its state is as before."""
        setup, message = self.runtime.setup, None if self.message is None else unwrap(self.message)
        context = setup.client(self.client, self.phase, self.place, self.runtime.engine.workbench())
        state = self.before or new_state(setup.method, context)
        part = protection(setup.method)
        assert part is not None  # hides_failures
        reply = part.nothing(Client(NAME, state, context, message or {}, None, setup.facts.blank), self.phase)
        return sealed(setup.method, self.phase, state, message, reply, context)
