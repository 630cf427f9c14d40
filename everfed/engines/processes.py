"""Clients on all cores of this machine: one worker process per core, one thread each.

Small models do not scale inside one operation, so whole clients run side by side. Workers are forked, so they share
the data; messages, states and replies lie in shared memory. Clients are dealt by size and stolen by idle workers;
replies are handed on in client order, so the result is the eager engine's, bit for bit.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from everfed.core.client import Reply
from everfed.core.context import Place, Setup
from everfed.core.engine import ClientError, Engine
from everfed.core.evaluate import EvalSpec, score_tasks, stacked
from everfed.core.message import MODEL, Message, Model, common, own, unwrap, with_own
from everfed.core.phase import Phase
from everfed.core.stream import RoundPlan
from everfed.core.trainer import Trainer
from everfed.core.tree import Tree
from everfed.engines.eager import CLIENT_FAULTS, BuildModule, ClientStore, call, failed, new_trainer
from everfed.engines.forking import interrupts_wait
from everfed.engines.mailbox import Lane, Mailbox
from everfed.engines.slots import deal
from everfed.errors import described, from_note, note_of

LANES = 2  # clients at a worker at a time: one runs, one waits
REPLY_BYTES = 1 << 30  # replies that may wait for their turn; beyond, clients start in order


class Crew:
    """One worker: its process, its pipe and its lanes of mailboxes.

    While the worker runs a client in one lane, the next may wait in the other, so that it never waits for us.
    """

    def __init__(self, setup: Setup, build_module: BuildModule, broadcast: Mailbox, earlier: list[Crew]) -> None:
        self.lanes = [Lane(Mailbox(), Mailbox()) for _ in range(LANES)]
        self.free = list(range(LANES))
        self.given: deque[tuple[int, int]] = deque()  # (client, lane), in the order in which they will be answered
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        # a fork inherits our ends of all pipes so far; while it held them, no worker would see us go
        ours = [self.pipe, *(crew.pipe for crew in earlier)]
        arguments = (theirs, ours, setup, build_module, broadcast, self.lanes)
        self.process = context.Process(target=serve, args=arguments, daemon=True, name="everfed-worker")
        with interrupts_wait():
            self.process.start()
        theirs.close()

    def send(self, request: dict[str, Any]) -> None:
        self.pipe.send_bytes(json.dumps(request).encode())

    def receive(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.pipe.recv_bytes())
        return answer

    def cause_of_death(self) -> str:
        self.process.join(timeout=5)
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        return f"worker process {self.process.pid} {how}"


class Processes(Engine):
    """workers: how many processes; one per core is best."""

    name = "processes"

    def __init__(self, setup: Setup, store: ClientStore, build_module: BuildModule, workers: int) -> None:
        self.setup, self.store, self._build_module = setup, store, build_module
        self._trainer: Trainer | None = None
        self.broadcast = Mailbox()
        self.crews: list[Crew] = []
        for _ in range(workers):
            self.crews.append(Crew(setup, build_module, self.broadcast, self.crews))
        self._own: dict[int, Tree] = {}  # what of the message is for one client only
        self._sizes: dict[int, int] = {}  # samples of each client when it last trained

    # phases ------------------------------------------------------------------------------------------------------
    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply]]:
        header = None if message is None else self.broadcast.write(unwrap(common(message)))
        self._own = {client: own(message or {}, client) for client in clients}
        call = {"phase": phase.name, "round": place.round, "repeat": place.repeat, "message": header}
        early: dict[int, Reply] = {}
        waiting = list(clients)
        for client, reply in self._run(self._hands(clients), call):
            early[client] = reply
            while waiting and waiting[0] in early:
                yield waiting[0], early.pop(waiting.pop(0))

    def _hands(self, clients: Sequence[int]) -> list[list[int]]:
        """Clients by worker: the large ones first, or in order when their replies would fill the memory."""
        workers = len(self.crews)
        if len(clients) * 4 * self.setup.facts.layout.size > REPLY_BYTES:
            return [list(clients[worker::workers]) for worker in range(workers)]
        return deal({client: self._sizes.get(client, 1) for client in clients}, workers)

    def _run(self, hands: list[list[int]], shared: dict[str, Any]) -> Iterator[tuple[int, Reply]]:
        """Keep every worker busy; yields as they finish."""
        crews = {crew.pipe: crew for crew in self.crews}

        def start(crew: Crew, own: list[int]) -> None:
            hand = own or max(hands, key=len)
            if hand:
                # a thief takes the last, so that clients tend to stay with the worker that has their data at hand
                client = hand.pop(0 if hand is own else -1)
                self._send(crew, client, shared)

        def ahead(crew: Crew, own: list[int]) -> None:
            """A second client waits at the worker, but not one of the last: those go to the first free worker."""
            if own and crew.free and sum(map(len, hands)) > len(crews):
                start(crew, own)

        for give in (start, ahead):
            for crew, hand in zip(self.crews, hands, strict=True):
                give(crew, hand)
        while running := [crew.pipe for crew in self.crews if crew.given]:
            for pipe in wait(running):
                crew = crews[pipe]  # type: ignore[index]
                client, reply = self._receive(crew, shared)
                hand = hands[self.crews.index(crew)]
                if not crew.given:
                    start(crew, hand)
                ahead(crew, hand)
                yield client, reply

    def _send(self, crew: Crew, client: int, shared: dict[str, Any]) -> None:
        state = self.store.get(client)
        lane = crew.free.pop()
        header = crew.lanes[lane].inbox.write({"state": state or {}, "own": self._own[client]})
        held = {"state": None if state is None else header["state"]["tree"], "own": header["own"]["tree"]}
        try:
            crew.send({**shared, **held, "client": client, "lane": lane})
        except OSError as error:
            raise ClientError(client, shared["phase"], shared["round"], crew.cause_of_death()) from error
        crew.given.append((client, lane))

    def _receive(self, crew: Crew, shared: dict[str, Any]) -> tuple[int, Reply]:
        client, lane = crew.given.popleft()
        try:
            answer = crew.receive()
        except (EOFError, OSError) as error:
            raise ClientError(client, shared["phase"], shared["round"], crew.cause_of_death()) from error
        if "error" in answer:
            where = client, shared["phase"], shared["round"]
            raise failed(*where, from_note(answer["note"])) if answer["note"] else ClientError(*where, answer["error"])
        tree = crew.lanes[lane].outbox.read(answer["header"], copy=True)
        crew.free.append(lane)
        self.store.put(client, tree["state"])
        if answer["samples"]:
            self._sizes[client] = answer["samples"]
        return client, Reply(tree["values"], answer["samples"], answer["steps"], answer["loss"])

    # the rest ----------------------------------------------------------------------------------------------------
    def workbench(self) -> Trainer:
        """In this process, made when it is first asked for: most methods never do."""
        self._trainer = self._trainer or new_trainer(self.setup, self._build_module)
        return self._trainer

    def evaluate(self, model: Model, spec: EvalSpec) -> Tensor:
        """Tasks are scored side by side."""
        header = self.broadcast.write({MODEL: dict(model)})
        waiting, rows, running = list(spec.tasks), {}, {}

        def start(crew: Crew) -> None:
            if waiting:
                task = waiting.pop(0)
                one = EvalSpec((task,), spec.seen, spec.split, spec.top_k)
                crew.send({"message": header, "spec": one.to_tree()})
                running[crew.pipe] = (crew, task)

        for crew in self.crews:
            start(crew)
        while running:
            for pipe in wait(list(running)):
                crew, task = running.pop(pipe)  # type: ignore[call-overload]
                rows[task] = self._counts(crew, task)
                start(crew)
        return stacked([rows[task] for task in spec.tasks])

    def _counts(self, crew: Crew, task: int) -> list[int]:
        try:
            answer = crew.receive()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"scoring task {task + 1} failed: {crew.cause_of_death()}") from error
        if "error" in answer:
            if answer["note"]:
                raise from_note(answer["note"])
            raise RuntimeError(f"scoring task {task + 1} failed: {answer['error']}")
        counts: list[int] = answer["counts"][0]
        return counts

    def describe(self) -> dict[str, Any]:
        return {"engine": self.name, "device": "cpu", "precision": "fp32", "threads": 1, "workers": len(self.crews)}

    def close(self) -> None:
        for crew in self.crews:
            crew.pipe.close()
        for crew in self.crews:
            crew.process.join(timeout=2)
            if crew.process.is_alive():
                crew.process.kill()
                crew.process.join()


# a worker process -----------------------------------------------------------------------------------------------------
def serve(
    pipe: Connection,
    inherited: list[Connection],
    setup: Setup,
    build_module: BuildModule,
    broadcast: Mailbox,
    lanes: list[Lane],
) -> None:
    """Answer calls until the other end of the pipe is gone. inherited: the parent's own ends, which are not ours."""
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the parent's to handle
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # what the parent blocked until this was said
    torch.set_num_threads(1)
    worker = Worker(setup, new_trainer(setup, build_module), broadcast, lanes)
    while True:
        try:
            request = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = worker.answer(request)
        except Exception as error:
            note = note_of(error)
            if note is None and not isinstance(error, CLIENT_FAULTS):
                raise
            answer = {"error": described(error), "note": note}
        try:
            pipe.send_bytes(json.dumps(answer).encode())
        except OSError:  # nobody waits for it any more
            return


class Worker:
    """Runs one call at a time."""

    def __init__(self, setup: Setup, trainer: Trainer, broadcast: Mailbox, lanes: list[Lane]) -> None:
        self.setup, self.trainer = setup, trainer
        self.broadcast, self.lanes = broadcast, lanes
        self._phases = setup.method.phases_by_name()
        self._plan = lru_cache(maxsize=1)(setup.stream.round)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        header = request["message"]
        message: Message | None = None if header is None else self.broadcast.read(header, copy=False)
        if "spec" in request:
            spec = EvalSpec.from_tree(request["spec"])
            counts = score_tasks(self.trainer, self.setup.held_out, (message or {})[MODEL], spec)
            return {"counts": counts.tolist()}
        return self._client(request, message)

    def _client(self, request: dict[str, Any], message: Message | None) -> dict[str, Any]:
        plan: RoundPlan = self._plan(request["round"])
        place = Place(request["round"], plan, request["repeat"])
        lane = self.lanes[request["lane"]]
        if message is not None:
            message = with_own(message, lane.inbox.read(request["own"], copy=False))
        state = None if request["state"] is None else lane.inbox.read(request["state"], copy=False)
        phase = self._phases[request["phase"]]
        state, reply = call(self.setup, self.trainer, phase, request["client"], state, message, place)
        header = lane.outbox.write({"state": state, "values": reply.values})
        loss = None if reply.loss is None else float(reply.loss)
        return {"header": header, "samples": reply.samples, "steps": reply.steps, "loss": loss}
