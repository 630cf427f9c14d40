"""Replies that pass every check of form and are false: how far two of seven liars get."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from everfed.core.client import Reply
from everfed.core.context import Place
from everfed.core.method import Method, compose
from everfed.core.tree import to_bytes
from everfed.federation.checking import expected_reply, uploaded_tensors
from everfed.federation.codec import reply_to_tree, to_reply
from everfed.federation.cross_checks import SampleClaims, find_outliers
from everfed.federation.packet import Packet
from everfed.federation.roster import Roster
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.streams.own import Own
from tests.federation.loop import Loop, federated, loop_of
from tests.support.toy import Bench, Outcome, Toy

LIARS = (5, 6)
SEVEN = Toy(clients=7, tasks=1, rounds_per_task=2, sizes={(client, 0): 8 + client for client in range(7)})
Lie = Callable[[Reply], Reply]


@pytest.fixture(autouse=True)
def _no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def seven(**options: Any) -> Bench:
    def build() -> Method:
        return compose(FedAvg(**options), name="fedavg")

    return Bench(build, stream=SEVEN)


def lying(loop: Loop, lie: Lie) -> None:
    """Clients 5 and 6 send `lie(their reply)` whenever they have trained."""

    def after(client: int, packet: Packet) -> Packet:
        if client not in LIARS or packet.header["kind"] != "reply":
            return packet
        said = [to_bytes(reply_to_tree(lie(to_reply(data)))) for data in packet.pieces.values()]
        return Packet(packet.header, dict(zip(packet.pieces, said, strict=True)))

    loop.after = after


def scaled(factor: float) -> Lie:
    def lie(reply: Reply) -> Reply:
        sent = {part: {k: torch.full_like(v, factor) for k, v in tree.items()} for part, tree in reply.values.items()}
        return replace(reply, values=sent)

    return lie


def claiming(samples: int) -> Lie:
    return lambda reply: replace(reply, samples=samples)


def without_liars(bench: Bench) -> Outcome:
    return replace(bench, stream=replace(SEVEN, cohorts={r: (0, 1, 2, 3, 4) for r in range(2)})).run()


def test_replies_far_beyond_the_others_are_refused_and_the_run_is_that_of_the_rest(tmp_path: Path) -> None:
    """9.9e7 is below the largest number that any reply may hold; the largest honest update is some hundredths."""
    bench = seven()
    loop = loop_of(bench, tmp_path)
    lying(loop, scaled(9.9e7))
    outcome = federated(bench, loop)
    refused = [event for event in outcome.events if event["event"] == "client"]
    assert [event["client"] for event in refused] == [5, 6, 5, 6]
    assert all("outlier: fedavg/params moved by" in str(event["reason"]) for event in refused)
    assert torch.equal(outcome.params, without_liars(bench).params)


def test_a_claim_of_many_samples_counts_for_what_the_client_has(tmp_path: Path) -> None:
    """The server holds the recipe's stream, so it knows how many samples every client may train on."""
    bench = seven(weighting="samples")
    loop = loop_of(bench, tmp_path)
    lying(loop, claiming(10**9))
    outcome = federated(bench, loop)
    assert torch.equal(outcome.params, bench.run().params)
    (first, *_) = [event for event in outcome.events if event["event"] == "warning"]
    assert first["message"] == "client 5 claims 1000000000 samples and counts for 13; see federation.samples"


def test_honest_clients_of_unequal_size_are_left_alone(tmp_path: Path) -> None:
    bench = seven(weighting="samples")
    outcome = federated(bench, loop_of(bench, tmp_path))
    assert torch.equal(outcome.params, bench.run().params)
    assert not [event for event in outcome.events if event["event"] in ("client", "warning")]


# the bounds themselves -----------------------------------------------------------------------------------------------
def moved(bench: Bench, lengths: list[float]) -> dict[int, Reply]:
    base = bench.model()["params"]
    way = torch.ones_like(base) / base.numel() ** 0.5
    return {client: Reply({"fedavg": {"params": base + length * way}}) for client, length in enumerate(lengths)}


def outliers(bench: Bench, replies: dict[int, Reply]) -> set[int]:
    setup, place, model = bench.setup(), Place(0, bench.stream.round(0)), bench.model()
    expected = expected_reply(setup, setup.method.train_phase(), place, model)
    return set(find_outliers(expected, uploaded_tensors(setup, place, model), replies, 1000.0))


@pytest.mark.parametrize(
    ("lengths", "refused"),
    [
        ([1.0, 2.0, 1999.0], set()),  # the median is 2, the bound 2000
        ([1.0, 2.0, 2001.0], {2}),
        ([1.0, 1e5, 1e5], set()),  # the liars are the majority
        ([0.0, 0.0, 999.0, 1001.0, 0.0], {3}),  # most did not train
        ([1.0, 1e7], set()),  # of two, either may be the liar
        ([1.0, 1.0, 1e4, 1.0, 1e7], {2, 4}),
    ],
)
def test_an_outlier_is_more_than_a_thousand_medians_away(lengths: list[float], refused: set[int]) -> None:
    bench = seven()
    assert outliers(bench, moved(bench, lengths)) == refused


def test_what_is_sent_as_an_update_is_compared_with_zero() -> None:
    bench = seven(reducer="norm-clipping")
    base = torch.ones_like(bench.model()["params"])
    replies = {client: Reply({"fedavg": {"update": base * length}}) for client, length in enumerate((1.0, 1.0, 1e4))}
    assert outliers(bench, replies) == {2}


@dataclass(frozen=True)
class Unknown(Toy):
    """A stream whose samples the server does not have."""

    private_data: bool = True

    def data(self, client: int, task: int) -> Any:
        raise AssertionError("the server asked for a client's samples")


def capped(claims: dict[int, int], **known: int) -> dict[int, int]:
    bench = replace(seven(weighting="samples"), stream=Unknown(clients=7))
    phase, place = bench.build_method().train_phase(), Place(0, bench.stream.round(0))
    return SampleClaims(bench.setup(), lambda client: known.get(f"c{client}")).capped(phase, place, claims)


def test_where_only_the_client_knows_its_samples_it_counts_for_the_median_or_for_what_the_roster_allows() -> None:
    honest = {0: 10, 1: 20, 2: 30, 3: 40, 4: 50}
    assert capped({**honest, 5: 10**9, 6: 10**9}) == {4: 40, 5: 40, 6: 40}
    assert capped({**honest, 5: 10**9, 6: 10**9}, c4=50, c5=25) == {5: 25, 6: 40}
    assert capped({0: 7, 1: 7}) == {} and capped({}) == {}
    assert Own.private_data and not Toy.private_data


def test_claims_that_weigh_nothing_are_left_alone() -> None:
    bench = seven()
    phase, place = bench.build_method().train_phase(), Place(0, bench.stream.round(0))
    assert SampleClaims(bench.setup()).capped(phase, place, {0: 10**9, 1: 1}) == {}


def test_a_rehearsal_may_bring_the_samples_of_earlier_tasks_back() -> None:
    stream = Toy(clients=2, tasks=3, sizes={(0, task): 10 + task for task in range(3)})
    place = Place(4, stream.round(4))  # of the third task
    for name, most in (("fedavg", 12), ("ideal", 10 + 11 + 12)):
        bench = Bench(name, {"fedavg": {"weighting": "samples"}}, stream=stream)
        claims, phase = SampleClaims(bench.setup()), bench.build_method().train_phase()
        assert claims.capped(phase, place, {0: most, 1: 12}) == {}
        assert claims.capped(phase, place, {0: most + 1, 1: 12}) == {0: most}


def test_a_roster_knows_the_name_of_every_client(tmp_path: Path) -> None:
    roster = Roster(tmp_path / "roster.json", 3)
    roster.enrol("site-a", 1, b"")
    assert roster.name(1) == "site-a" and roster.name(0) == ""
