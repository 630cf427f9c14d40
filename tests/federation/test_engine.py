"""The engine of real clients, in one process: packets, journals and shelves give the eager engine's bits."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from everfed.core import tree
from everfed.core.context import TrainOptions
from everfed.core.engine import ClientError
from everfed.core.evaluate import EvalOptions
from everfed.core.method import Method
from everfed.core.optimizer import Optimizer
from everfed.core.server import RunState
from everfed.federation import request as wire
from everfed.federation.client import STEP_FAILED, ClientRuntime, Identity, RealClient
from everfed.federation.packet import Packet, PacketError
from everfed.federation.phase_options import PhaseOptions
from everfed.federation.request import Answer, Request
from everfed.federation.transport import Failure
from everfed.methods import registry as methods
from everfed.methods.monitor import FeatureShift
from tests.federation.loop import Loop, federated, loop_of, site, states
from tests.support.toy import Bench, Norm, Outcome, Paused, Toy, comparable
from tests.support.wire import crossed


def assert_same(bench: Bench, eager: Outcome, outcome: Outcome, folder: Path) -> None:
    """The same bits on the server and on every client's disk."""
    assert tree.equal(comparable(eager.state), comparable(outcome.state))
    remembered = states(bench.setup(), folder)
    assert remembered.keys() == eager.clients.keys()
    assert all(tree.equal(remembered[client], eager.clients[client]) for client in remembered)


@pytest.fixture(autouse=True)
def _no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls a plug here, and a shared disk takes its time over hundreds of small files."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# parity --------------------------------------------------------------------------------------------------------------
BY_DEFAULT = ("fedavg", "fedgp+der", "fedgp+der+compress", "fedssi", "coordinated", "stamp", "fedweit", "fedala", "er")
PRESETS = [
    *BY_DEFAULT,
    *(pytest.param(name, marks=pytest.mark.slow) for name in methods.names() if name not in BY_DEFAULT),
]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_equals_eager_bit_for_bit(name: str, tmp_path: Path) -> None:
    bench = Bench(name)
    assert_same(bench, bench.run(), federated(bench, loop_of(bench, tmp_path)), tmp_path)


def test_what_clients_report_to_a_monitor_is_the_same(tmp_path: Path) -> None:
    known = methods.build("er")
    bench = Bench(lambda: Method(known.name, (*known.parts, FeatureShift(samples=8))))
    eager, outcome = bench.run(), federated(bench, loop_of(bench, tmp_path))
    assert_same(bench, eager, outcome, tmp_path)
    here, there = ([one for one in run.events if one["event"] == "measure"] for run in (eager, outcome))
    assert here == there != []


@pytest.mark.parametrize(
    "train",
    [
        TrainOptions(1, 5, Optimizer(lr=0.05, momentum=0.9, state="kept")),
        TrainOptions(1, 5, Optimizer(lr=0.05), sync_every=2),
        TrainOptions(1, 5, Optimizer(lr=0.05), batchnorm="local"),
    ],
    ids=["momentum kept", "equalised", "local statistics"],
)
def test_every_way_of_keeping_things_on_the_client(train: TrainOptions, tmp_path: Path) -> None:
    stream = Toy(clients=2, augmented=True, cohorts={1: (1,), 2: (0,)})
    bench = Bench("fedgp+der", stream=stream, module=Norm, train=train, evaluation=EvalOptions(every=2))
    assert_same(bench, bench.run(), federated(bench, loop_of(bench, tmp_path)), tmp_path)


def test_each_version_of_the_model_is_sent_to_a_client_once(tmp_path: Path) -> None:
    bench = Bench("fedgp+der")
    loop = loop_of(bench, tmp_path)
    outcome = federated(bench, loop)
    sent = sum(len(data) for _, packet in loop.sent for data in packet.pieces.values())
    payload = sum(outcome.state.traffic.down.values())
    headers = sent - payload  # of the trees, and the recipe
    assert 0 < headers < 700 * len(loop.sent)
    payloads = {name for _, packet in loop.sent for step in packet.json("steps") for _, _, name in step[4]}
    arrived = Counter((client, name) for client, packet in loop.sent for name in packet.pieces if name in payloads)
    assert set(arrived.values()) == {1}


def test_phases_that_need_nothing_from_each_other_travel_together(tmp_path: Path) -> None:
    """FedSSI's anchor with the first training; STAMP's exemplars, which are silent, with the last one of a task."""
    for name, merged in (("fedssi", {("anchor", "train")}), ("stamp", {("train", "exemplars")})):
        bench = Bench(name)
        loop = loop_of(bench, tmp_path / name)
        assert_same(bench, bench.run(), federated(bench, loop), tmp_path / name)
        together = {tuple(step[0] for step in packet.json("steps")) for _, packet in loop.sent}
        assert merged <= together


# faults --------------------------------------------------------------------------------------------------------------
def once(faults: dict[tuple[int, int], Any]) -> Any:
    """A fault for the first packets to (client, round) that it names."""

    def strike(client: int, packet: Packet) -> Any:
        steps = packet.header.get("steps")
        where = (client, json.loads(str(steps))[0][1][0]) if steps else None
        return faults.pop(where) if where in faults else packet

    return strike


def test_a_reply_that_was_lost_is_repeated_and_counted_once(tmp_path: Path) -> None:
    bench = Bench("fedgp+der")
    loop, lost = loop_of(bench, tmp_path), {1, 4, 7, 8}

    def lose(client: int, reply: Packet) -> Any:
        return Failure("the node is unavailable") if len(loop.received) in lost else reply

    loop.after = lose
    outcome = federated(bench, loop)
    assert_same(bench, bench.run(), outcome, tmp_path)
    reported = [event for event in outcome.events if event["event"] == "client"]
    assert [event["reason"] for event in reported] == ["the node is unavailable"] * len(lost)
    assert len(loop.received) > len(lost) + 20


def test_a_client_killed_before_it_could_write_is_asked_again(tmp_path: Path) -> None:
    bench = Bench("fedgp+der")
    loop = loop_of(bench, tmp_path)
    loop.before = once({(1, 1): Failure("killed"), (2, 3): Failure("killed")})
    assert_same(bench, bench.run(), federated(bench, loop), tmp_path)


def test_a_client_may_be_restarted_at_any_time(tmp_path: Path) -> None:
    bench = Bench("fedgp+der")
    loop = loop_of(bench, tmp_path)

    def restart(client: int, packet: Packet) -> Packet:
        loop.sites[client] = site(bench, tmp_path, client)
        return packet

    loop.before = restart
    assert_same(bench, bench.run(), federated(bench, loop), tmp_path)


def garbage(reply: Packet) -> list[Packet]:
    """What a broken or hostile client may say."""
    return [
        Packet({}),
        Packet({"protocol": 99, "kind": "reply"}),
        Packet({**reply.header, "request": "0" * 32}, reply.pieces),
        Packet({**reply.header, "holds": "[1]"}, reply.pieces),
        Packet(reply.header, {}),
        Packet(reply.header, {"reply.0": b"\xff" * 100}),
        Packet(reply.header, {"reply.0": reply.pieces.get("reply.0", b"")[:-3]}),
        Packet(reply.header, {"reply.0": tree.to_bytes({"values": 3})}),
        Packet(reply.header, {"reply.0": tree.to_bytes({"values": {}, "samples": -1, "steps": 0, "loss": None})}),
    ]


def spoilt(reply: Packet, how: str) -> Packet:
    """A reply in the right form that may not be used."""
    content = tree.from_bytes(reply.pieces["reply.0"])
    params = content["values"]["fedavg"]["params"]
    changes = {"nan": params / 0 * 0, "huge": params + 1e12, "short": params[:-1], "integers": params.long()}
    content["values"]["fedavg"]["params"] = changes[how]
    return Packet(reply.header, {"reply.0": tree.to_bytes(content)})


@pytest.mark.parametrize("how", ["nan", "huge", "short", "integers"])
def test_what_may_not_be_used_is_rejected_at_once_and_the_round_goes_on(how: str, tmp_path: Path) -> None:
    bench = Bench("fedavg")
    loop = loop_of(bench, tmp_path)
    loop.after = lambda client, reply: spoilt(reply, how) if client == 1 else reply
    outcome = federated(bench, loop)
    planned = bench.change(stream=Toy(cohorts=dict.fromkeys(range(4), (0, 2)))).run()
    assert torch.equal(outcome.params, planned.params)
    assert outcome.state.absent == {"rejected": 4}
    assert len(loop.sent) == 4 * 3  # nobody is asked twice


def test_a_round_without_any_usable_reply_ends_the_run(tmp_path: Path) -> None:
    bench = Bench("fedavg")
    loop = loop_of(bench, tmp_path)
    loop.after = lambda client, reply: spoilt(reply, "nan")
    with pytest.raises(ClientError, match="client 0 failed in phase 'train' of round 1: rejected: not finite"):
        federated(bench, loop)


@pytest.mark.parametrize("kind", range(9))
def test_garbage_is_rejected_named_and_does_not_stop_the_run(kind: int, tmp_path: Path) -> None:
    bench = Bench("fedavg")
    loop = loop_of(bench, tmp_path)
    loop.after = lambda client, reply: garbage(reply)[kind] if len(loop.received) in (2, 6) else reply
    outcome = federated(bench, loop)
    assert_same(bench, bench.run(), outcome, tmp_path)
    assert [e["kind"] for e in outcome.events if e["event"] == "client"] == ["rejected", "rejected"]


def test_a_client_that_never_makes_sense_is_left_out_after_the_deadline(tmp_path: Path) -> None:
    bench = Bench("fedavg")
    loop = loop_of(bench, tmp_path)
    loop.after = lambda client, reply: Packet({}) if client == 1 else reply
    outcome = federated(bench, loop, options=PhaseOptions(deadline=0.02, retry=0.005))
    planned = bench.change(stream=Toy(cohorts=dict.fromkeys(range(4), (0, 2)))).run()
    assert torch.equal(outcome.params, planned.params)
    assert outcome.state.absent == {"rejected": 4}
    named = [event["absent"] for event in outcome.events if event["event"] == "phase"]
    assert all(set(one) == {"1"} and one["1"].startswith("rejected: ") for one in named)


# clients whose own code always raises ---------------------------------------------------------------------------------
class Broken(Exception):
    """Of a user's own, which nobody here has heard of."""


def broken(tmp_path: Path, client: int) -> RealClient:
    def build(recipe: str, scale: float) -> ClientRuntime:
        raise Broken("no images today")

    return RealClient(tmp_path / str(client), Identity(f"site-{client}", client), build)


def given_up(events: list[Any]) -> list[tuple[int, int]]:
    """(client, failures) of the events that say so."""
    return [(event["client"], event["failures"]) for event in events if event.get("given_up")]


def test_a_client_that_always_fails_is_left_out_after_some_tries(tmp_path: Path) -> None:
    """Three in the first phase, one in each that follows; and it is named with its reason."""
    bench = Bench("fedavg")
    loop = loop_of(bench, tmp_path)
    loop.sites[1] = broken(tmp_path, 1)
    outcome = federated(bench, loop, options=PhaseOptions(retry=0.001, tries=3))
    planned = bench.change(stream=Toy(cohorts=dict.fromkeys(range(4), (0, 2)))).run()
    assert torch.equal(outcome.params, planned.params)
    assert given_up(outcome.events) == [(1, 3), (1, 1), (1, 1), (1, 1)]
    assert outcome.state.absent == {"failed": 4}
    named = [event["absent"]["1"] for event in outcome.events if event["event"] == "phase"]
    assert named == [f"failed: given up after {n} tries: {STEP_FAILED}" for n in (3, 1, 1, 1)]
    reported = [event for event in outcome.events if event["event"] == "client"]
    assert [event.get("again_in") for event in reported[:3]] == [0.0, 0.0, None]


def test_a_client_that_was_given_up_and_is_mended_has_all_its_tries_again(tmp_path: Path) -> None:
    bench = Bench("fedavg")
    loop = loop_of(bench, tmp_path)
    loop.sites[1] = broken(tmp_path, 1)
    faults = {(1, 2): Failure("its app died", own=True)}

    def mend(client: int, packet: Packet) -> Any:
        if (client, packet.json("steps")[0][1][0]) == (0, 1):
            loop.sites[1] = site(bench, tmp_path, 1)
        return once(faults)(client, packet)

    loop.before = mend
    outcome = federated(bench, loop, options=PhaseOptions(retry=0.0, tries=2))
    assert torch.equal(outcome.params, bench.change(stream=Toy(cohorts={0: (0, 2)})).run().params)
    assert given_up(outcome.events) == [(1, 2)]


def test_one_that_cannot_be_reached_is_waited_for_however_often(tmp_path: Path) -> None:
    bench = Bench("fedavg")
    loop = loop_of(bench, tmp_path)
    left = [20]

    def lose(client: int, packet: Packet) -> Any:
        left[0] -= client == 1
        return Failure("the node is not available") if client == 1 and left[0] > 0 else packet

    loop.before = lose
    outcome = federated(bench, loop, options=PhaseOptions(retry=0.0, tries=2))
    assert_same(bench, bench.run(), outcome, tmp_path)


@pytest.mark.parametrize(("minimum", "said"), [(0, "so did all others"), (3, "2 replies are left")])
def test_a_run_with_too_few_left_ends_and_says_why(minimum: int, said: str, tmp_path: Path) -> None:
    bench = Bench("fedavg")
    loop = loop_of(bench, tmp_path)
    for client in (1,) if minimum else (0, 1, 2):
        loop.sites[client] = broken(tmp_path, client)
    first = 1 if minimum else 0
    with pytest.raises(ClientError, match=f"client {first} failed .* after 2 tries: {STEP_FAILED}; {said}"):
        federated(bench, loop, options=PhaseOptions(retry=0.0, tries=2, minimum=minimum))


def test_a_client_that_is_away_is_waited_for(tmp_path: Path) -> None:
    bench = Bench("fedgp")
    loop = loop_of(bench, tmp_path)
    loop.away, calls = {2}, []
    receive = loop.receive

    def come_back() -> Any:
        calls.append(1)
        if len(calls) == 30:
            loop.away = set()
        return receive()

    loop.receive = come_back  # type: ignore[method-assign]
    assert_same(bench, bench.run(), federated(bench, loop), tmp_path)


def test_a_request_that_got_lost_without_a_word_is_made_again(tmp_path: Path) -> None:
    bench = Bench("fedgp")
    loop = loop_of(bench, tmp_path)
    loop.before = lambda client, packet: None if len(loop.sent) == 2 else packet  # it never arrived
    loop.after = lambda client, reply: None if len(loop.received) == 5 else reply  # what was done is not done again
    outcome = federated(bench, loop, options=PhaseOptions(retry=0.0, silence=0.01))
    assert_same(bench, bench.run(), outcome, tmp_path)
    assert {event["kind"] for event in outcome.events if event["event"] == "client"} == {"silent"}


def test_silence_is_waited_out_for_longer_each_time() -> None:
    assert [PhaseOptions(silence=10.0).silent(n) for n in (1, 2, 3)] == [10.0, 20.0, 40.0]


def test_a_repeated_request_that_fails_does_not_wait_for_the_lost_one(tmp_path: Path) -> None:
    """One request is lost, its repetition fails: the next follows the failure, not another silence."""
    bench = Bench("fedgp")
    loop = loop_of(bench, tmp_path)
    faults = {2: None, 4: Failure("the app's process died")}
    loop.before = lambda client, packet: faults.get(len(loop.sent), packet)
    outcome = federated(bench, loop, options=PhaseOptions(retry=0.0, silence=2.0))
    assert_same(bench, bench.run(), outcome, tmp_path)
    assert [event["kind"] for event in outcome.events if event["event"] == "client"] == ["silent", "failed"]
    assert loop.sent[1][0] == loop.sent[3][0] == loop.sent[4][0]


def test_enough_answers_end_a_phase(tmp_path: Path) -> None:
    bench = Bench("fedavg")
    loop = loop_of(bench, tmp_path)
    loop.away = {0}
    outcome = federated(bench, loop, options=PhaseOptions(enough=0.5, retry=0.0))
    assert outcome.state.absent == {"late": 4}
    assert torch.equal(outcome.params, bench.change(stream=Toy(cohorts=dict.fromkeys(range(4), (1, 2)))).run().params)


def test_a_full_disk_stops_nothing_but_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from everfed.federation import journal

    bench, real, left = Bench("fedgp+der"), journal.write_atomic, [3]

    def full(path: Path, data: bytes) -> None:
        if path.parent.parent.parent.name == "1" and path.name.startswith("1.") and left[0]:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        real(path, data)

    monkeypatch.setattr(journal, "write_atomic", full)
    outcome = federated(bench, loop_of(bench, tmp_path))
    assert_same(bench, bench.run(), outcome, tmp_path)
    reported = [event for event in outcome.events if event["event"] == "client"]
    assert [(e["client"], "disk is full" in str(e["reason"])) for e in reported] == [(1, True)] * 3


def test_a_wiped_client_is_noticed(tmp_path: Path) -> None:
    import shutil

    bench = Bench("fedgp+der")
    loop, wiped = loop_of(bench, tmp_path), []

    def wipe(client: int, packet: Packet) -> Packet:
        if client == 0 and json.loads(str(packet.header["steps"]))[0][1][0] == 2 and not wiped:
            wiped.append(shutil.rmtree(tmp_path / "0"))
            loop.sites[0] = site(bench, tmp_path, 0)
        return packet

    loop.before = wipe
    outcome = federated(bench, loop)
    assert [e["message"] for e in outcome.events if e["event"] == "warning"] == ["client 0 came back without its state"]
    assert outcome.state.round == 4


# resume --------------------------------------------------------------------------------------------------------------
class Killed(Exception):
    pass


@pytest.mark.parametrize(("name", "every"), [("fedgp+der", 1), ("fedgp+der", 3), ("fedssi", 2), ("coordinated", 5)])
def test_a_server_killed_again_and_again_ends_in_the_same_bits(name: str, every: int, tmp_path: Path) -> None:
    """Its checkpoint is up to `every` phases old, so clients are ahead and must go back, or repeat what they said."""
    bench = Bench(name)
    loop = loop_of(bench, tmp_path)
    lives, phases = 0, 0
    kept: Any = None
    outcome: Outcome | None = None

    def keep(reached: RunState) -> bool:
        nonlocal phases, kept
        phases += 1
        if phases % every == 0:
            kept = crossed(reached.to_tree())
        return phases % every == 0

    def kill(reached: RunState) -> None:
        if phases % (every + 1) == 0:
            raise Killed

    while outcome is None:
        lives += 1
        state = None if kept is None else RunState.from_tree(kept)
        with suppress(Killed):
            outcome = federated(bench, loop, epoch=lives, state=state, stop=kill, durable=keep)
    assert lives > 1
    assert_same(bench, bench.run(), outcome, tmp_path)


def test_a_server_that_comes_back_with_another_course_rolls_clients_back(tmp_path: Path) -> None:
    """In its first life client 1 was away; in its second everybody is there from the first round on."""
    bench = Bench("fedgp+der")
    loop = loop_of(bench, tmp_path)
    loop.away = {1}
    first = federated(bench, loop, options=PhaseOptions(deadline=0.01), durable=lambda state: False)
    assert first.state.absent["late"] > 0
    loop.away = set()
    assert_same(bench, bench.run(), federated(bench, loop, epoch=2), tmp_path)


def test_requests_from_the_past_are_refused(tmp_path: Path) -> None:
    bench = Bench("fedgp+der")
    loop = loop_of(bench, tmp_path)
    federated(bench, loop, epoch=2)
    old = next(packet for client, packet in loop.sent if client == 0)
    earlier = Packet({**old.header, "epoch": 1}, old.pieces)
    assert Answer.of(loop.sites[0].answer(earlier)).kind == wire.REFUSED
    before = states(bench.setup(), tmp_path)
    assert Answer.of(loop.sites[0].answer(old)).kind == wire.REFUSED  # its place was passed in this life
    assert all(tree.equal(states(bench.setup(), tmp_path)[c], before[c]) for c in before)


def test_a_journal_keeps_no_more_than_a_resumed_server_may_ask_for(tmp_path: Path) -> None:
    bench = Bench("fedgp+der", stream=Toy(rounds_per_task=8))
    federated(bench, loop_of(bench, tmp_path))
    kept = sorted(path.name for path in (tmp_path / "0" / "a1" / "steps").glob("*.safetensors"))
    assert len(kept) <= 3
    assert len(list((tmp_path / "0" / "a1" / "once").iterdir())) <= 4


# what a server may not do --------------------------------------------------------------------------------------------
def request(bench: Bench, tmp_path: Path) -> tuple[Loop, Packet]:
    loop = loop_of(bench, tmp_path)
    seen: list[Packet] = []

    def see(client: int, packet: Packet) -> Packet:
        seen.append(packet)
        raise Paused

    loop.before = see
    with pytest.raises(Paused):
        federated(bench, loop)
    return loop, seen[0]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"run": "../../etc"}, "not a run's identity"),
        ({"run": ""}, "not a run's identity"),
        ({"protocol": 1}, "protocol 1"),
        ({"steps": "[]["}, "not JSON"),
        ({"steps": '[["train", [-1, 0, 0, 0], 0, "", [], false]]'}, "no place in a run"),
        ({"steps": '[["train", [0, 0, 0, 0], 0, 5, [], false]]'}, "a step names"),
        ({"steps": '[["boom", [0, 0, 0, 0], 0, "", [], false]]'}, "no phase"),
        ({"client": 99}, "no client 99"),
        ({"client": True}, "whole number"),
        ({"durable": "3"}, "durable"),
        ({"recipe": "0" * 32}, "damaged"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(header: dict[str, Any], said: str, tmp_path: Path) -> None:
    loop, packet = request(Bench("fedavg"), tmp_path)
    answer = Answer.of(loop.sites[0].answer(Packet({**packet.header, **header}, packet.pieces)))
    assert (answer.kind, said in answer.reason) == (wire.REFUSED, True), answer.reason
    assert not (tmp_path.parent / "etc").exists()


def test_a_damaged_payload_is_refused(tmp_path: Path) -> None:
    loop, packet = request(Bench("fedavg"), tmp_path)
    damaged = {name: data[:-1] + bytes([data[-1] ^ 1]) for name, data in packet.pieces.items()}
    answer = Answer.of(
        loop.sites[0].answer(Packet(packet.header, {**damaged, wire.RECIPE: packet.pieces[wire.RECIPE]}))
    )
    assert (answer.kind, "damaged" in answer.reason) == (wire.REFUSED, True)


def test_no_raw_sample_is_among_the_bytes_that_are_sent(tmp_path: Path) -> None:
    """Every 16-byte image of every client, in storage form and as the network's float input."""
    bench = Bench("fedgp+der")
    loop = loop_of(bench, tmp_path)
    federated(bench, loop)
    sent = b"".join(data for _, reply in loop.received for data in reply.pieces.values())
    for client in range(3):
        for task in range(2):
            data = bench.stream.data(client, task)
            for x in data.x:
                assert x.numpy().tobytes() not in sent
                assert bench.stream.inputs(x).numpy().tobytes() not in sent
    disk = b"".join(path.read_bytes() for path in (tmp_path / "0" / "a1" / "steps").iterdir())
    assert any(x.numpy().tobytes() in disk for x in bench.stream.data(0, 1).x)  # the buffer on its own disk has them


def test_patience_in_numbers() -> None:
    options = PhaseOptions(deadline=10, minimum=2, deadlines={"train": 20})
    assert not options.over("other", clients=3, answered=1, seconds=99)
    assert options.over("other", 3, 2, 10)
    assert not options.over("train", 3, 2, 10)
    assert options.over("train", 3, 3, 0)
    assert not options.over("train", 3, 1, 99, given_up=1)
    assert options.over("train", 3, 2, 0, given_up=1)
    assert options.over("train", 3, 0, 0, given_up=2)  # two answers cannot come together any more
    assert [replace(options, retry=1.0, longest_retry=5.0).backoff(n) for n in (1, 2, 3, 4)] == [1.0, 2.0, 4.0, 5.0]


def test_an_answer_crosses_unchanged() -> None:
    answer = Answer(wire.REPLY, "r", "why", ("a",), ("b", "c"), True, (b"1", b"2"))
    assert Answer.of(answer.packet()) == answer
    with pytest.raises(PacketError):
        Request.of(answer.packet())
