"""The engine whose clients are real: every phase is a request to each of its clients, over a transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from everfed.core.client import Reply
from everfed.core.context import Moment, Place, World
from everfed.core.engine import Absent, ClientError, PhaseCall
from everfed.core.message import MODEL, Message, unwrap
from everfed.core.part import Model
from everfed.core.phase import Phase
from everfed.engines.base import BuildModule, OneTrainer, new_trainer
from everfed.federation import request as ask
from everfed.federation.phase_requests import REJECTED, PhaseRequests, Notify
from everfed.federation.checking import Arrived, ReplyChecker, expected_reply, largest_reply
from everfed.federation.codec import EncodedMessage, MessageEncoder, to_reply
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


@dataclass(frozen=True)
class OutgoingPhase:
    """A phase at its moment, with its letters."""

    phase: Phase
    moment: Moment
    post: MessageEncoder

    def step(self, client: int) -> Step:
        """What `client` is asked."""
        plan, post = self.moment.plan, self.post
        task = plan.tasks.get(client, -1)
        return Step(self.phase.name, self.moment.place, task, post.name(client), post.once, client in plan.drifting)


Early = dict[int, tuple[Step, Reply | Absent]]  # answers that came with those of an earlier phase, by client


class Federated(OneTrainer):
    """Keeps no client's state. durable: from where the run would go on if it were killed now."""

    batches_phases = True

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
        self._ahead: tuple[OutgoingPhase, ...] = ()
        self._early: dict[Place, Early] = {}
        self._hopeless: set[int] = set()  # the clients that were given up when they were last asked
        self.bytes_sent = self.bytes_received = 0

    def batch(self, calls: Sequence[PhaseCall]) -> None:
        self._ahead = tuple(OutgoingPhase(one.phase, one.moment, MessageEncoder(one.message)) for one in calls)

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, moment: Moment
    ) -> Iterator[tuple[int, Reply | Absent]]:
        errand = OutgoingPhase(phase, moment, MessageEncoder(message))
        self._model = _sent_model(message) or self._model
        known = self._early.pop(moment.place, None)
        answers = self._ask(errand, clients) if known is None else self._remembered(errand, known)
        return iter(self._usable(self._checked(errand, answers), phase, moment).items())

    def _ask(self, errand: OutgoingPhase, clients: Sequence[int]) -> dict[int, Reply | Absent]:
        """Ask for this errand and for those that can travel with it, whose answers are kept until their turn."""
        errands, self._ahead = (errand, *self._ahead), ()

        def write(client: int, lacks: tuple[str, ...]) -> Packet:
            letters = [one.post.letter(client) for one in errands]
            return self._packet(self._request(client, errands), letters, lacks)

        def read(client: int, answer: Answer) -> list[Reply]:
            return self._replies(client, self._request(client, errands), answer)

        phase = errand.phase.name
        self.transport.limit = 2 * len(errands) * largest_reply(self._model)  # twice: what it is wrapped in
        asking = PhaseRequests(phase, clients, self.transport, self.patience, write, read, self.notify, self._hopeless)
        found = asking.run()
        self._early = {}
        for index, one in enumerate(errands[1:], start=1):
            kept = {c: answer if isinstance(answer, Absent) else answer[index] for c, answer in found.items()}
            self._early[one.moment.place] = {c: (one.step(c), answer) for c, answer in kept.items()}
        return {c: answer if isinstance(answer, Absent) else answer[0] for c, answer in found.items()}

    def _remembered(self, errand: OutgoingPhase, known: Early) -> dict[int, Reply | Absent]:
        """Answers that came with those of an earlier phase."""
        if any(errand.step(client) != step for client, (step, _) in known.items()):
            raise RuntimeError(f"phase {errand.phase.name!r} was asked for ahead, but with another message than it has")
        return {client: answer for client, (_, answer) in known.items()}

    def _checked(self, errand: OutgoingPhase, answers: dict[int, Reply | Absent]) -> dict[int, Reply | Absent]:
        """With what may not be used left out, and told."""
        desk = ReplyChecker(expected_reply(self.world, errand.phase, errand.moment, self._model, self.identity.run))
        checked: dict[int, Reply | Absent] = {}
        for client, answer in answers.items():
            checked[client] = answer
            refusal = None if isinstance(answer, Absent) else desk.take(Arrived(client, desk.expected.call, answer))
            if refusal is not None:
                checked[client] = Absent(REJECTED, str(refusal))
                what = {"phase": errand.phase.name, "kind": REJECTED, "reason": str(refusal)}
                self.notify({"event": "client", "client": client, **what})
        return checked

    def _usable(self, answers: dict[int, Reply | Absent], phase: Phase, moment: Moment) -> dict[int, Reply | Absent]:
        """Raises ClientError when fewer answers can be used than a phase needs: one, or federation.minimum."""
        absent = {client: answer for client, answer in answers.items() if isinstance(answer, Absent)}
        left = len(answers) - len(absent)
        if absent and (left == 0 or not self.patience.suffices(left, len(answers))):
            client, why = next(iter(absent.items()))
            rest = "so did all others" if left == 0 else f"{left} answers are left, federation.minimum asks for more"
            raise ClientError(client, phase.name, moment.round, f"{why.kind}: {why.reason}; {rest}")
        return answers

    def _request(self, client: int, errands: Sequence[OutgoingPhase]) -> Request:
        steps, known = tuple(errand.step(client) for errand in errands), self.identity
        return Request(known.run, known.epoch, client, digest(self._recipe), known.scale, self.durable(), steps)

    def _packet(self, request: Request, letters: Sequence[EncodedMessage], lacks: tuple[str, ...]) -> Packet:
        """The request, with what this client does not hold."""
        client = request.client
        holds = self._holds.get(client, frozenset()) - set(lacks)
        pieces = {name: data for letter in letters for name, data in letter.payloads.items() if name not in holds}
        pieces |= {letter.name: letter.body for letter in letters if letter.body is not None}
        if client not in self._told or ask.RECIPE in lacks:
            pieces[ask.RECIPE] = self._recipe
            self._told.add(client)
        self.bytes_sent += sum(map(len, pieces.values()))
        return Packet(request.header(), pieces)

    def _replies(self, client: int, request: Request, answer: Answer) -> list[Reply]:
        """Raises PacketError for an answer to something else, or one that holds no replies."""
        self.bytes_received += sum(map(len, answer.replies))
        if answer.request != ask.asked(request) or len(answer.replies) != len(request.steps):
            raise PacketError("it answered something else than it was asked")
        replies = [to_reply(data) for data in answer.replies]
        if answer.fresh and client in self._holds:
            self.notify({"event": "warning", "message": f"client {client} came back without its state"})
        self._holds[client] = frozenset(answer.holds)
        return replies

    # the rest ----------------------------------------------------------------------------------------------------
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
