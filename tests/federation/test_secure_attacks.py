"""Servers that try to learn single replies under secure aggregation, over packets, sites and journals.

A server may raise its epoch (how often it was started) and so make clients repeat steps from the state before them.
Each test carries an attack out as far as the clients let it, and fails with what was learned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from everfed.core.engine import ClientError
from everfed.core.message import Message
from everfed.core.server import Runner
from everfed.core.tree import Tree
from everfed.federation.codec import MessageEncoder, to_reply
from everfed.federation.engine import Federated, RunIdentity
from everfed.federation.journal import Journal
from everfed.federation.packet import Packet, digest
from everfed.federation.phase_options import PhaseOptions
from everfed.federation.request import RECIPE, REFUSED, REPLY, Answer, Request, Step
from everfed.method import Mean, Method, Part
from everfed.methods import registry as methods
from everfed.privacy.secure_client import MASK, NAME, SHARE, UNMASK, secured
from everfed.privacy.secure_server import Secured, TooFewClients
from tests.federation.loop import Loop, loop_of, site
from tests.support.toy import Bench, Toy

pytest.importorskip("flwr", reason="pip install 'everfed[flower]'")
AGREE, RECOVER = "secure-agree", "secure-recover"
CLIENTS, VICTIM = 5, 4
STEP = 2 * 16.0 / (1 << 24)
TEXT = "# no recipe\n"


@dataclass(frozen=True)
class Quiet(Part):
    """A part whose value is absent in this round, as of a method that sends one in some rounds only."""

    name = "a"

    def reducers(self) -> dict[str, Mean]:
        return {"x": Mean()}


def method() -> Method:
    plain = methods.build("fedavg")
    return secured(Method("fedavg", (Quiet(), *plain.parts), plain.warnings), threshold=0.6)


BENCH = Bench(method, stream=Toy(tasks=1, rounds_per_task=1, clients=CLIENTS))


class Killed(Exception):
    """The server's process ends here."""


class Refused(Exception):
    """A client did not answer."""


def reply_of(client: int) -> Tensor:
    """The parameters that a client ends with: the mean over itself alone."""
    alone = replace(BENCH.stream, cohorts={0: (client,)})
    return Bench("fedavg", stream=alone).run().params


def server(
    loop: Loop,
    epoch: int = 1,
    run: str = "a1",
    ledger: Any = None,
    killed: bool = True,
    options: PhaseOptions = PhaseOptions(deadline=1.0, retry=0.0, tries=1),  # noqa: B008 - frozen
) -> tuple[Secured, Runner]:
    """A server of the run, from its beginning. killed: it ends after its first phase, before a checkpoint."""
    setup, events = BENCH.setup(), []  # type: ignore[var-annotated]
    identity = RunIdentity(run, epoch, TEXT)
    inner = Federated(setup, BENCH.build_module, loop, identity, options, lambda: (0, 0, 0, 0), events.append)
    engine = Secured(inner, setup, notify=events.append, **({} if ledger is None else {"ledger": ledger}))

    def save(state: Any, task_end: bool) -> None:
        if killed:
            raise Killed

    return engine, Runner(setup, engine, BENCH.model(), BENCH.evaluation, events.append, save)


def opened(loop: Loop, **options: Any) -> Tensor:
    """The sum of the clients' parameters that a server opens before it is killed."""
    engine, runner = server(loop, **options)
    with pytest.raises(Killed):
        runner.run()
    assert engine._sums is not None
    total = engine._sums.totals["fedavg/params"][0]
    assert isinstance(total, Tensor)
    return total


def ask(loop: Loop, client: int, phase: str, place: list[int], values: Tree, epoch: int) -> Tree:
    """One request of a server that does as it likes."""
    encoder = MessageEncoder({NAME: values})
    step = Step(phase, tuple(place), 0, encoder.name(client), encoder.once)  # type: ignore[arg-type]
    request = Request("a1", epoch, client, digest(TEXT.encode()), 1.0, (0, 0, 0, 0), (step,))
    message = encoder.encode(client)
    assert message.body is not None
    pieces = {message.name: message.body, RECIPE: TEXT.encode()}
    answer = Answer.of(loop.sites[client].answer(Packet(request.header(), pieces)))
    if answer.kind != REPLY:
        raise Refused(answer.reason)
    found: Tree = to_reply(answer.replies[0]).values[NAME]
    return found


def exchanged(loop: Loop, phase: str) -> Iterator[tuple[int, list[int], Tree, Tree]]:
    """(client, place, request, reply) of every request for `phase` that was answered."""
    from everfed.core import tree

    for (client, asked), (_, replied) in zip(loop.sent, loop.received, strict=True):
        [step] = json.loads(str(asked.header["steps"]))
        answer = Answer.of(replied)
        if step[0] == phase and answer.kind == REPLY:
            request: Message = tree.from_bytes(asked.pieces[step[3]])
            yield client, step[1], request.get(NAME, {}), to_reply(answer.replies[0]).values[NAME]


# a new epoch, an old key ---------------------------------------------------------------------------------------------
def test_no_client_gives_shares_of_the_seed_and_of_the_mask_key_of_one_client(tmp_path: Path) -> None:
    """After the sum was opened, the server is "started again" and calls the victim gone."""
    loop = loop_of(BENCH, tmp_path)
    opened(loop)
    seeds = [reply["seeds"] for _, _, _, reply in exchanged(loop, UNMASK)]
    assert sum(str(VICTIM) in one for one in seeds) == CLIENTS  # every client gave its share of the victim's seed
    votes = {client: asked.get("votes") for client, _, asked, _ in exchanged(loop, UNMASK)}
    *_, last = (place for _, place, _, _ in exchanged(loop, UNMASK))
    others = [client for client in range(CLIENTS) if client != VICTIM]
    given: list[int] = []
    for epoch, (phase, stage) in enumerate([(AGREE, 3), (RECOVER, 4), (UNMASK, last[3]), (RECOVER, 5)], start=2):
        for client in others:
            wanted = {"alive": torch.tensor(others), "gone": torch.tensor([VICTIM]), "votes": votes[client] or {}}
            try:
                reply = ask(loop, client, phase, [*last[:3], stage], wanted, epoch)
            except Refused as refusal:
                assert "epoch" in str(refusal) or "no phase" in str(refusal)
                continue
            given += [client] if str(VICTIM) in reply.get("keys", {}) else []
    assert given == [], f"clients {given} gave both secrets of client {VICTIM}"


def test_a_reply_is_never_masked_twice_with_the_same_masks(tmp_path: Path) -> None:
    """The victim alone, asked again for its vector with one number inserted before it. The masks cancel in the
    difference of the two vectors, and what is left are differences of neighbouring parameters."""
    loop = loop_of(BENCH, tmp_path)
    opened(loop)
    [(place, asked, first)] = [one[1:] for one in exchanged(loop, MASK) if one[0] == VICTIM]
    [share] = [one[2] for one in exchanged(loop, SHARE) if one[0] == VICTIM]
    form = {"a/x": ["float32", [1]], **json.loads(asked.get("form") or share["forms"][str(VICTIM)])}
    forms = {"form": json.dumps(form), "forms": {str(client): json.dumps(form) for client in range(CLIENTS)}}
    with pytest.raises(Refused, match="epoch 2 of the server"):
        second = ask(loop, VICTIM, MASK, place, {**asked, **forms}, epoch=2)
        size, before = len(first["narrow"]), second["narrow"].numpy().view(np.uint32)[: len(first["narrow"])]
        steps = (first["narrow"].numpy().view(np.uint32) - before).view(np.int32)
        stolen = torch.from_numpy(np.cumsum(steps, dtype=np.int64)[:size] * STEP)
        error = float((stolen - reply_of(VICTIM).double()).abs().max())
        pytest.fail(f"all {size} parameters of client {VICTIM} are known to {error:.1e}")
    with pytest.raises(Refused, match="epoch 3 of the server"):
        ask(loop, VICTIM, SHARE, [*place[:3], 1], {**share, **forms}, epoch=3)


def test_every_epoch_has_fresh_keys_seeds_and_masks(tmp_path: Path) -> None:
    loop = loop_of(BENCH, tmp_path)
    first = opened(loop)
    middle = len(loop.sent)
    assert torch.equal(first, opened(loop, epoch=2))  # the same sum: nothing more is known than before
    keys, vectors = [], []
    for part in (slice(0, middle), slice(middle, None)):
        half = loop_of(BENCH, tmp_path)
        half.sent, half.received = loop.sent[part], loop.received[part]
        keys.append([reply["keys"] for _, _, _, reply in exchanged(half, "train")])
        vectors.append([reply["narrow"] for _, _, _, reply in exchanged(half, MASK)])
    assert len(keys[0]) == len(keys[1]) == CLIENTS
    assert not any(torch.equal(a, b) for a, b in zip(*keys, strict=True))
    assert all(float((a == b).float().mean()) < 0.05 for a, b in zip(*vectors, strict=True))


@pytest.mark.parametrize("changes", [{"run": "b2"}, {"client": 2, "epoch": 2}], ids=["another run", "another client"])
def test_requests_are_of_no_use_at_another_time_and_refusals_name_no_file(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """Every request of a run's protocol, sent again; a refusal named the file of the code that refused."""
    loop = loop_of(BENCH, tmp_path)
    opened(loop)
    for client, packet in list(loop.sent):
        request = replace(Request.of(packet), **changes)
        answer = Answer.of(loop.sites[client].answer(Packet(request.header(), packet.pieces)))
        if request.steps[0].phase != "train":
            assert answer.kind == REFUSED and ".py" not in answer.reason and "/" not in answer.reason, answer.reason


# two sums of different sets ------------------------------------------------------------------------------------------
def difference(first: Tensor, second: Tensor) -> str:
    error = float((first - second - reply_of(VICTIM).double()).abs().max())
    return f"the reply of client {VICTIM} is known to {error:.1e}"


def test_an_honest_server_killed_after_opening_does_not_open_again_without_a_client(tmp_path: Path) -> None:
    """The first sum minus the second would be the reply of the client that is away."""
    ledger = server_ledger(tmp_path)
    loop = loop_of(BENCH, tmp_path)
    first = opened(loop, ledger=ledger)
    loop.away = {VICTIM}
    with pytest.raises(TooFewClients, match="was opened before the server was stopped, with clients 0,1,2,3,4"):
        second = opened(loop, epoch=2, ledger=server_ledger(tmp_path))
        pytest.fail(difference(first, second))
    loop.away = set()
    assert torch.equal(first, opened(loop, epoch=3, ledger=server_ledger(tmp_path)))


@pytest.mark.parametrize(("run", "epoch"), [("a1", 2), ("b2", 1)])
def test_clients_refuse_a_second_set_of_a_server_that_forgot_the_first(run: str, epoch: int, tmp_path: Path) -> None:
    """Of the same run in a later epoch, and of a new run of the same recipe."""
    loop = loop_of(BENCH, tmp_path)
    first = opened(loop)
    loop.away = {VICTIM}
    with pytest.raises(ClientError, match="was opened in a sum of clients 0,1,2,3,4"):
        second = opened(loop, epoch=epoch, run=run)
        pytest.fail(difference(first, second))


def test_what_was_opened_outlives_the_run_s_folder_and_the_process(tmp_path: Path) -> None:
    """Other runs push the run off the client's disk, so that it would begin again as if it had never been."""
    loop = loop_of(BENCH, tmp_path)
    for one in loop.sites.values():
        one._on_disk.keep = 0
    opened(loop)
    opened(loop, run="b2")
    assert not any((tmp_path / str(client) / "a1").exists() for client in range(CLIENTS))
    again = Loop({client: site(BENCH, tmp_path, client) for client in range(CLIENTS)})
    again.away = {VICTIM}
    with pytest.raises(ClientError, match="was opened in a sum of clients 0,1,2,3,4"):
        opened(again)


@pytest.mark.parametrize("phase", ["train", SHARE, MASK, AGREE])
def test_where_nothing_was_opened_a_resumed_server_takes_any_set(phase: str, tmp_path: Path) -> None:
    """Killed before it asked anyone to unmask; the run goes on without the client that is away, exactly."""
    loop = loop_of(BENCH, tmp_path)

    def kill(client: int, packet: Packet) -> Packet:
        if client == 2 and f'"{phase}"' in str(packet.header["steps"]):
            raise Killed
        return packet

    loop.before = kill
    with pytest.raises(Killed):
        server(loop, ledger=server_ledger(tmp_path))[1].run()
    loop.before, loop.away = None, {VICTIM}
    _, runner = server(loop, epoch=2, ledger=server_ledger(tmp_path), killed=False)
    runner.run()
    others = replace(BENCH.stream, cohorts={0: (0, 1, 2, 3)})
    alone = BENCH.change(stream=others).run(lambda setup, store: Secured(BENCH.eager(setup, store), setup))
    assert torch.equal(runner.state.model["params"], alone.params)


def test_a_server_killed_while_it_opens_keeps_to_the_set(tmp_path: Path) -> None:
    """Two of five gave their shares; with the others back, the resumed run ends in the unbroken run's bits."""
    loop = loop_of(BENCH, tmp_path)

    def kill(client: int, packet: Packet) -> Packet:
        if client == 2 and UNMASK in str(packet.header["steps"]):
            raise Killed
        return packet

    loop.before = kill
    with pytest.raises(Killed):
        server(loop, ledger=server_ledger(tmp_path))[1].run()
    loop.before, loop.away = None, {VICTIM}
    with pytest.raises(TooFewClients, match="with clients 0,1,2,3,4"):
        server(loop, epoch=2, ledger=server_ledger(tmp_path))[1].run()
    loop.away = set()
    _, runner = server(loop, epoch=3, ledger=server_ledger(tmp_path), killed=False)
    runner.run()
    whole = BENCH.run(lambda setup, store: Secured(BENCH.eager(setup, store), setup))
    assert torch.equal(runner.state.model["params"], whole.params)


def test_a_client_that_dies_between_its_ledger_and_its_journal_answers_the_same_set_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It recorded the set, and its reply was lost before it was written; the request is repeated."""
    honest, died = Journal.record, []

    def record(journal: Journal, place: Any, *rest: Any) -> None:
        if place[3] == 4 and not died:  # the first client that unmasks
            died.append(place)
            raise OSError("the disk is full")
        honest(journal, place, *rest)

    monkeypatch.setattr(Journal, "record", record)
    loop, repeats = loop_of(BENCH, tmp_path), PhaseOptions(retry=0.0, tries=3)  # without a deadline, which may be over
    _, runner = server(loop, killed=False, options=repeats)
    runner.run()
    asked = [client for client, packet in loop.sent if f'"{UNMASK}"' in str(packet.header["steps"])]
    assert sorted(asked) == sorted([*range(CLIENTS), asked[0]])
    whole = BENCH.run(lambda setup, store: Secured(BENCH.eager(setup, store), setup))
    assert died and torch.equal(runner.state.model["params"], whole.params)


def server_ledger(folder: Path) -> Any:
    from everfed.store.ledger import LedgerFile

    return LedgerFile(folder / "server" / "ledger.jsonl")
