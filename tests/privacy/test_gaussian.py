"""Noise from a cryptographic generator, and that it never comes twice for two different releases."""

from __future__ import annotations

import hashlib
import hmac
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from everfed.core import tree
from everfed.core.client import Reply
from everfed.core.phase import EVALUATE, Phase
from everfed.core.server import RunState
from everfed.federation.codec import to_reply
from everfed.federation.request import Answer
from everfed.privacy.differential import NAME, private
from everfed.store.clients import ClientStore
from tests.federation.loop import Loop, federated, loop_of
from tests.support.toy import Bench, Outcome, Toy
from tests.support.wire import crossed

pytest.importorskip("dp_accounting", reason="pip install 'everfed[privacy]'")
LONG = Bench("fedavg", stream=Toy(clients=2, rounds_per_task=4))
Replies = dict[int, torch.Tensor]  # by client


class Killed(Exception):
    """The server is gone."""


def protected(bench: Bench, **options: Any) -> Bench:
    plain = bench.build_method
    return replace(bench, method=lambda: private(plain(), **options))


# the attacks: one more request must not remove the noise of the first ------------------------------------------------
def copied(state: RunState) -> RunState:
    return RunState.from_tree(crossed(state.to_tree()))


def second_replies(bench: Bench, loop: Loop, epoch: int, state: RunState | None = None) -> tuple[RunState, Replies]:
    """The server's state after the first round, and what each client adds in the second to the model that it was sent.
    The server is killed then. state: from which it goes on."""
    saved = [copied(state)] if state is not None else []

    def kill(reached: RunState) -> None:
        if reached.round == 2:
            raise Killed
        saved.append(copied(reached))

    before = len(loop.received)
    with pytest.raises(Killed):
        federated(
            bench,
            loop,
            epoch=epoch,
            state=state and copied(state),
            stop=kill,
            durable=lambda reached: reached.round < 2,
        )
    base = saved[-1].model["params"].double()
    found = {
        client: to_reply(Answer.of(packet).replies[0]).values["fedavg"]["params"].double() - base
        for client, packet in loop.received[before:]
        if packet.header["kind"] == "reply"
    }
    return saved[-1], found


def test_a_client_asked_again_with_another_model_draws_other_noise(tmp_path: Path) -> None:
    """Updates have a norm of 1 at most, so with the same noise in both replies their difference has 2 at most."""
    bench = protected(LONG, kind="local", noise=20.0)
    loop = loop_of(bench, tmp_path)
    state, honest = second_replies(bench, loop, 1)
    state.set_model({**state.model, "params": state.model["params"] + 0.5})
    _, other = second_replies(bench, loop, 2, state)
    for client in (0, 1):
        size = len(honest[client])
        assert float((honest[client] - other[client]).norm()) > 20.0 * math.sqrt(2 * size) / 2


def test_a_client_asked_again_with_the_same_model_after_another_one_answers_as_before(tmp_path: Path) -> None:
    """The second request removed the first reply from the journal; the step is computed a third time."""
    bench = protected(LONG, kind="local", noise=20.0)
    loop = loop_of(bench, tmp_path)
    state, first = second_replies(bench, loop, 1)
    lie = copied(state)
    lie.set_model({**state.model, "params": state.model["params"] + 0.5})
    second_replies(bench, loop, 2, lie)
    _, again = second_replies(bench, loop, 3, state)
    assert all(torch.equal(first[client], again[client]) for client in (0, 1))


def test_a_sum_over_another_set_of_clients_gets_other_noise() -> None:
    """With the same noise the difference of the two releases would be that of the sums, exactly."""
    bench = Bench("fedcurv")
    part = private(bench.build_method(), noise=20.0).part(NAME)
    server = bench.server(NAME)
    part.init(server)
    of_three, of_two = torch.full((500,), 3.0, dtype=torch.float64), torch.full((500,), 2.0, dtype=torch.float64)
    found = [
        part.release(server, Phase("train"), {"fedcurv": {"u": total}}, {"fedcurv": {"u": weight}})
        for total, weight in ((of_three, 3.0), (of_two, 2.0), (of_three, 3.0), (of_three, 2.0))
    ]
    noise = [
        one["fedcurv"]["u"] - total for one, total in zip(found, (of_three, of_two, of_three, of_three), strict=True)
    ]
    assert torch.equal(noise[0], noise[2])
    for other in (noise[1], noise[3]):  # another sum; the same sum of fewer clients
        assert float((noise[0] - other).norm()) > 20.0 * math.sqrt(2 * 500) / 2


@pytest.mark.parametrize("kind", ["central", "local"])
def test_a_resumed_run_with_a_secret_key_ends_in_the_same_bits(kind: str) -> None:
    """What is computed again is the same content after the same messages, so its noise is the same."""
    bench = protected(Bench("fedgp+der"), kind=kind, noise=0.5)
    stopped = bench.run(rounds=2)
    kept = {client: crossed(state) for client, state in stopped.clients.items()}
    found = []
    for _ in range(2):
        store, state = ClientStore(), type(stopped.state).from_tree(crossed(stopped.state.to_tree()))
        for client, slots in kept.items():
            store.put(client, tree.clone(slots))
        found.append(bench.run(state=state, store=store).params)
    assert torch.equal(found[0], found[1])


def test_replies_depend_on_every_message_before() -> None:
    """Equal replies to two histories differ in their noise, so that a server cannot compare what is behind it."""
    bench = protected(Bench("fedavg"), kind="local", noise=1.0)
    part = bench.build_method().part(NAME)
    base = bench.model()["params"]
    reply = Reply({"fedavg": {"params": base.clone()}})
    sent = []
    state = bench.new_client()
    for extra in (0.0, 1.0, 0.0):
        client = bench.client(NAME, state, messages={"other": {"x": torch.tensor([extra])}})
        sent.append(part.seal(client, Phase("train"), reply).values["fedavg"]["params"])
    assert torch.equal(sent[0], sent[2]) and not torch.equal(sent[0], sent[1])


# scores ---------------------------------------------------------------------------------------------------------------
def test_scores_on_clients_own_tests_do_not_leave_them() -> None:
    bench = Bench("fedavg")
    for kind in ("central", "local"):
        own = protected(bench, kind=kind)
        part, client = own.build_method().part(NAME), own.client(NAME, phase=EVALUATE)
        counts = Reply({EVALUATE: {"counts": torch.ones((2, 4), dtype=torch.int64)}})
        sent = part.seal(client, Phase(EVALUATE), counts)
        assert sent == Reply({})


def test_a_run_whose_clients_keep_their_scores_ends_without_any() -> None:
    outcome: Outcome = protected(Bench("feddbe"), noise=0.1).run()
    scored = [event for event in outcome.events if event["event"] == "evaluation"]
    assert scored and all(event["acc"] is None for event in scored)


# the generator --------------------------------------------------------------------------------------------------------
def test_the_first_numbers_are_those_of_aes_in_counter_mode() -> None:
    """Worked out from the block cipher, HMAC and the formula of Box and Muller."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    from everfed.privacy.gaussian import standard_normal

    extracted = hmac.new(bytes(32), b"k" * 32, hashlib.sha256).digest()  # HKDF, RFC 5869
    key = hmac.new(extracted, b"everfed noise here\x01", hashlib.sha256).digest()
    cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # the blocks of counter mode
    stream = b"".join(cipher.update(block.to_bytes(16, "big")) for block in range(3))
    words = [int.from_bytes(stream[i : i + 8], "little") >> 11 for i in range(0, 48, 8)]
    radii = [math.sqrt(-2.0 * math.log((word + 1) / 2**53)) for word in words[:3]]
    angles = [2.0 * math.pi * word / 2**53 for word in words[3:]]
    expected = [r * math.cos(a) for r, a in zip(radii, angles, strict=True)]
    expected += [r * math.sin(a) for r, a in zip(radii, angles, strict=True)]
    assert standard_normal(b"k" * 32, b"here", 6).tolist() == pytest.approx(expected, rel=1e-12)
    assert standard_normal(b"k" * 32, b"here", 5).tolist() == pytest.approx(expected[:5], rel=1e-12)


def test_a_hundred_thousand_numbers_are_normal() -> None:
    from everfed.privacy.gaussian import standard_normal

    numbers = standard_normal(bytes(32), b"", 100_000)
    assert stats.kstest(numbers, "norm").pvalue > 1e-4
    assert abs(numbers).max() < 8.6
    other = standard_normal(bytes(32), b"x", 100_000)
    assert abs(stats.pearsonr(numbers, other).statistic) < 5 / math.sqrt(100_000)


def test_no_number_comes_twice_in_a_long_vector() -> None:
    """Several blocks of the generator: with repeated noise the difference of two entries would be bare."""
    from everfed.privacy.gaussian import _BLOCK, standard_normal

    count = 5 * _BLOCK
    assert len(np.unique(standard_normal(bytes(32), b"", count))) == count


@given(st.binary(max_size=40), st.binary(max_size=40), st.integers(0, 70_000))
@settings(max_examples=30, deadline=None)
def test_equal_bindings_give_equal_numbers_and_others_do_not(first: bytes, second: bytes, count: int) -> None:
    from everfed.privacy.gaussian import standard_normal

    numbers = standard_normal(bytes(32), first, count)
    assert len(numbers) == count
    equal = bool((numbers == standard_normal(bytes(32), second, count)).all())
    assert equal == (first == second or count == 0)


def test_a_digest_sees_every_value_type_shape_and_name() -> None:
    from everfed.privacy.gaussian import tree_digest

    def trees() -> list[tree.Tree]:
        x = torch.tensor([1.0, 2.0])
        return [
            {"a": x},
            {"b": x},
            {"a": x.double()},
            {"a": x.reshape(2, 1)},
            {"a": x.flip(0)},
            {"a": {"a": x}},
            {"a": 1},
            {"a": 1.0},
            {"a": True},
            {"a": None},
            {"a": "1"},
            {},
            {"a": torch.zeros(0)},
        ]

    digests = [tree_digest(one) for one in trees()] + [tree_digest({"a": 1}, "x"), tree_digest({"a": 1}, "x", "")]
    assert len(set(digests)) == len(digests)
    assert tree_digest({"a": 1, "b": 2}) == tree_digest({"b": 2, "a": 1})
