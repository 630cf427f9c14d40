"""One client of several that tries to end a run, to hold it, or to make everybody's honest replies unusable."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from everfed.core.client import Reply
from everfed.core.tree import to_bytes
from everfed.federation.codec import reply_to_tree, to_reply
from everfed.federation.packet import Packet
from everfed.federation.phase_options import PhaseOptions
from everfed.federation.request import MISSING, REPLY, Answer, Request, fingerprint
from tests.federation.loop import Loop, federated, loop_of
from tests.support.toy import Bench, Toy

LIAR = 4
STREAM = Toy(clients=5, tasks=1, rounds_per_task=4)


@pytest.fixture(autouse=True)
def _no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_a_client_that_asks_for_more_without_end_is_given_up(tmp_path: Path) -> None:
    """Every answer names another piece that it lacks; it was sent 14,252 requests in 20 seconds."""
    bench, names = Bench("fedavg", stream=STREAM), count()
    loop = loop_of(bench, tmp_path)
    asked = 0

    def ask_for_more(client: int, packet: Packet) -> Packet:
        nonlocal asked
        if client != LIAR:
            return packet
        asked += 1
        assert asked < 200, "the server sends requests without end"
        return Answer(MISSING, fingerprint(Request.of(packet)), missing=(f"piece {next(names)}",)).packet()

    loop.before = ask_for_more
    outcome = federated(bench, loop, options=PhaseOptions(retry=0.0, tries=3))
    assert outcome.state.round == STREAM.rounds and asked < 25
    refused = [e for e in outcome.events if e["event"] == "client" and e.get("given_up")]
    assert refused and "asks for what it was sent" in str(refused[0]["reason"])


def test_a_loss_that_no_float_holds_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    bench = Bench("fedavg", stream=STREAM)
    loop = loop_of(bench, tmp_path)
    lying(loop, lambda reply: replace(reply, loss=1e39))
    outcome = federated(bench, loop)
    refused = [event for event in outcome.events if event["event"] == "client"]
    assert len(refused) == STREAM.rounds and all("too large: a loss of 1e+39" in str(e["reason"]) for e in refused)


def lying(loop: Loop, lie: Callable[[Reply], Reply], liar: int = LIAR) -> None:
    """The liar sends `lie(its reply)` whenever it has trained."""

    def after(client: int, packet: Packet) -> Packet:
        if client != liar or packet.header["kind"] != REPLY:
            return packet
        made = {name: to_reply(data) for name, data in packet.pieces.items()}
        said = {name: lie(reply) if reply.steps else reply for name, reply in made.items()}
        return Packet(packet.header, {name: to_bytes(reply_to_tree(reply)) for name, reply in said.items()})

    loop.after = after


def with_value(path: str, value: float) -> Callable[[Reply], Reply]:
    """The reply with every number of one of its values replaced."""
    part, key = path.split("/")

    def lie(reply: Reply) -> Reply:
        old: Any = reply.values[part].get(key)
        if old is None:
            return reply
        new = torch.full_like(old, value) if isinstance(old, Tensor) else value
        return replace(reply, values={**reply.values, part: {**reply.values[part], key: new}})

    return lie


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("scaffold", "scaffold/change"),
        ("fedcurv", "fedcurv/u"),
        ("fedcurv", "fedcurv/v"),
        ("fednova", "fednova/update"),
        ("fednova", "fednova/steps"),
    ],
)
@pytest.mark.parametrize("value", [9.9e7, 9.9e4])
def test_whatever_is_added_up_is_compared_with_what_the_others_send(
    method: str, path: str, value: float, tmp_path: Path
) -> None:
    """Just below the largest number that any reply may hold. Taken in, it makes the model so large that everybody's
    honest replies are refused, and the run ends."""
    bench = Bench(method, stream=STREAM)
    loop = loop_of(bench, tmp_path)
    lying(loop, with_value(path, value))
    outcome = federated(bench, loop)
    refused = [event for event in outcome.events if event["event"] == "client"]
    assert {event["client"] for event in refused} == {LIAR}
    assert any(f"outlier: {path}" in str(event["reason"]) for event in refused), json.dumps(refused)
    assert float(outcome.params.abs().max()) < 100


def test_a_model_that_nobody_could_train_is_not_adopted(tmp_path: Path) -> None:
    """Of two clients either may be the liar, so nothing is compared; FedNova's model is the product of two values."""
    bench = Bench("fednova", stream=Toy(clients=2, tasks=1, rounds_per_task=3))
    loop = loop_of(bench, tmp_path)
    lying(loop, lambda reply: with_value("fednova/update", 9e7)(with_value("fednova/steps", 9e7)(reply)), liar=1)
    outcome = federated(bench, loop)
    assert outcome.state.round == 3 and torch.equal(outcome.params, bench.model()["params"])
    said = [str(event["message"]) for event in outcome.events if event["event"] == "warning"]
    assert len(said) == 3 and "is not adopted: too large: params holds 2.03e+15" in said[0]
