"""A client of a federation: answers the server's packets, with its data and its state on its own disk."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everfed.core.context import Attempt, Credentials, Moment, Setup
from everfed.core.engine import Absent, ClientError, Engine
from everfed.core.message import Message
from everfed.core.server import plan_of
from everfed.core.stream import RoundPlan
from everfed.core.tree import to_bytes
from everfed.errors import is_user_error
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
from everfed.privacy.differential import BudgetSpent
from everfed.privacy.spending import DELTA, ClientLedger
from everfed.session import OtherWeights
from everfed.store.clients import ClientStore
from everfed.store.files import make_folder, write_atomic
from everfed.store.ledger import LedgerFile


@dataclass(frozen=True)
class ClientRuntime:
    """The setup of a recipe, and an engine over `store`, which holds the state of this client alone."""

    setup: Setup
    engine: Engine
    store: ClientStore


LEDGER = "ledger.jsonl"  # what this client has revealed, in all runs: never rolled back, never removed with a run
_LOG = logging.getLogger("everfed.site")
BuildRuntime = Callable[[str, float], ClientRuntime]  # recipe in TOML, scale


@dataclass(frozen=True)
class Identity:
    """name: under which the server enrols the client; client: the index that it requests, -1 for any."""

    name: str
    client: int = -1


class Run:
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


class Site:
    """folder: of this client's state, with one folder per run; keep_runs: how many runs are kept beside the current
    one; budget: the epsilon that its replies may cost in all runs together, 0 for no limit, at `delta`; credentials:
    its long-lived key, if it has one. One process at a time."""

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
        self._runs: dict[str, Run] = {}
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
        except (PacketError, Stale) as error:
            return Answer(REFUSED, reason=f"{type(error).__name__}: {error}").packet()
        except (BudgetSpent, OtherWeights) as error:
            _LOG.warning("a request was refused: %s", error)
            return Answer(REFUSED, reason=str(error)).packet()
        except Exception as error:  # a user's own stream or part may raise anything
            _LOG.exception("a step failed; the error was sent to the server")
            reason = str(error) if is_user_error(error) else f"{type(error).__name__}: {error}"
            return Answer(FAILED, reason=reason).packet()

    def _hello(self) -> Packet:
        _LOG.info("%s is connected to a server", self.identity.name)
        header: dict[str, Value] = {"protocol": PROTOCOL, "kind": HELLO}
        header |= {"name": self.identity.name, "client": self.identity.client}
        return Packet(header)

    def _steps(self, packet: Packet, request: Request) -> Answer:
        run = self._run(request.run)
        run.journal.accept_epoch(request.epoch)
        recipe = self._recipe(run, request, packet)
        missing = self._missing(run, request, packet)
        if recipe is None:
            missing = (RECIPE, *missing)
        if recipe is None or missing:
            return Answer(MISSING, fingerprint(request), missing=missing, holds=tuple(run.payloads.names()))
        run.journal.forget(request.durable)
        fresh = run.journal.before(request.steps[0].place) is None
        replies = tuple(self._step(run, request, step, recipe, packet) for step in request.steps)
        self._mark_active(request.run)
        return Answer(REPLY, fingerprint(request), holds=tuple(run.payloads.names()), fresh=fresh, replies=replies)

    def _step(self, run: Run, request: Request, step: Step, recipe: str, packet: Packet) -> bytes:
        """Make a step, or repeat the reply of one that was made before."""
        runtime = self._runtime_for(recipe, request)
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
        before, method = run.journal.before(step.place), runtime.setup.method
        asked = _asked_alike(runtime.setup, request, step)
        attempt = Attempt(request.run, request.epoch, self._ledger, self._credentials, request.recipe, asked)
        self._spending.check(method)
        state, reply = _call(runtime, request.client, step, message, before, attempt)
        self._spending.charge(method, request.run, step.place, state, reply)
        tree = reply_to_tree(reply)
        data = to_bytes(tree)
        run.journal.record(step.place, name, state, tree)
        _LOG.info("%s: done", where)
        return data

    def _missing(self, run: Run, request: Request, packet: Packet) -> tuple[str, ...]:
        """The names of payloads and trees that were neither sent nor stored."""
        wanted = {name for step in request.steps for _, _, name in step.once}
        bodies = {step.body for step in request.steps if step.body}
        absent = {name for name in wanted if name not in packet.pieces and not run.payloads.has(name)}
        return tuple(sorted(absent | {name for name in bodies if name not in packet.pieces}))

    def _recipe(self, run: Run, request: Request, packet: Packet) -> str | None:
        known = run.recipe(request.recipe)
        if known is not None or RECIPE not in packet.pieces:
            return known
        data = packet.pieces[RECIPE]
        if digest(data) != request.recipe:
            raise PacketError("the recipe was damaged in transit")
        write_atomic(run.recipe_file, data)
        return data.decode()

    def _mark_active(self, name: str) -> None:
        if name != self._current:
            self._on_disk.mark_active(name)
            self._current = name

    def _run(self, name: str) -> Run:
        if name in self._runs and not self._runs[name].journal.folder.is_dir():
            _LOG.warning("the state of run %s was removed from %s; it starts without", name, self.folder)
            self._runs = {}
        if name not in self._runs:
            self._runs = {name: Run(self.folder / name)}  # one at a time is kept in memory
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


def _call(
    runtime: ClientRuntime, client: int, step: Step, message: Message | None, before: Any, attempt: Attempt
) -> tuple[Any, Any]:
    """(state, reply) of one step."""
    phases = runtime.setup.method.phases_by_name()
    if step.phase not in phases:
        raise PacketError(f"the recipe's method has no phase {step.phase[:80]!r}")
    if not 0 <= client < runtime.setup.facts.clients:
        raise PacketError(f"no client {client}: the recipe has {runtime.setup.facts.clients}")
    round_index, position, repeat, stage = step.place
    tasks = {client: step.task} if step.task >= 0 else {}
    plan = RoundPlan(max(step.task, 0), (client,), tasks, drifting=frozenset({client} if step.drifting else ()))
    store = runtime.store
    store.clear()
    if before is not None:
        store.put(client, before)
    moment = Moment(round_index, plan, repeat, position, stage, attempt)
    ((_, reply),) = runtime.engine.exchange(phases[step.phase], (client,), message, moment)
    if isinstance(reply, Absent):
        raise ClientError(client, step.phase, round_index, reply.reason)
    return store.get(client) or {}, reply
