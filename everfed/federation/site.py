"""A client: its own data, its state on its own disk, and an engine that is kept warm. Answers the server's packets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everfed.core.context import Moment, World
from everfed.core.engine import Absent, ClientError, Engine
from everfed.core.message import Message
from everfed.core.stream import RoundPlan
from everfed.core.tree import to_bytes
from everfed.errors import is_users
from everfed.federation import request as ask
from everfed.federation.codec import reply_to_tree, to_message
from everfed.federation.journal import Journal, Stale
from everfed.federation.packet import PROTOCOL, Packet, PacketError, Value, digest
from everfed.federation.request import Answer, Request, Step
from everfed.federation.runs import KEPT, STEPS, Runs
from everfed.federation.payloads import PayloadCache
from everfed.store.clients import ClientStore
from everfed.store.files import make_folder, write_atomic


@dataclass(frozen=True)
class ClientRuntime:
    """What a client runs with: the world of a recipe, and an engine over `store`, which holds this client alone."""

    world: World
    engine: Engine
    store: ClientStore


_LOG = logging.getLogger("everfed.site")
BuildRuntime = Callable[[str, float], ClientRuntime]  # recipe in TOML, scale


@dataclass(frozen=True)
class Identity:
    """Who a client is. name: what the server knows it by; client: the index it asks for, -1 for any."""

    name: str
    client: int = -1


class Run:
    """One run, as this client knows it."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self.recipe_file = folder / "recipe.toml"
        self.journal = Journal(folder / STEPS)
        self.shelf = PayloadCache(folder / "once")

    def recipe(self, name: str) -> str | None:
        """The recipe's text, when it is the one of that name."""
        if not self.recipe_file.exists():
            return None
        data = self.recipe_file.read_bytes()
        return data.decode() if digest(data) == name else None


class Site:
    """folder: where this client's state lies, one folder per run in it; keep_runs: how many are remembered beside the
    one that goes on. One process at a time."""

    def __init__(self, folder: Path, identity: Identity, build: BuildRuntime, keep_runs: int = KEPT) -> None:
        self.folder, self.identity, self._build = folder, identity, build
        self._remembered = Runs(folder, keep_runs)
        self._going_on = ""
        self._runs: dict[str, Run] = {}
        self._kit: tuple[tuple[str, float], ClientRuntime] | None = None

    def answer(self, packet: Packet) -> Packet:
        """Never raises for what a server may send or a client's code may do: the server is told."""
        try:
            ask.require_protocol(packet)
            if packet.text("kind") == ask.HELLO:
                return self._hello()
            return self._steps(packet, Request.of(packet)).packet()
        except (PacketError, Stale) as error:
            return Answer(ask.REFUSED, reason=f"{type(error).__name__}: {error}").packet()
        except Exception as error:  # a user's own stream or part may raise anything
            _LOG.exception("a step failed; the server was told")
            told = str(error) if is_users(error) else f"{type(error).__name__}: {error}"
            return Answer(ask.FAILED, reason=told).packet()

    def _hello(self) -> Packet:
        _LOG.info("connected: a server asked for %s", self.identity.name)
        header: dict[str, Value] = {"protocol": PROTOCOL, "kind": ask.HELLO}
        header |= {"name": self.identity.name, "client": self.identity.client}
        return Packet(header)

    def _steps(self, packet: Packet, request: Request) -> Answer:
        run = self._run(request.run)
        run.journal.accept_epoch(request.epoch)
        recipe = self._recipe(run, request, packet)
        missing = self._missing(run, request, packet)
        if recipe is None:
            missing = (ask.RECIPE, *missing)
        if recipe is None or missing:
            return Answer(ask.MISSING, ask.asked(request), missing=missing, holds=tuple(run.shelf.names()))
        run.journal.forget(request.durable)
        fresh = run.journal.before(request.steps[0].place) is None
        replies = tuple(self._step(run, request, step, recipe, packet) for step in request.steps)
        self._went_on(request.run)
        return Answer(ask.REPLY, ask.asked(request), holds=tuple(run.shelf.names()), fresh=fresh, replies=replies)

    def _step(self, run: Run, request: Request, step: Step, recipe: str, packet: Packet) -> bytes:
        """Make a step, or repeat what was said when it was made."""
        name = f"{step.name}.{request.client}"
        known = run.journal.find(step.place, name)
        where = f"round {step.place[0] + 1}, {step.phase}"
        if known is not None:
            _LOG.info("%s: answered again", where)
            return to_bytes(known)
        for part, key, content in step.once:
            if content in packet.pieces:
                run.shelf.put(part, key, content, packet.pieces[content])
        message = to_message(packet.piece(step.body), step.once, run.shelf.get) if step.body else None
        kit, before = self._warm(recipe, request), run.journal.before(step.place)
        state, reply = _call(kit, request.client, step, message, before)
        tree = reply_to_tree(reply)
        data = to_bytes(tree)
        run.journal.record(step.place, name, state, tree)
        _LOG.info("%s: done", where)
        return data

    def _missing(self, run: Run, request: Request, packet: Packet) -> tuple[str, ...]:
        """Payloads and trees that were not sent and are not here."""
        wanted = {name for step in request.steps for _, _, name in step.once}
        bodies = {step.body for step in request.steps if step.body}
        absent = {name for name in wanted if name not in packet.pieces and not run.shelf.has(name)}
        return tuple(sorted(absent | {name for name in bodies if name not in packet.pieces}))

    def _recipe(self, run: Run, request: Request, packet: Packet) -> str | None:
        known = run.recipe(request.recipe)
        if known is not None or ask.RECIPE not in packet.pieces:
            return known
        data = packet.pieces[ask.RECIPE]
        if digest(data) != request.recipe:
            raise PacketError("the recipe was damaged on its way")
        write_atomic(run.recipe_file, data)
        return data.decode()

    def _went_on(self, name: str) -> None:
        if name != self._going_on:
            self._remembered.mark_active(name)
            self._going_on = name

    def _run(self, name: str) -> Run:
        if name not in self._runs:
            self._runs = {name: Run(self.folder / name)}  # one at a time is kept in memory
        return self._runs[name]

    def _warm(self, recipe: str, request: Request) -> ClientRuntime:
        """Model, data and whatever the engine has captured, kept from one request to the next."""
        key = (request.recipe, request.scale)
        if self._kit is None or self._kit[0] != key:
            if self._kit is not None:
                self._kit[1].engine.close()
            self._kit = (key, self._build(recipe, request.scale))
        return self._kit[1]


def _call(kit: ClientRuntime, client: int, step: Step, message: Message | None, before: Any) -> tuple[Any, Any]:
    """(state, reply) of one step."""
    phases = kit.world.method.phases_by_name()
    if step.phase not in phases:
        raise PacketError(f"the recipe's method has no phase {step.phase[:80]!r}")
    if not 0 <= client < kit.world.facts.clients:
        raise PacketError(f"no client {client}: the recipe has {kit.world.facts.clients}")
    round_index, position, repeat, stage = step.place
    tasks = {client: step.task} if step.task >= 0 else {}
    plan = RoundPlan(max(step.task, 0), (client,), tasks, drifting=frozenset({client} if step.drifting else ()))
    store = kit.store
    store.clear()
    if before is not None:
        store.put(client, before)
    moment = Moment(round_index, plan, repeat, position, stage)
    ((_, reply),) = kit.engine.exchange(phases[step.phase], (client,), message, moment)
    if isinstance(reply, Absent):
        raise ClientError(client, step.phase, round_index, reply.reason)
    return store.get(client) or {}, reply
