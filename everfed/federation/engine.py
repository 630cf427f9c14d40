"""The engine of real clients: every phase is a request to each of its clients, over a transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from everfed.core.client import Reply
from everfed.core.context import Place, PlaceKey, Setup
from everfed.core.engine import Absent, ClientError, PhaseCall, opened
from everfed.core.events import Observer
from everfed.core.message import MODEL, Message, Model, unwrap
from everfed.core.phase import TRAIN, Phase, When
from everfed.engines.eager import BuildModule, OneTrainer, new_trainer
from everfed.federation.checking import (
    Limits,
    Reason,
    Refusal,
    check_numbers,
    check_reply,
    expected_reply,
    largest_reply,
    uploaded_tensors,
)
from everfed.federation.codec import EncodedMessage, MessageEncoder, to_reply
from everfed.federation.cross_checks import SampleClaims, find_other_forms, find_outliers
from everfed.federation.packet import Packet, PacketError, digest
from everfed.federation.phase_options import PhaseOptions
from everfed.federation.phase_requests import REJECTED, PhaseRequests
from everfed.federation.request import RECIPE, Answer, Request, Step, fingerprint
from everfed.federation.transport import Transport

OUTLIER = 1000.0  # times the median; honest clients differ by their steps, not by such a factor


@dataclass(frozen=True)
class RunIdentity:
    """Identifies a run to its clients. run: the same for the whole run; epoch: how often its server was started;
    recipe: the text from which clients build method and model."""

    run: str
    epoch: int
    recipe: str
    scale: float = 1.0


@dataclass(frozen=True)
class OutgoingPhase:
    """A phase at its place in the run, with its message encoded."""

    phase: Phase
    place: Place
    encoder: MessageEncoder

    def step(self, client: int) -> Step:
        """The step that `client` is to make."""
        plan, encoder = self.place.plan, self.encoder
        name, task = encoder.name(client), plan.tasks.get(client, -1)
        return Step(self.phase.name, self.place.key, task, name, encoder.once, client in plan.drifting)


Early = dict[int, tuple[Step, Reply | Absent]]  # by client: replies that came with those of an earlier phase


class Federated(OneTrainer):
    """Holds no client state. durable: the place from which the run would resume if the server were killed now.
    outlier: how many times as long as the median client's a value may be, 0 for any. allowed: the number of samples
    that a client may claim, None where it is not known."""

    batches_phases = True

    def __init__(
        self,
        setup: Setup,
        build_module: BuildModule,
        transport: Transport,
        identity: RunIdentity,
        options: PhaseOptions,
        durable: Callable[[], PlaceKey],
        notify: Observer = lambda event: None,
        outlier: float = OUTLIER,
        allowed: Callable[[int], int | None] = lambda client: None,
    ) -> None:
        self.setup, self.transport, self.identity = setup, transport, identity
        self.outlier, self.claims = outlier, SampleClaims(setup, allowed)
        self.options, self.durable, self.notify = options, durable, notify
        self.trainer = new_trainer(setup, build_module, "cpu")
        self.name = transport.name
        first = setup.facts.layout.read(build_module())
        self._model: Model = {**first, "params": first["params"][: setup.facts.layout.shared]}
        self._recipe = identity.recipe.encode()
        self._holds: dict[int, frozenset[str]] = {}  # client -> the payloads that it has
        self._sent_recipe: set[int] = set()  # clients that have the recipe
        self._batched: tuple[OutgoingPhase, ...] = ()  # phases to send with the next one
        self._early: dict[PlaceKey, Early] = {}
        self._given_up: set[int] = set()  # clients that were given up in the last phase they were in
        self.bytes_sent = self.bytes_received = 0

    def batch(self, calls: Sequence[PhaseCall]) -> None:
        self._batched = tuple(OutgoingPhase(one.phase, one.place, MessageEncoder(one.message)) for one in calls)

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply | Absent]]:
        outgoing = OutgoingPhase(phase, place, MessageEncoder(message))
        self._model = _sent_model(message) or self._model
        early = self._early.pop(place.key, None)
        replies = self._send(outgoing, clients) if early is None else self._early_replies(outgoing, early)
        readable = {client: self._opened(outgoing, message, client, reply) for client, reply in replies.items()}
        return iter(self._usable(self._checked(outgoing, readable), phase, place).items())

    def _opened(
        self, outgoing: OutgoingPhase, message: Message | None, client: int, reply: Reply | Absent
    ) -> Reply | Absent:
        """A reply as it is checked: what parts compressed is decoded."""
        if isinstance(reply, Absent):
            return reply
        try:
            return opened(self.setup, outgoing.phase, outgoing.place, message, reply)
        except ValueError as error:
            return self._reject(client, outgoing.phase, Refusal(Reason.MALFORMED, str(error)))

    def _send(self, outgoing: OutgoingPhase, clients: Sequence[int]) -> dict[int, Reply | Absent]:
        """Send this phase together with the batched ones, whose replies are stored until the runner comes to them."""
        phases, self._batched = (outgoing, *self._batched), ()

        def write(client: int, lacks: tuple[str, ...]) -> Packet:
            messages = [one.encoder.encode(client) for one in phases]
            return self._packet(self._request(client, phases), messages, lacks)

        def read(client: int, answer: Answer) -> list[Reply]:
            return self._replies(client, self._request(client, phases), answer)

        name = outgoing.phase.name
        largest = sum(largest_reply(self.setup, one.phase, self._model) for one in phases)
        self.transport.limit = 2 * largest  # twice, for Flower's own records
        requests = PhaseRequests(name, clients, self.transport, self.options, write, read, self.notify, self._given_up)
        found = requests.run()
        self._early = {}
        for index, one in enumerate(phases[1:], start=1):
            early = {c: answer if isinstance(answer, Absent) else answer[index] for c, answer in found.items()}
            self._early[one.place.key] = {c: (one.step(c), answer) for c, answer in early.items()}
        return {c: answer if isinstance(answer, Absent) else answer[0] for c, answer in found.items()}

    def _early_replies(self, outgoing: OutgoingPhase, early: Early) -> dict[int, Reply | Absent]:
        """The replies that came with those of an earlier phase."""
        if any(outgoing.step(client) != step for client, (step, _) in early.items()):
            raise RuntimeError(f"phase {outgoing.phase.name!r} was sent early, but its message has changed since")
        return {client: reply for client, (_, reply) in early.items()}

    def _checked(self, outgoing: OutgoingPhase, replies: dict[int, Reply | Absent]) -> dict[int, Reply | Absent]:
        """Replies that may not be used are replaced by Absent and reported."""
        phase = outgoing.phase
        expected = expected_reply(self.setup, phase, outgoing.place, self._model)
        checked = dict(replies)

        def refuse(refusals: Mapping[int, Refusal]) -> dict[int, Reply]:
            """Those that are left."""
            checked.update({client: self._reject(client, phase, refusal) for client, refusal in refusals.items()})
            return {client: reply for client, reply in checked.items() if isinstance(reply, Reply)}

        single = {client: check_reply(reply, expected) for client, reply in refuse({}).items()}
        usable = refuse({client: refusal for client, refusal in single.items() if refusal is not None})
        usable = refuse(find_other_forms(expected, usable))
        if self.outlier and phase.when is not When.INSIDE:
            unmoved = uploaded_tensors(self.setup, outgoing.place, self._model) if phase.name == TRAIN else {}
            usable = refuse(find_outliers(expected, unmoved, usable, self.outlier))
        return {**checked, **(self._capped(outgoing, usable) if phase.name == TRAIN else {})}

    def _capped(self, outgoing: OutgoingPhase, found: dict[int, Reply]) -> dict[int, Reply]:
        """The replies that claim more samples than they count for, with that number."""
        claims = {client: reply.samples for client, reply in found.items() if reply.samples}
        capped = self.claims.capped(outgoing.phase, outgoing.place, claims)
        for client, samples in capped.items():
            text = f"client {client} claims {claims[client]} samples and counts for {samples}; see federation.samples"
            self.notify({"event": "warning", "message": text})
        return {client: replace(found[client], samples=samples) for client, samples in capped.items()}

    def _reject(self, client: int, phase: Phase, refusal: Refusal) -> Absent:
        event = {"event": "client", "client": client, "phase": phase.name, "kind": REJECTED}
        self.notify({**event, "reason": str(refusal)})
        return Absent(REJECTED, str(refusal))

    def _usable(self, replies: dict[int, Reply | Absent], phase: Phase, place: Place) -> dict[int, Reply | Absent]:
        """Raises ClientError when fewer replies can be used than a phase needs: one, or federation.minimum."""
        absent = {client: reply for client, reply in replies.items() if isinstance(reply, Absent)}
        left = len(replies) - len(absent)
        if absent and (left == 0 or not self.options.suffices(left, len(replies))):
            client, why = next(iter(absent.items()))
            rest = "so did all others" if left == 0 else f"{left} replies are left, fewer than federation.minimum"
            raise ClientError(client, phase.name, place.round, f"{why.kind}: {why.reason}; {rest}")
        return replies

    def _request(self, client: int, phases: Sequence[OutgoingPhase]) -> Request:
        steps, known = tuple(one.step(client) for one in phases), self.identity
        return Request(known.run, known.epoch, client, digest(self._recipe), known.scale, self.durable(), steps)

    def _packet(self, request: Request, messages: Sequence[EncodedMessage], lacks: tuple[str, ...]) -> Packet:
        """The request with the pieces that this client does not hold."""
        client = request.client
        holds = self._holds.get(client, frozenset()) - set(lacks)
        pieces = {name: data for one in messages for name, data in one.payloads.items() if name not in holds}
        pieces |= {one.name: one.body for one in messages if one.body is not None}
        if client not in self._sent_recipe or RECIPE in lacks:
            pieces[RECIPE] = self._recipe
            self._sent_recipe.add(client)
        self.bytes_sent += sum(map(len, pieces.values()))
        return Packet(request.header(), pieces)

    def _replies(self, client: int, request: Request, answer: Answer) -> list[Reply]:
        """Raises PacketError for an answer to another request, or one that holds no replies."""
        self.bytes_received += sum(map(len, answer.replies))
        if answer.request != fingerprint(request) or len(answer.replies) != len(request.steps):
            raise PacketError("it answered another request")
        replies = [to_reply(data) for data in answer.replies]
        if answer.fresh and client in self._holds:
            self.notify({"event": "warning", "message": f"client {client} came back without its state"})
        self._holds[client] = frozenset(answer.holds)
        return replies

    # the rest ----------------------------------------------------------------------------------------------------
    def refusal(self, model: Model) -> str:
        return next((str(bad) for name, value in model.items() if (bad := check_numbers(name, value, Limits()))), "")

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
    """The shared model, if the message contains it."""
    return unwrap({MODEL: message[MODEL]})[MODEL] if message and MODEL in message else None
