"""Messages are made into bytes as rarely as they can be."""

from __future__ import annotations

import pytest
import torch

from everfed.core import tree
from everfed.core.message import Cached, Message, PerClient
from everfed.federation import codec
from everfed.federation.codec import MessageEncoder, to_message
from everfed.federation.packet import digest


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tree.Tree]:
    """Every tree that was made into bytes."""
    seen: list[tree.Tree] = []

    def counted(value: tree.Tree) -> bytes:
        seen.append(value)
        return tree.to_bytes(value)

    monkeypatch.setattr(codec, "to_bytes", counted)
    return seen


def test_what_goes_to_everybody_is_made_once(made: list[tree.Tree]) -> None:
    encoder = MessageEncoder({"model": {"params": Cached(3, torch.ones(4))}, "part": {"n": 1}})
    encoded = [encoder.encode(client) for client in (0, 1, 1)]
    assert encoded[0] == encoded[1] == encoded[2] and len(made) == 2  # the payload and the body
    body = encoded[0].body
    assert body is not None and encoded[0].name == digest(body) == encoder.name(0) == encoder.name(7) and len(made) == 2


def test_what_is_for_one_client_is_made_for_it_and_named_without_being_kept(made: list[tree.Tree]) -> None:
    message: Message = {"part": {"own": PerClient({0: torch.zeros(2), 1: torch.ones(2)}), "all": 5}}
    encoder = MessageEncoder(message)
    first, second = encoder.encode(0), encoder.encode(1)
    assert first.body != second.body and len(made) == 2
    assert (encoder.name(0), encoder.name(1)) == (first.name, second.name) and len(made) == 2
    assert second.body is not None
    read = to_message(second.body, second.once, lambda name: None)
    assert torch.equal(read["part"]["own"], torch.ones(2)) and read["part"]["all"] == 5


def test_nothing_is_sent_in_a_round_without_a_message() -> None:
    encoder = MessageEncoder(None)
    assert encoder.encode(0).body is None and encoder.name(0) == "" and encoder.once == ()
