"""A federation in this process: packets go to sites on this disk, through frames, and things can go wrong."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from everfed.core.context import PlaceKey, Setup
from everfed.core.server import Runner, RunState
from everfed.engines.eager import Eager
from everfed.federation import packet as wire
from everfed.federation.client import ClientRuntime, Identity, RealClient
from everfed.federation.engine import Federated, RunIdentity
from everfed.federation.packet import Packet
from everfed.federation.phase_options import PhaseOptions
from everfed.federation.transport import Failure
from everfed.store.clients import ClientStore
from tests.support.toy import Bench, Outcome

Fault = Callable[[int, Packet], Packet | Failure | None]  # what arrives instead of the answer; None: nothing does


def framed(packet: Packet) -> Packet:
    """What arrives at the other end of a socket."""
    here, there = socket.socketpair()
    with here, there:
        sender = threading.Thread(target=wire.send, args=(here, packet))
        sender.start()
        received = wire.receive(there)
        sender.join()
    return received


def runtime(bench: Bench) -> ClientRuntime:
    setup, store = bench.setup(), ClientStore()
    return ClientRuntime(setup, Eager(setup, store, bench.build_module), store)


def site(bench: Bench, folder: Path, client: int) -> RealClient:
    return RealClient(folder / str(client), Identity(f"site-{client}", client), lambda recipe, scale: runtime(bench))


class Loop:
    """Answers at the next `receive`. before: may answer instead of the site; after: may replace its answer. away: the
    clients that are not connected."""

    name = "loop"
    limit = 0

    def __init__(self, sites: dict[int, RealClient]) -> None:
        self.sites = sites
        self.sent: list[tuple[int, Packet]] = []
        self.received: list[tuple[int, Packet]] = []
        self.before: Fault | None = None
        self.after: Fault | None = None
        self.away: set[int] = set()
        self._answers: list[tuple[str, Packet | Failure]] = []
        self._tickets = 0

    def connected(self) -> frozenset[int]:
        return frozenset(self.sites) - self.away

    def send(self, client: int, packet: Packet, kind: str) -> str:
        self._tickets += 1
        ticket = str(self._tickets)
        self.sent.append((client, packet))
        answer = self.before(client, packet) if self.before else packet
        if answer is packet:
            reply = framed(self.sites[client].answer(framed(packet)))
            self.received.append((client, reply))
            answer = self.after(client, reply) if self.after else reply
        if answer is not None:
            self._answers.append((ticket, answer))
        return ticket

    def receive(self) -> list[tuple[str, Packet | Failure]]:
        answers, self._answers = self._answers, []
        if not answers:
            time.sleep(0.005)  # whoever waits asks again at once
        return answers

    def forget(self, tickets: list[str]) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing to let go of."""


def federated(
    bench: Bench,
    loop: Loop,
    *,
    epoch: int = 1,
    options: PhaseOptions | None = None,
    state: RunState | None = None,
    stop: Callable[[RunState], None] = lambda state: None,
    durable: Callable[[RunState], bool] = lambda state: True,
) -> Outcome:
    """A run over `loop`. stop: may raise after a phase, as a kill would; durable: which states a checkpoint keeps."""
    setup = bench.setup()
    events: list[dict[str, object]] = []
    saved: list[PlaceKey] = [state.place if state is not None else (0, 0, 0, 0)]

    def save(reached: RunState, task_end: bool) -> None:
        if durable(reached):
            saved.append(reached.place)
        stop(reached)

    engine = Federated(
        setup,
        bench.build_module,
        loop,
        RunIdentity("a1", epoch, "# no recipe\n"),
        options or PhaseOptions(retry=0.0),
        lambda: saved[-1],
        events.append,
    )
    runner = Runner(setup, engine, bench.model(), bench.evaluation, events.append, save, state)
    runner.run()
    return Outcome(runner.state, ClientStore(), events)


def loop_of(bench: Bench, folder: Path) -> Loop:
    return Loop({client: site(bench, folder, client) for client in range(bench.stream.clients)})


def states(setup: Setup, folder: Path) -> dict[int, dict[str, object]]:
    """What each client remembers at the end, read from its disk by a new process."""
    from everfed.federation.journal import Journal

    found = {}
    for client in range(setup.facts.clients):
        last = Journal(folder / str(client) / "a1" / "steps").before((1 << 30, 0, 0, 0))
        if last is not None:
            found[client] = last
    return found
