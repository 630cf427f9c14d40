"""Secure aggregation over packets, sites and journals: the same model as without, and nothing bare on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from everfed.core.client import Reply
from everfed.core.server import Runner
from everfed.core.tree import from_bytes, leaves, map_tensors, to_bytes
from everfed.federation.codec import to_reply
from everfed.federation.engine import Federated, RunIdentity
from everfed.federation.packet import Packet
from everfed.federation.phase_options import PhaseOptions
from everfed.federation.request import Answer
from everfed.federation.transport import Failure
from everfed.privacy.secure_client import MASK, NAME, secured
from everfed.privacy.secure_server import Secured
from everfed.store.clients import ClientStore
from tests.federation.loop import Loop, loop_of
from tests.support.toy import Bench, Norm, Outcome, Toy

pytest.importorskip("flwr", reason="pip install 'everfed[flower]'")
STEP = 2 * 16.0 / (1 << 24)


def protected(bench: Bench, **options: Any) -> Bench:
    plain = bench.build_method
    return replace(bench, method=lambda: secured(plain(), **options))


def run(own: Bench, loop: Loop, options: PhaseOptions | None = None) -> Outcome:
    events: list[dict[str, Any]] = []
    setup = own.setup()
    identity = RunIdentity("a1", 1, "# no recipe\n")
    inner = Federated(setup, own.build_module, loop, identity, options or PhaseOptions(retry=0.0), lambda: (0, 0, 0, 0))
    runner = Runner(setup, Secured(inner, setup, notify=events.append), own.model(), own.evaluation, events.append)
    return Outcome(runner.run(), ClientStore(), events)


@pytest.mark.parametrize("name", ["fedgp+der", "coordinated"])
def test_the_model_is_the_plain_run_s(name: str, tmp_path: Path) -> None:
    bench = Bench(name, stream=Toy(tasks=2, rounds_per_task=1, clients=4), module=Norm)
    outcome = run(protected(bench), loop_of(protected(bench), tmp_path))
    assert torch.allclose(bench.run().params, outcome.params, rtol=0, atol=500 * STEP)
    assert all("absent" not in event for event in outcome.events)


def test_nothing_bare_is_among_what_was_sent(tmp_path: Path) -> None:
    bench = Bench("fedavg", stream=Toy(tasks=1, rounds_per_task=1, clients=3))
    own = protected(bench)
    loop = loop_of(own, tmp_path)
    run(own, loop)
    replies = [to_reply(data) for _, packet in loop.received for data in Answer.of(packet).replies]
    assert len(replies) == 3 * 5 and all(isinstance(reply, Reply) for reply in replies)
    kinds = {leaf.dtype for reply in replies for _, leaf in leaves(reply.values) if isinstance(leaf, torch.Tensor)}
    assert kinds == {torch.uint8, torch.int32, torch.int64}  # no float ever leaves a client
    assert all((reply.samples, reply.steps, reply.loss) == (0, 0, None) for reply in replies)


def test_a_client_that_is_lost_in_the_middle_is_made_up_for(tmp_path: Path) -> None:
    bench = Bench("fedavg", stream=Toy(tasks=1, rounds_per_task=1, clients=5))
    own = protected(bench, threshold=0.6)
    loop = loop_of(own, tmp_path)

    def lose(client: int, packet: Packet) -> Packet | Failure:
        return Failure("gone") if client == 2 and MASK in str(packet.header) else packet

    loop.before = lose
    outcome = run(own, loop, PhaseOptions(deadline=1.0, retry=5.0))
    others = bench.change(stream=replace(bench.stream, cohorts={0: (0, 1, 3, 4)}))
    assert torch.allclose(others.run().params, outcome.params, rtol=0, atol=STEP)
    [event] = [event for event in outcome.events if event["event"] == "phase" and event["phase"] == "train"]
    assert set(event["absent"]) == {"2"}


def test_a_client_with_letters_that_cannot_be_opened_is_left_out_and_the_others_begin_again(tmp_path: Path) -> None:
    """With fresh keys for the same training: the bits are those of a run without the liar."""
    own = protected(Bench("fedavg", stream=Toy(tasks=1, rounds_per_task=1, clients=5)), threshold=0.6)
    loop = loop_of(own, tmp_path)

    def lie(client: int, packet: Packet) -> Packet:
        content = from_bytes(packet.pieces["reply.0"])
        if client == 2 and "letters" in content["values"][NAME]:
            content["values"][NAME]["letters"] = map_tensors(lambda t: t ^ 1, content["values"][NAME]["letters"])
        return Packet(packet.header, {"reply.0": to_bytes(content)})

    loop.after = lie
    outcome = run(own, loop)
    others = own.change(stream=replace(own.stream, cohorts={0: (0, 1, 3, 4)}))
    honest = others.run(lambda setup, store: Secured(others.eager(setup, store), setup))
    assert torch.equal(outcome.params, honest.params)
    [event] = [event for event in outcome.events if event["event"] == "phase" and event["phase"] == "train"]
    assert event["absent"] == {"2": "rejected: malformed: clients 0,1,3,4 cannot use its shares"}
    trained = [packet for _, packet in loop.sent if '"train"' in str(packet.header["steps"])]
    assert len(trained) == 5  # no client trained again
