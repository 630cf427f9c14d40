"""What a hostile client or server may try with well-formed packets: replays, other runs, sizes, headers, paths."""

from __future__ import annotations

import json
import os
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from everfed.core import tree
from everfed.errors import UserError
from everfed.federation import request as wire
from everfed.federation.checking import largest_reply
from everfed.federation.codec import to_reply
from everfed.federation.local import NODE_KEY, listen, own_folder, socket_path
from everfed.federation.packet import PROTOCOL, Packet, PacketError
from everfed.federation.request import Answer
from tests.core.test_tree_hostile import POISONED
from tests.federation.loop import Loop, federated, loop_of, states
from tests.support.toy import Bench, Outcome, Toy

BENCH = Bench("fedgp+der", stream=Toy(clients=2, tasks=1, rounds_per_task=3))


@pytest.fixture(scope="module")
def honest() -> Outcome:
    return BENCH.run()


def strike(loop: Loop, folder: Path, lie: Any, times: int = 2) -> Outcome:
    """A run in which client 1 says `lie(its answer)` instead of its last `times` training replies, once each."""
    left = [times]

    def after(client: int, reply: Packet) -> Packet:
        phase = json.loads(str(loop.sent[-1][1].header["steps"]))[0]
        if client != 1 or phase[0] != "train" or phase[1][0] == 0 or not left[0]:
            return reply
        left[0] -= 1
        return lie(reply)

    loop.after = after
    return federated(BENCH, loop)


def rejected(outcome: Outcome) -> list[str]:
    return [str(event["reason"]) for event in outcome.events if event["event"] == "client"]


def test_a_reply_of_an_earlier_round_is_not_taken_again(tmp_path: Path, honest: Outcome) -> None:
    loop = loop_of(BENCH, tmp_path)

    def replay(reply: Packet) -> Packet:
        return next(packet for client, packet in loop.received if client == 1)

    outcome = strike(loop, tmp_path, replay)
    assert rejected(outcome) == ["it answered another request"] * 2
    assert torch.equal(outcome.params, honest.params)


def test_a_reply_to_another_federation_is_not_taken(tmp_path: Path, honest: Outcome) -> None:
    """The client serves both; what it made for the other run has the right form, and another name."""
    loop = loop_of(BENCH, tmp_path)

    def astray(reply: Packet) -> Packet:
        header = {**loop.sent[-1][1].header, "run": "b2", "durable": "[0, 0, 0, 0]"}
        pieces = {name: data for client, packet in loop.sent if client == 1 for name, data in packet.pieces.items()}
        answer = loop.sites[1].answer(Packet(header, pieces))
        assert Answer.of(answer).kind == wire.REPLY
        return answer

    outcome = strike(loop, tmp_path, astray, times=1)
    assert rejected(outcome) == ["it answered another request"]
    assert torch.equal(outcome.params, honest.params)


def test_a_reply_of_another_protocol_is_not_taken(tmp_path: Path, honest: Outcome) -> None:
    def older(reply: Packet) -> Packet:
        return Packet({**reply.header, "protocol": PROTOCOL - 1}, reply.pieces)

    outcome = strike(loop_of(BENCH, tmp_path), tmp_path, older, times=1)
    known = f"protocol {PROTOCOL - 1} at the other end, {PROTOCOL} here: install the same everfed version"
    assert rejected(outcome) == [known]
    assert torch.equal(outcome.params, honest.params)


def test_another_federation_does_not_touch_this_one_s_state(tmp_path: Path, honest: Outcome) -> None:
    loop = loop_of(BENCH, tmp_path)
    federated(BENCH, loop)
    before = states(BENCH.setup(), tmp_path)
    for client, packet in loop.sent[:4]:
        Answer.of(loop.sites[client].answer(Packet({**packet.header, "run": "b2", "epoch": 9}, packet.pieces)))
    after = states(BENCH.setup(), tmp_path)
    assert all(tree.equal(before[client], after[client]) for client in before)


def test_a_request_for_a_client_that_is_not_there_is_refused(tmp_path: Path) -> None:
    loop = loop_of(BENCH, tmp_path)
    federated(BENCH, loop)
    packet = loop.sent[0][1]
    for client in (-1, 2, 10**12):
        odd = Packet({**packet.header, "run": "c3", "client": client}, packet.pieces)
        assert Answer.of(loop.sites[0].answer(odd)).kind == wire.REFUSED


def test_a_reply_larger_than_any_can_be_is_refused(tmp_path: Path, honest: Outcome) -> None:
    setup = BENCH.setup()
    size = largest_reply(setup, setup.method.train_phase(), BENCH.model())

    def swollen(reply: Packet) -> Packet:
        content = tree.from_bytes(reply.pieces["reply.0"])
        content["values"]["fedavg"]["params"] = torch.zeros(size // 4 + 1)
        return Packet(reply.header, {"reply.0": tree.to_bytes(content)})

    outcome = strike(loop_of(BENCH, tmp_path), tmp_path, swollen, times=1)
    assert len(rejected(outcome)) == 1 and rejected(outcome)[0].startswith("too large")
    assert outcome.state.absent == {"rejected": 1}


@pytest.mark.parametrize("data", POISONED.values(), ids=POISONED)
def test_a_poisoned_header_in_a_reply_is_refused_and_asked_again(data: bytes, tmp_path: Path, honest: Outcome) -> None:
    loop = loop_of(BENCH, tmp_path)
    outcome = strike(loop, tmp_path, lambda reply: Packet(reply.header, {"reply.0": data}))
    assert len(rejected(outcome)) == 2
    assert torch.equal(outcome.params, honest.params)


def test_a_reply_with_a_header_of_megabytes_is_not_parsed() -> None:
    content = {"values": {"fedavg": {f"{n:060}": 1.0 for n in range(90_000)}}, "samples": 1, "steps": 1, "loss": None}
    data = tree.to_bytes(content)
    assert len(data) > 8 << 20
    tracemalloc.start()
    try:
        with pytest.raises(PacketError, match="a header of"):
            to_reply(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# paths in a node's config ---------------------------------------------------------------------------------------------
@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose name leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="ef") as name:
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


@pytest.mark.parametrize("name", ['a"b', 'x" other="1', "back\\slash", "t\tb", "new\nline", "x" * 150, "plain name"])
def test_no_folder_s_name_changes_a_node_s_config(name: str, short: Path) -> None:
    parse = pytest.importorskip("flwr.common.config", reason="pip install 'everfed[flower]'").parse_config_args
    path = socket_path(short / name)
    assert parse([f'{NODE_KEY}="{path}"']) == {NODE_KEY: str(path)}
    if path.parent == short / name:
        path.parent.mkdir()
    with listen(path) as listener:
        assert listener.getsockname() == str(path)


def test_a_folder_for_sockets_that_is_another_s_is_not_used(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes the first of them blocks nobody: the next is used, and without any there is an error."""
    for place in ("run", "tmp", "home/.cache"):
        (short / place).mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short / "run"))
    monkeypatch.setenv("HOME", str(short / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(short / "tmp"))
    found = []
    for place in ("run", "tmp", "home/.cache"):
        own = own_folder()
        found.append(own)
        assert own == short / place / f"everfed-{os.getuid()}" and own.stat().st_mode & 0o777 == 0o700
        own.chmod(0o777)
    with pytest.raises(UserError, match="only you can use"):
        own_folder()
    found[0].rmdir()
    found[0].symlink_to(short)
    with pytest.raises(UserError, match="only you can use"):
        own_folder()


@pytest.mark.parametrize("config", [{}, {NODE_KEY: 5}, {NODE_KEY: True}, {"everfed-socke": "/x"}])
def test_a_node_that_does_not_say_where_its_worker_is(config: dict[str, Any]) -> None:
    pytest.importorskip("flwr", reason="the extra `flower` is not installed")
    from types import SimpleNamespace

    from everfed.federation.flower.client_app import forward

    context: Any = SimpleNamespace(node_config=config)
    with pytest.raises(ValueError, match="configuration lacks its worker"):
        forward(SimpleNamespace(), context)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["a file", "a folder", "nothing"])
def test_a_path_that_is_no_worker_s_is_left_alone(what: str, tmp_path: Path) -> None:
    from everfed.federation.local import call_worker

    path = tmp_path / "x"
    if what == "a file":
        path.write_text("precious")
    elif what == "a folder":
        path.mkdir()
    with pytest.raises(ConnectionError, match="no everfed worker answers"):
        call_worker(str(path), Packet({}), timeout=0.0)
    assert path.read_text() == "precious" if what == "a file" else path.is_dir() == (what == "a folder")
