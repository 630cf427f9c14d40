"""One client of five lies under secure aggregation: it is named, and the phase goes on without it or its lie."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from everfed.core.client import Reply
from everfed.core.context import Place, Setup
from everfed.core.engine import Absent, ClientError, Engine
from everfed.core.message import Message
from everfed.method import Client, Mean, Method, Part, Phase, Values
from everfed.methods import registry as methods
from everfed.privacy import secure_client, shamir
from everfed.privacy.secure_client import AGREE, MASK, NAME, RECOVER, SHARE
from everfed.privacy.secure_members import Members
from everfed.privacy.secure_server import Secured, TooFewClients
from everfed.store.clients import ClientStore
from tests.support.flaky import STEP, Flaky, Lost, plain_run, protected
from tests.support.secure_lies import IGNORED, LEFT_OUT, OFF_CURVE, Lie, changed, key
from tests.support.toy import Bench, Outcome, Toy

LIAR = 0
BENCH = Bench("fedavg", stream=Toy(tasks=1, rounds_per_task=1, clients=5))


@dataclass
class Lying(Flaky):
    """The liar's reply to one step is replaced by `lie(it)`."""

    step: str = ""
    lie: Lie = field(default=lambda reply: reply)

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply | Absent]]:
        for client, reply in super().exchange(phase, clients, message, place):
            if client == LIAR and phase.name == self.step and isinstance(reply, Reply):
                reply = replace(reply, values={NAME: self.lie(dict(reply.values[NAME]))})
            yield client, reply


def run(
    step: str = "", lie: Lie = lambda reply: reply, lost: Lost | None = None
) -> tuple[Outcome, list[dict[str, Any]]]:
    """(the run, what the server was warned of)."""
    own, warned = protected(BENCH, threshold=0.6), []  # type: ignore[var-annotated]

    def engine(setup: Setup, store: ClientStore) -> Engine:
        return Secured(Lying(own.eager(setup, store), lost or {}, step=step, lie=lie), setup, notify=warned.append)

    return own.run(engine), warned


def absences(outcome: Outcome, phase: str = "train") -> dict[str, str]:
    [event] = [event for event in outcome.events if event["event"] == "phase" and event["phase"] == phase]
    return event.get("absent", {})


@cache
def without(*clients: int) -> Tensor:
    return plain_run(BENCH, {"train": clients}).params


def near(outcome: Outcome, expected: Tensor) -> bool:
    return torch.allclose(outcome.params, expected, rtol=0, atol=STEP)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_client_that_lies_before_the_sum_is_opened_is_named_and_left_out(name: str) -> None:
    outcome, _ = run(*LEFT_OUT[name])
    assert set(absences(outcome)) == {str(LIAR)} and absences(outcome)[str(LIAR)].startswith("rejected: ")
    assert near(outcome, without(LIAR))


@pytest.mark.parametrize("name", IGNORED)
def test_a_client_that_lies_about_shares_and_votes_is_named_and_the_lie_does_not_count(name: str) -> None:
    """Its vector is in the sum already, and is right as far as can be known."""
    outcome, warned = run(*IGNORED[name])
    assert absences(outcome) == {} and near(outcome, without())
    assert {(event["client"], event["kind"]) for event in warned} == {(LIAR, "rejected")}


@dataclass(frozen=True)
class Quiet(Part):
    """A part whose value is absent in this round."""

    name = "a"

    def reducers(self) -> dict[str, Mean]:
        return {"x": Mean()}


def test_a_form_of_a_value_that_no_other_client_has_is_refused_where_it_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every client would have to send as many zeros."""
    plain = methods.build("fedavg")
    bench = BENCH.change(method=lambda: Method("fedavg", (Quiet(), *plain.parts), plain.warnings))
    monkeypatch.setitem(globals(), "BENCH", bench)
    huge = {"a/x": ["float32", [1 << 30]]}
    outcome, _ = run("train", key("form", lambda text: json.dumps({**json.loads(text), **huge})))
    assert absences(outcome)["0"].startswith("rejected: too large: a form of 1073742")
    assert set(absences(outcome)) == {"0"} and near(outcome, without(LIAR))


def test_one_complaint_does_not_show_who_lies_so_both_are_left_out() -> None:
    for step, lie in (
        (MASK, lambda reply: {"complaints": torch.tensor([1])}),
        (SHARE, key("letters", lambda tree: {**tree, "1": tree["1"] ^ 1})),
    ):
        outcome, _ = run(step, lie)
        assert set(absences(outcome)) == {"0", "1"} and near(outcome, without(0, 1))
        assert absences(outcome)["0"] != absences(outcome)["1"]  # who complained about whom


def test_false_shares_of_the_keys_of_clients_that_are_gone_do_not_count() -> None:
    outcome, warned = run(RECOVER, key("keys", changed), {MASK: (4,)})
    assert set(absences(outcome)) == {"4"} and near(outcome, without(4))
    assert [(event["client"], event["kind"]) for event in warned] == [(LIAR, "rejected")]


def dealing(monkeypatch: pytest.MonkeyPatch, deal: Callable[..., shamir.Dealing]) -> None:
    """The liar deals by `deal`; it is the first to deal in every attempt."""
    honest, dealers = shamir.deal, [0]

    def dealt(*arguments: Any) -> shamir.Dealing:
        dealers[0] += 1
        return (deal if dealers[0] == 1 else honest)(*arguments)

    monkeypatch.setattr(secure_client.shamir, "deal", dealt)


def test_a_dealer_of_another_key_that_goes_away_is_left_out_before_anything_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = shamir.deal
    dealing(monkeypatch, lambda key, *rest: honest(bytes(32), *rest))
    outcome, _ = run(lost={MASK: (LIAR,)})
    assert absences(outcome)[str(LIAR)] == "rejected: malformed: its shares do not give its key"
    assert near(outcome, without(LIAR))


def test_a_dealer_whose_seed_lies_on_no_polynomial_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares and commitments of a polynomial of too high a degree, with a proof of the right length."""
    honest = shamir.deal

    def deal(key: bytes, seed: bytes, threshold: int, count: int, context: bytes) -> shamir.Dealing:
        made = honest(key, seed, threshold + 1, count, context)
        return replace(made, proof=made.proof[: threshold * shamir.SHARE])

    dealing(monkeypatch, deal)
    outcome, _ = run()
    assert set(absences(outcome)) == {str(LIAR)} and near(outcome, without(LIAR))


def test_two_liars_in_two_attempts_are_both_left_out() -> None:
    """The first is found by its letters, the second by its answer to the request for fresh keys."""
    own = protected(BENCH, threshold=0.6)

    @dataclass
    class Two(Lying):
        def exchange(self, phase: Phase, clients: Sequence[int], message: Any, place: Place) -> Iterator[Any]:
            for client, reply in super().exchange(phase, clients, message, place):
                if client == 1 and phase.name == secure_client.KEYS and isinstance(reply, Reply):
                    reply = replace(reply, values={NAME: {"keys": OFF_CURVE}})
                yield client, reply

    def engine(setup: Setup, store: ClientStore) -> Engine:
        return Secured(Two(own.eager(setup, store), step=SHARE, lie=key("letters", changed)), setup)

    outcome = own.run(engine)
    assert set(absences(outcome)) == {"0", "1"} and near(outcome, without(0, 1))


def test_too_many_liars_end_the_phase_with_a_message() -> None:
    with pytest.raises(TooFewClients, match="2 clients are left, 3 are needed"):
        run(SHARE, key("letters", changed), {"train": (3, 4)})


# masked vectors ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("part", ["narrow", "wide"])
def test_a_garbage_vector_is_seen_in_the_sum_which_is_not_used(part: str) -> None:
    rng = np.random.default_rng(0)

    def garbage(vector: Tensor) -> Tensor:
        numbers = torch.from_numpy(rng.integers(-(1 << 31), 1 << 31, len(vector)))
        return numbers.to(torch.int32) if part == "narrow" else numbers << 32

    outcome, warned = run(MASK, key(part, garbage))
    assert set(absences(outcome)) == {"0", "1", "2", "3", "4"}
    assert all("no sum of replies" in why and "clients 0,1,2,3,4" in why for why in absences(outcome).values())
    assert torch.equal(outcome.params, BENCH.model()["params"])
    assert "at least one client sent a false vector" in warned[0]["message"]


def test_a_lie_inside_the_bounds_of_the_sum_cannot_be_seen() -> None:
    """What is added to a masked vector is added to the sum. This is what secure aggregation cannot prevent."""
    outcome, warned = run(MASK, key("narrow", lambda vector: vector + round(1.0 / STEP)))
    assert warned == [] and absences(outcome) == {}
    assert torch.allclose(outcome.params, without() + 1.0 / 5, rtol=0, atol=STEP)


def test_one_reply_that_is_not_finite_does_not_stop_the_others() -> None:
    """Each client says so of its own."""
    outcome, warned = run("train", lambda reply: {**reply, "broken": True})
    assert near(outcome, without()) and "1 replies were not finite" in warned[0]["message"]


# servers that send clients different things -------------------------------------------------------------------------
VICTIM = 4


@dataclass
class Divided(Flaky):
    """One step's request is changed for some of the clients."""

    step: str = ""
    some: tuple[int, ...] = (VICTIM,)
    change: Lie = field(default=lambda request: request)

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply | Absent]]:
        for client in clients:
            sent = message
            if phase.name == self.step and client in self.some and message is not None:
                sent = {NAME: self.change(dict(message[NAME]))}
            yield from super().exchange(phase, [client], sent, place)


def divided(
    step: str, change: Lie, some: tuple[int, ...] = (VICTIM,), lost: Lost | None = None, threshold: float = 0.6
) -> Outcome:
    own = protected(BENCH, threshold=threshold)

    def engine(setup: Setup, store: ClientStore) -> Engine:
        return Secured(Divided(own.eager(setup, store), lost or {}, step=step, some=some, change=change), setup)

    return own.run(engine)


def test_other_forms_passed_on_to_one_client_keep_it_out_of_the_sum() -> None:
    """With its numbers moved by one path, the victim's would be added to the others' zeros. Letters are bound to the
    keys and forms of all members, so it can open none, no other can open its own, and it sends no vector."""
    outcome = divided(SHARE, lambda request: {**request, "forms": {**request["forms"], "0": "{}"}})
    assert set(absences(outcome)) == {str(VICTIM)} and near(outcome, without(VICTIM))


def test_another_set_of_peers_passed_on_to_one_client_opens_noise() -> None:
    """The victim is to leave out the masks that it shares with one peer. All its masks are bound to the set, so none
    cancels."""
    other = {"sharing": torch.tensor([1, 2, 3, 4])}
    outcome = divided(MASK, lambda request: {**request, **other}, lost={AGREE: (VICTIM,)})
    assert all("no sum of replies" in why for why in absences(outcome).values()) and len(absences(outcome)) == 5
    assert torch.equal(outcome.params, BENCH.model()["params"])


def test_clients_that_receive_different_sets_unmask_nothing() -> None:
    """For two of them the victim is gone, and they would give its mask key's shares; three would give its seed's."""
    with pytest.raises(ClientError, match=r"client 0 .*: 3 clients agree on the set to open; 4 are needed"):
        divided(AGREE, lambda request: {"alive": torch.tensor([0, 1, 2, 3])}, some=(2, 3), threshold=0.7)


# clients of two rounds or phases in one sum --------------------------------------------------------------------------
Move = Callable[[Phase, Place], tuple[Phase, Place]]


@dataclass(frozen=True)
class TwoPhases(Part):
    """Two phases whose replies have the same form."""

    name = "two"

    def phases(self) -> tuple[Phase, ...]:
        return tuple(Phase(name, reduce={"x": Mean()}, run=self._run) for name in ("first", "second"))

    def _run(self, client: Client) -> Values:
        return {"x": torch.ones(2)}


@dataclass
class Mixed(Flaky):
    """The victim makes every step in another phase or at another place than the others."""

    move: Move = field(default=lambda phase, place: (phase, place))

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply | Absent]]:
        for client in clients:
            where = self.move(phase, place) if client == VICTIM else (phase, place)
            yield from super().exchange(where[0], [client], message, where[1])


def unbind(monkeypatch: pytest.MonkeyPatch, *what: str) -> None:
    """Clients and server leave phase and place out of what letters, or shares and masks, are bound to."""
    if "letters" in what:
        monkeypatch.setattr(
            secure_client, "_letter_context", lambda own, members, *ends: repr((*ends[:2], members.digest)).encode()
        )
    if "digest" in what:
        honest = Members.__dict__["digest"].func
        monkeypatch.setattr(Members, "digest", property(lambda members: honest(replace(members, where=""))))


def mixed(move: Move) -> Outcome:
    plain = methods.build("fedavg")
    own = protected(BENCH.change(method=lambda: Method("fedavg", (TwoPhases(), *plain.parts))), threshold=0.6)
    return own.run(lambda setup, store: Secured(Mixed(own.eager(setup, store), move=move), setup))


def second_instead_of_first(phase: Phase, place: Place) -> tuple[Phase, Place]:
    return (replace(phase, name="second") if phase.name == "first" else phase), place


MOVES: dict[str, Move] = {
    "round": lambda phase, place: (phase, replace(place, round=place.round + 1)),
    "repeat": lambda phase, place: (phase, replace(place, repeat=place.repeat + 1)),
    "phase": second_instead_of_first,
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("unbound", [(), ("letters",), ("digest",)])
def test_a_reply_is_not_added_up_with_replies_of_another_round_or_phase(
    move: str, unbound: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server passes keys, letters and shares of one phase off as those of another, to open the victim's reply in a
    sum with replies that it knows. Letters are bound to phase and place, and so is the digest that goes into shares
    and masks: each alone keeps the victim out."""
    unbind(monkeypatch, *unbound)
    outcome = mixed(MOVES[move])
    assert set(absences(outcome, "first")) == {str(VICTIM)}
    assert near(outcome, without() if move == "phase" else without(VICTIM))


@pytest.mark.parametrize("move", MOVES)
def test_without_both_bindings_a_reply_would_be_added_up_with_those_of_another_round_or_phase(
    move: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack above is one that works where nothing is bound to phase and place."""
    unbind(monkeypatch, "letters", "digest")
    assert absences(mixed(MOVES[move]), "first") == {}
