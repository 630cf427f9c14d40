"""Frames, packets, requests, answers and replies that an attacker made up: refused by name, without a crash, a hang or
a file in the wrong place."""

from __future__ import annotations

import io
import json
import random
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everfed.core.client import Reply
from everfed.core.tree import to_bytes
from everfed.federation import packet as wire
from everfed.federation.codec import MessageEncoder, reply_to_tree, to_message, to_reply
from everfed.federation.packet import Packet, PacketError, digest
from everfed.federation.request import Answer, Request, Step
from tests.core.test_tree_hostile import mutated
from tests.federation.loop import site
from tests.support.toy import Bench, Toy

REPLY = to_bytes(reply_to_tree(Reply({"fedavg": {"params": torch.ones(5)}}, 3, 2, 0.5)))
ANSWER = Answer("reply", "abc", "", (), ("x",), False, (REPLY,)).packet()


class Line:
    """A connection that holds some bytes and then ends."""

    def __init__(self, data: bytes) -> None:
        self.data = io.BytesIO(data)

    def recv(self, count: int) -> bytes:
        return self.data.read(count)


def received(data: bytes, limit: int = 1 << 20) -> Packet:
    return wire.receive(cast(Any, Line(data)), limit)


def test_a_byte_level_fuzzer_of_frames() -> None:
    rng, whole = random.Random(2), b"".join(wire.to_frame(ANSWER))
    assert Answer.of(received(whole)).replies == (REPLY,)
    outcomes = {"packet": 0, "refused": 0, "ended": 0}
    for _ in range(6000):
        try:
            answer = Answer.of(received(mutated(rng, whole)))
            for data in answer.replies:
                to_reply(data)
            outcomes["packet"] += 1
        except PacketError:
            outcomes["refused"] += 1
        except EOFError:
            outcomes["ended"] += 1
    assert all(outcomes.values())


@pytest.mark.parametrize(
    "head",
    [b"", b"[]", b"5", b"null", b"{}", b'{"header":{},"pieces":5}', b'{"header":[],"pieces":[]}', b"[" * 100_000,
     b'{"header":{"a":[1]},"pieces":[]}', b'{"header":{},"pieces":[["a",-1]]}', b'{"header":{},"pieces":[["a",1.5]]}',
     b'{"header":{},"pieces":[["a",1],["a",1]]}', b'{"header":{},"pieces":[["a",true]]}', b"\xff\xfe",
     b'{"header":{},"pieces":[["a",' + b"9" * 5000 + b"]]}", b'{"header":{},"pieces":[["a",1000000000000000]]}'],
)  # fmt: skip
def test_heads_that_are_none(head: bytes) -> None:
    with pytest.raises((PacketError, EOFError)):
        received(struct.pack("<I", len(head)) + head)


def test_a_frame_that_claims_gigabytes_takes_none() -> None:
    with pytest.raises(PacketError, match="head"):
        received(struct.pack("<I", (1 << 32) - 1))
    with pytest.raises(PacketError, match="bytes"):
        head = b'{"header":{},"pieces":[["a",8000000000]]}'
        received(struct.pack("<I", len(head)) + head)


def test_the_limit_of_a_frame_is_on_all_pieces_together() -> None:
    whole = b"".join(wire.to_frame(Packet({}, {"a": b"12", "b": b"345", "c": b"6"})))
    assert received(whole, limit=6).pieces == {"a": b"12", "b": b"345", "c": b"6"}
    with pytest.raises(PacketError, match="a packet may have 5 bytes, not 6"):
        received(whole, limit=5)


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner), max_leaves=8
)
GOOD = Request("a1", 1, 0, "r", 1.0, (0, 0, 0, 0), (Step("train", (0, 0, 0, 0), 0, ""),)).header()
fields = st.sampled_from(sorted({*GOOD, *ANSWER.header}))
huge = st.sampled_from([10**400, -(10**400), float("nan"), float("inf"), "9" * 5000, "[" * 5000, "[1e400]"])
changes = st.dictionaries(fields, plain | huge | values.map(json.dumps), max_size=3)


@given(changes, st.dictionaries(st.text(max_size=8), st.binary(max_size=20), max_size=2))
@settings(max_examples=250, deadline=None)
def test_headers_of_any_kind(changed: dict[str, Any], pieces: dict[str, bytes]) -> None:
    for header, read in ((GOOD, Request.of), (ANSWER.header, Answer.of)):
        try:
            read(Packet({**header, **changed}, pieces))  # type: ignore[operator]
        except PacketError as error:
            assert len(str(error)) < 6000


@given(values)
@settings(max_examples=150, deadline=None)
def test_steps_of_any_kind(step: Any) -> None:
    with suppress(PacketError):
        Request.of(Packet({**GOOD, "steps": json.dumps([step])}))


def test_a_byte_level_fuzzer_of_replies_and_messages() -> None:
    rng = random.Random(3)
    body = MessageEncoder({"model": {"params": torch.ones(3)}, "fedgp": {"n": 1}}).encode(0).body
    assert body is not None
    for _ in range(3000):
        for data, read in ((REPLY, to_reply), (body, lambda data: to_message(data, (("model", "x", "n"),), {}.get))):
            try:
                read(mutated(rng, data))  # type: ignore[operator]
            except PacketError:
                continue


# a client that is sent nonsense --------------------------------------------------------------------------------------
BENCH = Bench("fedavg", stream=Toy(clients=2, tasks=1, rounds_per_task=1, samples=4))


@given(changes, st.dictionaries(st.text(max_size=8), st.binary(max_size=20), max_size=2))
@settings(max_examples=80, deadline=None)
def test_a_client_answers_whatever_it_is_sent(
    tmp_path_factory: Any, changed: dict[str, Any], pieces: dict[str, bytes]
) -> None:
    folder = tmp_path_factory.mktemp("client")
    answer = site(BENCH, folder / "inner", 0).answer(Packet({**GOOD, **changed}, pieces))
    assert Answer.of(answer).kind in ("missing", "refused", "failed", "reply") or answer.text("kind") == "hello"
    assert [path.name for path in folder.iterdir()] in ([], ["inner"])


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "..", "a/b", "", "x" * 5000, "a\0b"])
def test_no_name_leads_out_of_a_client_s_folder(tmp_path: Path, name: str) -> None:
    inner, recipe = tmp_path / "inner", b"# no recipe\n"
    step = Step("train", (0, 0, 0, 0), 0, "", (("model", "params", name),))
    packets = [
        Packet({**GOOD, "run": name}, {}),
        Packet(
            {**GOOD, "recipe": digest(recipe), "steps": json.dumps([step.to_json()])}, {"recipe": recipe, name: b"x"}
        ),
        Packet({**GOOD, "recipe": name}, {"recipe": recipe}),
    ]
    for packet in packets:
        assert site(BENCH, inner, 0).answer(packet).text("kind") in ("missing", "refused", "failed")
    assert {path.name for path in tmp_path.iterdir()} <= {"inner"}
    assert not Path("/tmp/evil").exists()
