"""Collected values of one client reach the server's parts and the other clients: malformed ones end nobody's run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from everfed.core.tree import from_bytes, to_bytes
from everfed.federation.packet import Packet
from everfed.federation.phase_options import PhaseOptions
from tests.federation.loop import federated, loop_of
from tests.support.toy import Bench, Norm, Toy

LIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "numbers": lambda tensor: 5.0,
    "text": lambda tensor: "x",
    "another type": lambda tensor: tensor.double() if tensor.dtype != torch.float64 else tensor.float(),
    "another dimension": lambda tensor: tensor[None],
}


@pytest.fixture(autouse=True)
def _no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def changed(value: Any, lie: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, dict):
        return {name: changed(one, lie) for name, one in value.items()}
    return lie(value) if isinstance(value, torch.Tensor) else value


# every method and every lie; all pairs with the slow tests
PAIRS = [(method, name) for method in ("fedweit", "fedomg", "fedcil", "fedas", "glfc") for name in LIES]
QUICK = [pair for pair in PAIRS if pair[0] == "fedweit" or pair[1] in ("numbers", "another dimension")]


@pytest.mark.parametrize(
    ("method", "name"), [pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS]
)
def test_a_client_whose_values_cannot_be_read_is_named_and_the_others_go_on(
    method: str, name: str, tmp_path: Path
) -> None:
    bench = Bench(method, stream=Toy(clients=3, tasks=2, rounds_per_task=1), module=Norm)
    loop = loop_of(bench, tmp_path)

    def lie(client: int, packet: Packet) -> Packet:
        if client != 0 or packet.header["kind"] != "reply":
            return packet
        replies = {piece: from_bytes(data) for piece, data in packet.pieces.items()}
        pieces = {
            piece: to_bytes({**one, "values": changed(one["values"], LIES[name])}) for piece, one in replies.items()
        }
        return Packet(packet.header, pieces)

    loop.after = lie
    outcome = federated(bench, loop, options=PhaseOptions(retry=0.0, tries=2))
    refused = [event for event in outcome.events if event["event"] == "client"]
    assert refused and {event["client"] for event in refused} == {0}
