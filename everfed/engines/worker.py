"""A worker process: waits for calls, runs clients, answers. Everything it needs was inherited when it was forked."""

from __future__ import annotations

import json
import signal
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

import torch

from everfed.core.context import Moment, Setup
from everfed.core.evaluate import EvalSpec, score_tasks
from everfed.core.message import MODEL, Message, with_own
from everfed.core.stream import RoundPlan
from everfed.core.trainer import Trainer
from everfed.engines.base import CLIENT_FAULTS, BuildModule, call, new_trainer
from everfed.engines.mailbox import Lane, Mailbox
from everfed.errors import note_of, place_of


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
            answer = {"error": f"{type(error).__name__}: {error} ({place_of(error)})", "note": note}
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
        moment = Moment(request["round"], plan, request["repeat"])
        lane = self.lanes[request["lane"]]
        if message is not None:
            message = with_own(message, lane.inbox.read(request["own"], copy=False))
        state = None if request["state"] is None else lane.inbox.read(request["state"], copy=False)
        phase = self._phases[request["phase"]]
        state, reply = call(self.setup, self.trainer, phase, request["client"], state, message, moment)
        header = lane.outbox.write({"state": state, "values": reply.values})
        loss = None if reply.loss is None else float(reply.loss)
        return {"header": header, "samples": reply.samples, "steps": reply.steps, "loss": loss}
