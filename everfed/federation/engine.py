"""The engine whose clients are real: every phase is a request to each of its clients, over a transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everfed.core.client import Reply
from everfed.core.engine import Absent, ClientError
from everfed.core.fit import Trainer
from everfed.core.message import MODEL, Message, unwrap
from everfed.core.part import Model
from everfed.core.phase import Phase
from everfed.core.score import Exam, score_tasks
from everfed.core.world import Moment, Place, World
from everfed.engines.base import BuildModule, new_trainer
from everfed.federation import request as ask
from everfed.federation.asking import REJECTED, Asking, Notify
from everfed.federation.checking import Arrived, Desk, expected_reply
from everfed.federation.codec import Letter, Post, to_reply
from everfed.federation.packet import Packet, PacketError, digest
from everfed.federation.patience import Patience
from everfed.federation.request import Answer, Request, Step
from everfed.federation.transport import Transport


@dataclass(frozen=True)
class RunIdentity:
    """What tells clients which run this is. run: for its whole life; epoch: counts the lives of its server; recipe: its
    text, from which clients build method and model."""

    run: str
    epoch: int
    recipe: str
    scale: float = 1.0


class Federated:
    """Keeps no client's state. durable: from where the run would go on if it were killed now."""

    def __init__(
        self,
        world: World,
        build_module: BuildModule,
        transport: Transport,
        identity: RunIdentity,
        patience: Patience,
        durable: Callable[[], Place],
        notify: Notify = lambda event: None,
        device: str = "cpu",
    ) -> None:
        self.world, self.transport, self.identity = world, transport, identity
        self.patience, self.durable, self.notify = patience, durable, notify
        self.trainer = new_trainer(world, build_module, device)
        self.name = transport.name
        first = world.facts.layout.read(build_module())
        self._model: Model = {**first, "params": first["params"][: world.facts.layout.shared]}
        self._recipe = identity.recipe.encode()
        self._holds: dict[int, frozenset[str]] = {}  # what each client said it holds
        self._told: set[int] = set()  # the clients that were sent the recipe
        self.bytes_sent = self.bytes_received = 0

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, moment: Moment
    ) -> Iterator[tuple[int, Reply | Absent]]:
        post = Post(message)
        self._model = _sent_model(message) or self._model
        desk = Desk(expected_reply(self.world, phase, moment, self._model, self.identity.run))

        def write(client: int, lacks: tuple[str, ...]) -> Packet:
            letter = post.letter(client)
            return self._packet(self._request(client, phase, moment, letter), letter, lacks)

        def read(client: int, answer: Answer) -> Reply | Absent:
            reply = self._reply(client, self._request(client, phase, moment, post.letter(client)), answer)
            refusal = desk.take(Arrived(client, desk.expected.call, reply))
            return Absent(REJECTED, str(refusal)) if refusal else reply

        asking = Asking(phase.name, clients, self.transport, self.patience, write, read, self.notify)
        return iter(self._usable(asking.run(), phase, moment).items())

    def _usable(self, answers: dict[int, Reply | Absent], phase: Phase, moment: Moment) -> dict[int, Reply | Absent]:
        """Raises ClientError when nobody's answer can be used: a round needs one."""
        absent = {client: answer for client, answer in answers.items() if isinstance(answer, Absent)}
        if len(absent) == len(answers):
            client, why = next(iter(absent.items()))
            raise ClientError(client, phase.name, moment.round, f"{why.kind}: {why.reason}; so did all others")
        return answers

    def _request(self, client: int, phase: Phase, moment: Moment, letter: Letter) -> Request:
        task = moment.plan.tasks.get(client, -1)
        body = "" if letter.body is None else digest(letter.body)
        step = Step(phase.name, moment.place, task, body, letter.once, client in moment.plan.drifting)
        known = self.identity
        return Request(known.run, known.epoch, client, digest(self._recipe), known.scale, self.durable(), (step,))

    def _packet(self, request: Request, letter: Letter, lacks: tuple[str, ...]) -> Packet:
        """The request, with what this client does not hold."""
        client = request.client
        holds = self._holds.get(client, frozenset())
        pieces = {name: data for name, data in letter.payloads.items() if name not in holds or name in lacks}
        if letter.body is not None:
            pieces[digest(letter.body)] = letter.body
        if client not in self._told or ask.RECIPE in lacks:
            pieces[ask.RECIPE] = self._recipe
            self._told.add(client)
        self.bytes_sent += sum(map(len, pieces.values()))
        return Packet(request.header(), pieces)

    def _reply(self, client: int, request: Request, answer: Answer) -> Reply:
        """Raises PacketError for an answer to something else, or one that is no reply."""
        self.bytes_received += sum(map(len, answer.replies))
        if answer.request != ask.asked(request) or len(answer.replies) != len(request.steps):
            raise PacketError("it answered something else than it was asked")
        reply = to_reply(answer.replies[0])
        if answer.fresh and client in self._holds:
            self.notify({"event": "warning", "message": f"client {client} came back without its state"})
        self._holds[client] = frozenset(answer.holds)
        return reply

    # the rest ----------------------------------------------------------------------------------------------------
    def workbench(self) -> Trainer:
        return self.trainer

    def evaluate(self, model: Model, exam: Exam) -> Tensor:
        return score_tasks(self.trainer, self.world.held_out, model, exam)

    def describe(self) -> dict[str, Any]:
        return {
            "engine": self.name,
            "device": str(self.trainer.device),
            "precision": self.trainer.precision,
            "threads": torch.get_num_threads(),
            "piece_bytes_sent": self.bytes_sent,
            "piece_bytes_received": self.bytes_received,
        }

    def close(self) -> None:
        self.transport.close()


def _sent_model(message: Message | None) -> Model | None:
    """The shared model, where a message carries it."""
    return unwrap({MODEL: message[MODEL]})[MODEL] if message and MODEL in message else None
