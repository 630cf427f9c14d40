"""Servers that make a sum under secure aggregation that of one client: the others have nothing, or something known, to
add. Each test computes what the server would know of the victim's reply."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="pip install 'everfed[flower]'")

from everfed.core import tree
from everfed.core.context import Place, Setup
from everfed.core.engine import Absent, Engine
from everfed.core.events import Diverged
from everfed.core.message import Cached
from everfed.core.server import Runner
from everfed.errors import ClientError
from everfed.federation.client import ClientRuntime, Identity, RealClient
from everfed.federation.engine import Federated, RunIdentity
from everfed.federation.packet import Packet, digest
from everfed.federation.phase_options import PhaseOptions
from everfed.federation.request import RECIPE, Answer, Request, fingerprint
from everfed.method import Client, Part, Phase, Sum
from everfed.methods import registry as methods
from everfed.privacy.secure_client import MASK, SHARE, secured
from everfed.privacy.secure_server import Secured, SecurePhase, TooFewClients
from everfed.store.clients import ClientStore
from tests.federation.loop import Loop, loop_of, runtime
from tests.support.flaky import Flaky
from tests.support.toy import Bench, Toy

CLIENTS, VICTIM = 5, 4
PATH = "fedavg/params"
TEXT, STILL = "# no recipe\n", "# a rate of 0\n"


@pytest.fixture(autouse=True)
def _no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def bench_of(clients: int, **sizes: int) -> Bench:
    """Clients that are named (c4=6) have so many samples, where any is named; the others have none."""
    sized = {(client, 0): sizes.get(f"c{client}", 0) for client in range(clients)} if sizes else {}
    stream = Toy(tasks=1, rounds_per_task=1, clients=clients, sizes=sized) if sized else None
    return Bench(
        lambda: secured(methods.build("fedavg"), threshold=0.6),
        stream=stream or Toy(tasks=1, rounds_per_task=1, clients=clients),
    )


def reply_of(bench: Bench, client: int) -> Tensor:
    """The parameters that a client ends with: the mean over itself alone."""
    alone = replace(bench.stream, cohorts={0: (client,)})
    return Bench("fedavg", stream=alone).run().params


def known(bench: Bench, sums: Any, others: Tensor | float = 0.0, victim: int = VICTIM) -> None:
    """Fails with what the server knows of the victim: the sum less what the others added to it."""
    if sums is None or PATH not in sums.totals:
        return
    total, weight, _ = sums.totals[PATH]
    error = float((total - others - reply_of(bench, victim).double()).abs().max())
    if error < 1e-3:
        pytest.fail(f"the reply of client {victim} is known to {error:.1e} from a sum of weight {weight:g}")


# honest servers -------------------------------------------------------------------------------------------------------
def simulated(bench: Bench, gone: tuple[int, ...] = ()) -> tuple[Any, list[dict[str, Any]]]:
    """(what was opened, the events)."""
    engines: list[Secured] = []
    events: list[dict[str, Any]] = []

    def engine(setup: Setup, store: ClientStore) -> Engine:
        engines.append(Secured(Flaky(bench.eager(setup, store), {MASK: gone}), setup, notify=events.append))
        return engines[0]

    found = bench.run(engine)
    return engines[0]._sums, [*events, *found.events]


def test_where_one_of_three_clients_has_data_nothing_is_opened_and_the_run_goes_on() -> None:
    bench = bench_of(3, c2=6)
    sums, events = simulated(bench)
    known(bench, sums, victim=2)
    warned = [event["message"] for event in events if event["event"] == "warning"]
    assert any("fedavg/params is in the replies of 1 of 3 clients, and 3 are needed" in text for text in warned)
    [event] = [event for event in events if event["event"] == "phase" and event["phase"] == "train"]
    assert event.get("trained", 0) == 0 and event.get("loss") is None


def test_the_same_where_those_with_data_go_after_they_shared_their_keys() -> None:
    """Three of five have data, and two of them go: the three that stay are enough, but only one has a value."""
    bench = bench_of(5, c2=6, c3=6, c4=6)
    sums, _ = simulated(bench, gone=(2, 3))
    known(bench, sums)


def test_three_of_five_with_data_are_added_up() -> None:
    bench = bench_of(5, c2=6, c3=6, c4=6)
    sums, _ = simulated(bench)
    assert sums.totals[PATH][1] == 3.0


# dishonest servers ----------------------------------------------------------------------------------------------------
Tamper = Callable[[Packet], Packet]


def with_step(packet: Packet, **changes: Any) -> Packet:
    """The packet with its step changed, in the train phase only."""
    request = Request.of(packet)
    (step,) = request.steps
    if step.phase != "train":
        return packet
    changed = replace(request, steps=(replace(step, **changes),))
    return Packet(changed.header(), packet.pieces)


def another_task(packet: Packet) -> Packet:
    return with_step(packet, task=-1)


def another_recipe(packet: Packet) -> Packet:
    request = replace(Request.of(packet), recipe=digest(STILL.encode()))
    return Packet(request.header(), {**packet.pieces, RECIPE: STILL.encode()})


def another_scale(packet: Packet) -> Packet:
    return Packet(replace(Request.of(packet), scale=1e-30).header(), packet.pieces)


def another_model(packet: Packet) -> Packet:
    """Of numbers that are none: what is trained from it is not finite, and adds nothing."""
    (step,) = Request.of(packet).steps
    if step.phase != "train":
        return packet
    pieces, once = dict(packet.pieces), []
    for part, key, name in step.once:
        if (part, key) == ("model", "params"):
            value = tree.from_bytes(pieces.pop(name))["value"]
            data = tree.to_bytes({"value": value * float("nan")})
            name = digest(data)
            pieces[name] = data
        once.append((part, key, name))
    return with_step(Packet(packet.header, pieces), once=tuple(once))


def another_body(packet: Packet) -> Packet:
    """With something beside the model, as of a method whose server side steers its clients."""
    (step,) = Request.of(packet).steps
    if step.phase != "train":
        return packet
    body = tree.to_bytes({**tree.from_bytes(packet.pieces[step.body]), "other": {"x": torch.ones(1)}})
    pieces = {name: data for name, data in packet.pieces.items() if name != step.body}
    return with_step(Packet(packet.header, {**pieces, digest(body): body}), body=digest(body))


class Steering(Loop):
    """All but the victim are asked something else, and their answers are passed off as answers to what was asked."""

    def __init__(self, sites: dict[int, RealClient], tamper: Tamper) -> None:
        super().__init__(sites)
        self.tamper, self.before = tamper, self._steer

    def _steer(self, client: int, packet: Packet) -> Packet:
        if client == VICTIM:
            return packet
        answer = Answer.of(self.sites[client].answer(self.tamper(packet)))
        return replace(answer, request=fingerprint(Request.of(packet))).packet()


def built(bench: Bench, text: str, scale: float) -> ClientRuntime:
    """Of a recipe and a scale: both change the learning rate."""
    rate = 0.0 if text == STILL else bench.train.optimizer.lr * scale
    return runtime(bench.change(train=replace(bench.train, optimizer=replace(bench.train.optimizer, lr=rate))))


def steered(folder: Path, tamper: Tamper) -> tuple[Bench, Any, Tensor]:
    """(the bench, what was opened, the model that was sent)."""
    bench = bench_of(CLIENTS)
    sites = {
        client: RealClient(folder / str(client), Identity(f"site-{client}", client), lambda t, s: built(bench, t, s))
        for client in range(CLIENTS)
    }
    setup, options = bench.setup(), PhaseOptions(deadline=5.0, retry=0.0, tries=1)
    loop = Steering(sites, tamper)
    inner = Federated(setup, bench.build_module, loop, RunIdentity("a1", 1, TEXT), options, lambda: (0, 0, 0, 0))
    engine, first = Secured(inner, setup), bench.model()
    with suppress(ClientError, TooFewClients, Diverged):  # they refuse, or nothing that was asked is there
        Runner(setup, engine, first, bench.evaluation).run()
    return bench, engine._sums, first["params"].double()


@pytest.mark.parametrize("tamper", [another_task, another_model], ids=lambda one: one.__name__)
def test_others_that_have_nothing_to_add(tamper: Tamper, tmp_path: Path) -> None:
    bench, sums, _ = steered(tmp_path, tamper)
    known(bench, sums)


@pytest.mark.parametrize("tamper", [another_recipe, another_scale], ids=lambda one: one.__name__)
def test_others_that_add_the_model_as_it_was_sent(tamper: Tamper, tmp_path: Path) -> None:
    bench, sums, sent = steered(tmp_path, tamper)
    known(bench, sums, (CLIENTS - 1) * sent)


def test_others_that_are_sent_another_message(tmp_path: Path) -> None:
    """An honest server's sum is then that of those who were asked alike."""
    _, sums, _ = steered(tmp_path, another_body)
    assert sums.totals[PATH][1] == CLIENTS - 1


@pytest.mark.parametrize("tamper", [another_body, another_recipe, another_scale, another_model, another_task])
def test_a_server_that_keeps_them_all_together_opens_nothing(
    tamper: Tamper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letters between clients that were asked different things do not open."""
    monkeypatch.setattr(SecurePhase, "_leave_out_who_was_asked_otherwise", lambda phase: None)
    bench, sums, sent = steered(tmp_path, tamper)
    known(bench, sums)
    known(bench, sums, (CLIENTS - 1) * sent)
    assert sums is None or not sums.totals or sums.totals[PATH][1] < CLIENTS


class Statistics(Part):
    """A phase whose reply is the same in every round: the sum of a client's samples."""

    name = "statistics"

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("statistics", reduce={"sum": Sum()}, run=self._sum),)

    def _sum(self, client: Client) -> dict[str, Any]:
        return {"sum": client.data.x.float().mean(0).reshape(-1) / 256}


def rounds_of(folder: Path, lost: list[dict[int, str]]) -> tuple[list[Any], list[list[int]], list[dict[str, Any]]]:
    """(what was opened, who was absent, the events) of rounds in which the model does not change. lost: in each, the
    clients that are gone from a step on."""
    plain = methods.build("fedavg")
    bench = Bench(
        lambda: secured(replace(plain, parts=(*plain.parts, Statistics())), threshold=0.6),
        stream=Toy(tasks=1, rounds_per_task=len(lost), clients=CLIENTS),
    )
    loop = loop_of(bench, folder)
    events: list[dict[str, Any]] = []
    setup, identity = bench.setup(), RunIdentity("a1", 1, TEXT)
    options = PhaseOptions(deadline=0.3, retry=0.0, tries=1)
    inner = Federated(setup, bench.build_module, loop, identity, options, lambda: (0, 0, 0, 0), events.append)
    engine, phase = Secured(inner, setup, notify=events.append), setup.method.phases_by_name()["statistics"]
    message: Any = {"model": {key: Cached(0, value) for key, value in bench.model().items()}}
    sums, absent = [], []
    for index, gone in enumerate(lost):

        def drop(client: int, packet: Packet, gone: dict[int, str] = gone) -> Packet | None:
            [step] = Request.of(packet).steps
            return None if gone.get(client) == step.phase else packet

        loop.before = drop
        found = dict(engine.exchange(phase, tuple(range(CLIENTS)), message, Place(index, setup.stream.round(index))))
        absent.append([client for client, reply in found.items() if isinstance(reply, Absent)])
        sums.append(engine._sums)
    return sums, absent, events


@pytest.mark.parametrize("step", ["statistics", SHARE, MASK])
def test_the_same_replies_in_another_round_are_added_up_with_the_same_clients_or_not_at_all(
    step: str, tmp_path: Path
) -> None:
    """The run goes on without the sum, whose difference to the one before is the reply of the client that is gone."""
    sums, absent, _ = rounds_of(tmp_path, [{}, {VICTIM: step}, {}])
    first, second, third = ({} if one is None else one.totals for one in sums)
    if "statistics/sum" in second:
        own = Toy(tasks=1, clients=CLIENTS).data(VICTIM, 0).x.float().mean(0).reshape(-1) / 256
        error = float((first["statistics/sum"][0] - second["statistics/sum"][0] - own).abs().max())
        pytest.fail(f"the reply of client {VICTIM} is known to {error:.1e}")
    assert absent == [[], list(range(CLIENTS)), []]
    assert torch.equal(first["statistics/sum"][0], third["statistics/sum"][0])


def again(folder: Path, repeat: int, run: str, away: set[int]) -> Any:
    """The sum of the first model at a repeat of the phase, of the clients that are not away."""
    bench = bench_of(CLIENTS)
    sites = {
        client: RealClient(folder / str(client), Identity(f"site-{client}", client), lambda t, s: built(bench, t, s))
        for client in range(CLIENTS)
    }
    setup, loop = bench.setup(), Loop(sites)
    loop.away = away
    options = PhaseOptions(deadline=1.0, retry=0.0, tries=1)
    engine = Secured(
        Federated(setup, bench.build_module, loop, RunIdentity(run, 1, TEXT), options, lambda: (0, 0, 0, 0)), setup
    )
    phase, clients = setup.method.train_phase(), tuple(range(CLIENTS))
    message: Any = {"model": {key: Cached(0, value) for key, value in bench.model().items()}}
    with suppress(ClientError, TooFewClients):
        list(engine.exchange(phase, clients, message, Place(0, setup.stream.round(0), repeat)))
    return engine._sums


@pytest.mark.parametrize("run", ["a1", "b2"])
def test_two_sums_of_one_model_at_another_repeat_are_of_the_same_clients(run: str, tmp_path: Path) -> None:
    """Else their difference is, but for the draws of a repeat, the reply of who is in one of them only."""
    first = again(tmp_path, 0, "a1", set())
    assert first.totals[PATH][1] == CLIENTS
    second = again(tmp_path, 1, run, {VICTIM})
    if second is not None and PATH in second.totals:
        error = float(
            (first.totals[PATH][0] - second.totals[PATH][0] - reply_of(bench_of(CLIENTS), VICTIM)).abs().max()
        )
        pytest.fail(f"the reply of client {VICTIM} is known to {error:.1e}")


# what still succeeds: docs/threat-model.md says so --------------------------------------------------------------------
def test_a_server_that_steered_the_state_of_the_others_knows_most_of_a_reply(tmp_path: Path) -> None:
    """FedDyn keeps a gradient on clients. The others were sent a model of large numbers in the round before, in which
    the victim was not asked; now they push their parameters to the clip, whose multiples the server takes away."""

    def bench_with(protected: bool) -> Bench:
        plain = methods.build("feddyn", {"feddyn": {"alpha": 1.0}})
        stream = Toy(tasks=1, rounds_per_task=2, clients=CLIENTS)
        return Bench(lambda: secured(plain, threshold=0.6) if protected else plain, stream=stream)

    bench, bare = bench_with(True), bench_with(False).setup()
    setup, first = bench.setup(), bench.model()
    options, identity = PhaseOptions(deadline=1.0, retry=0.0, tries=1), RunIdentity("a1", 1, TEXT)
    inner = Federated(setup, bench.build_module, loop_of(bench, tmp_path), identity, options, lambda: (0, 0, 0, 0))
    engine, phase, others = Secured(inner, setup), setup.method.train_phase(), (0, 1, 2, 3)
    signs = torch.randint(0, 2, first["params"].shape, generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    for index, (clients, params) in enumerate([(others, signs * 3e4), ((*others, VICTIM), first["params"])]):
        message: Any = {"model": {key: Cached(0, value) for key, value in {**first, "params": params}.items()}}
        list(engine.exchange(phase, clients, message, Place(index, setup.stream.round(index))))
    assert engine._sums is not None and engine._sums.totals["feddyn/params"][1] == CLIENTS
    place = Place(1, bare.stream.round(1))
    [(_, own)] = (
        bench_with(False)
        .eager(bare, ClientStore())
        .exchange(bare.method.train_phase(), (VICTIM,), {"model": dict(first)}, place)
    )
    assert not isinstance(own, Absent)
    clip = 16.0 * (1 - 2.0**-23)
    guesses = [engine._sums.totals["feddyn/params"][0] - count * clip for count in (-4, -2, 0, 2, 4)]
    errors = torch.stack([(guess - own.values["feddyn"]["params"].double()).abs() for guess in guesses]).amin(0)
    assert float((errors < 1e-4).float().mean()) > 0.5
