"""Requests of a server that writes them by hand: to one client, of any model, phase and place."""

from __future__ import annotations

from typing import Any

from everfed.core.context import PlaceKey
from everfed.core.message import Message, Model
from everfed.federation.client import RealClient
from everfed.federation.codec import MessageEncoder, to_reply
from everfed.federation.packet import Packet, digest
from everfed.federation.request import RECIPE, Answer, Request, Step

TEXT = "# no recipe\n"


def request(
    message: Message | None = None,
    *,
    phase: str = "train",
    place: PlaceKey = (0, 0, 0, 0),
    task: int = 0,
    run: str = "a1",
    epoch: int = 1,
    client: int = 0,
    recipe: str = TEXT,
    scale: float = 1.0,
) -> Packet:
    """With the recipe and every piece."""
    encoded = MessageEncoder(message).encode(client)
    step = Step(phase, place, task, encoded.name, encoded.once)
    text = recipe.encode()
    header = Request(run, epoch, client, digest(text), scale, (0, 0, 0, 0), (step,)).header()
    pieces = {RECIPE: text, **encoded.payloads}
    return Packet(header, pieces if encoded.body is None else {**pieces, encoded.name: encoded.body})


def ask(site: RealClient, model: Model | None = None, **changes: Any) -> Answer:
    """The client's answer to a request with this model."""
    return Answer.of(site.answer(request(None if model is None else {"model": dict(model)}, **changes)))


def values(answer: Answer) -> dict[str, Any]:
    """The values of the only reply."""
    return to_reply(answer.replies[0]).values
