"""Secure aggregation: the sum is the plain sum, whichever clients drop out, and nothing else reaches the server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everfed.core import tree
from everfed.core.client import Reply
from everfed.core.context import Place, Setup
from everfed.core.engine import Absent, ClientError, Engine
from everfed.core.events import Diverged
from everfed.core.message import Message, PerClient
from everfed.engines.processes import Processes
from everfed.method import CompositionError, Phase
from everfed.methods import registry as methods
from everfed.privacy.secure_client import (
    AGREE,
    MASK,
    NAME,
    SHARE,
    UNMASK,
    ProtocolError,
    SecureAggregation,
    secured,
)
from everfed.privacy.secure_members import needed
from everfed.privacy.secure_server import Secured, TooFewClients
from everfed.store.clients import ClientStore
from tests.support.flaky import STEP, Flaky, events, plain_run, protected, secure_run
from tests.support.phases import phase_of
from tests.support.toy import Bench, Norm, Toy
from tests.support.wire import Wire, crossed

# the same as without -------------------------------------------------------------------------------------------------
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("fedcurv", "fot", "fedl2p", "feddbe", "coordinated-4")]


@pytest.mark.parametrize("name", ["fedavg", "fedgp+der", "coordinated", *SLOW])
def test_a_run_ends_with_the_plain_run_s_model(name: str) -> None:
    """Rounding moves every mean by half a step at most; what training makes of that over four rounds is bounded here by
    2000 steps (0.4 %)."""
    bench = Bench(name, module=Norm, stream=Toy(samples=10))
    plain, secure = bench.run(), secure_run(bench)
    assert torch.allclose(plain.params, secure.params, rtol=0, atol=2000 * STEP)
    assert not torch.equal(secure.params, bench.model()["params"])
    assert torch.equal(plain.state.model["counters"], secure.state.model["counters"])
    assert [e["acc"] for e in events(plain, event="evaluation")] == pytest.approx(
        [e["acc"] for e in events(secure, event="evaluation")], abs=0.03
    )


def test_one_mean_is_within_half_a_step() -> None:
    bench = Bench("fedavg", stream=Toy(tasks=1, rounds_per_task=1, clients=5, samples=7))
    plain, secure = bench.run(), secure_run(bench)
    rounding = plain.params.abs().max() * 2**-23
    assert (plain.params - secure.params).abs().max() <= STEP / 2 + rounding
    [before], [after] = (events(run, event="phase", phase="train") for run in (plain, secure))
    assert after["loss"] == pytest.approx(before["loss"], abs=1 / (1 << 15)) and after["trained"] == 5
    assert plain.state.samples == secure.state.samples


def test_weights_by_samples_are_sums_as_well() -> None:
    sizes = {(0, 0): 3, (1, 0): 11, (2, 0): 0, (3, 0): 20}
    bench = Bench(
        lambda: methods.build("fedavg", {"fedavg": {"weighting": "samples"}}),
        stream=Toy(tasks=1, rounds_per_task=1, clients=4, sizes=sizes),
    )
    plain, secure = bench.run(), secure_run(bench)
    assert torch.allclose(plain.params, secure.params, rtol=0, atol=STEP)
    assert plain.state.samples == secure.state.samples


def test_bytes_are_counted_both_ways() -> None:
    bench = Bench("fedavg")
    plain, secure = bench.run().state.traffic, secure_run(bench).state.traffic
    assert secure.down["fedavg"] == plain.down["fedavg"] and secure.up["fedavg"] == 0
    assert secure.up[NAME] > plain.up["fedavg"] and secure.down[NAME] > 0


# dropouts ------------------------------------------------------------------------------------------------------------
CLIENTS = 5
SMALL = Bench("fedgp", stream=Toy(tasks=1, rounds_per_task=2, clients=CLIENTS, samples=6))
TOLERATED = CLIENTS - needed(CLIENTS, 0.6)


ALL_SETS = [c for size in (1, 2) for c in combinations(range(CLIENTS), size)]
FEW = [(0,), (4,), (0, 1), (1, 3), (3, 4)]  # the first, the last, neighbours and others


@pytest.mark.parametrize(
    "gone", [c if c in FEW else pytest.param(c, marks=pytest.mark.slow) for c in ALL_SETS], ids=str
)
def test_any_clients_up_to_the_threshold_may_go_after_they_shared_keys(gone: tuple[int, ...]) -> None:
    assert TOLERATED == 2
    secure = secure_run(SMALL, {MASK: gone}, threshold=0.6)
    plain = plain_run(SMALL, {"train": gone, "reference": gone})
    assert torch.allclose(plain.params, secure.params, rtol=0, atol=200 * STEP)
    assert set(events(secure, event="phase", phase="train")[0]["absent"]) == {str(client) for client in gone}


@given(st.data())
@settings(max_examples=4, deadline=None)
def test_any_set_at_every_step(data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(CLIENTS)))
    cut = data.draw(st.integers(0, 2))
    gone = order[:2]
    # who goes before keys are shared lowers the number that the threshold is of; two of four are too many then
    lost = {SHARE: gone[:cut], MASK: gone[cut:], UNMASK: ()}
    secure = secure_run(SMALL, lost, threshold=0.6)
    plain = plain_run(SMALL, {"train": gone, "reference": gone})
    assert torch.allclose(plain.params, secure.params, rtol=0, atol=200 * STEP)


def test_who_goes_before_unmasking_still_counts() -> None:
    secure, plain = secure_run(SMALL, {UNMASK: (1, 4)}, threshold=0.6), SMALL.run()
    assert torch.allclose(plain.params, secure.params, rtol=0, atol=200 * STEP)
    assert all("absent" not in event for event in events(secure, event="phase"))


@pytest.mark.parametrize("step", [SHARE, MASK, AGREE, UNMASK])
def test_too_few_fail_with_a_clear_message(step: str) -> None:
    with pytest.raises(TooFewClients, match=r"phase 'train' in round 1: 2 clients are left, 3 are needed"):
        secure_run(SMALL, {step: (0, 2, 3)}, threshold=0.6)


def test_two_clients_are_too_few_in_any_case() -> None:
    with pytest.raises(TooFewClients, match="at least 3"):
        secure_run(replace(SMALL, stream=Toy(clients=2)))


@pytest.mark.parametrize("step", [SHARE, MASK])
def test_the_sum_of_two_of_three_is_never_opened(step: str) -> None:
    with pytest.raises(TooFewClients, match="2 clients are left, 3 are needed"):
        secure_run(replace(SMALL, stream=Toy(clients=3)), {step: (1,)})


@pytest.mark.parametrize(
    ("clients", "threshold", "expected"),
    [(3, 2 / 3, 3), (3, 0.51, 3), (4, 0.51, 3), (10, 2 / 3, 7), (10, 0.51, 6), (4, 0.6, 3), (3, 1.0, 3)],
)
def test_how_many_must_stay(clients: int, threshold: float, expected: int) -> None:
    assert needed(clients, threshold) == expected > clients / 2


# what the server sees ------------------------------------------------------------------------------------------------
def masked_vectors(seen: list[tuple[str, int, Reply]], key: str = "narrow") -> list[np.ndarray]:
    return [reply.values[NAME][key].numpy() for phase, _, reply in seen if phase == MASK]


def test_single_replies_look_random() -> None:
    """Chi-squared over all bytes of all masked vectors, against the uniform distribution; the bare vectors fail it."""
    seen: list[tuple[str, int, Reply]] = []
    bench = Bench("fedavg", stream=Toy(tasks=1, clients=4), module=Norm)
    secure_run(bench, seen=seen)
    for key in ("narrow", "wide"):
        data = np.concatenate([vector.view(np.uint8) for vector in masked_vectors(seen, key)])
        assert _chi_squared(data) < 255 + 8 * np.sqrt(2 * 255)  # eight standard deviations
    bare = np.rint(bench.model()["params"].numpy() / STEP).astype(np.int32).view(np.uint8)
    assert _chi_squared(bare) > 255 + 50 * np.sqrt(2 * 255)


def _chi_squared(data: np.ndarray) -> float:
    expected = len(data) / 256
    return float(((np.bincount(data, minlength=256) - expected) ** 2 / expected).sum())


def test_the_same_reply_is_masked_anew_and_independent_of_others() -> None:
    runs: list[list[tuple[str, int, Reply]]] = [[], []]
    for seen in runs:
        secure_run(Bench("fedavg", stream=Toy(tasks=1)), seen=seen)
    first, second = (masked_vectors(seen) for seen in runs)
    agreeing = np.mean([np.mean(a == b) for a, b in zip(first, second, strict=True)])
    assert agreeing < 0.01
    a, b = (vector.astype(np.float64) for vector in first[:2])
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(len(a))


def test_nothing_but_keys_letters_masked_vectors_and_shares_arrives() -> None:
    seen: list[tuple[str, int, Reply]] = []
    bench = Bench("fedgp+der", module=Norm)
    secure_run(bench, seen=seen)
    assert {phase for phase, _, _ in seen} == {"train", "reference", SHARE, MASK, AGREE, UNMASK}
    for phase, _, reply in seen:
        assert set(reply.values) == {NAME} and (reply.samples, reply.steps, reply.loss) == (0, 0, None)
        allowed = {
            SHARE: {"letters", "commitments", "proof"},
            MASK: {"narrow", "wide"},
            AGREE: {"votes"},
            UNMASK: {"seeds"},
        }.get(phase, {"keys", "form"})
        assert set(reply.values[NAME]) == allowed


def test_a_client_without_values_sends_as_much_as_the_others() -> None:
    seen: list[tuple[str, int, Reply]] = []
    secure_run(Bench("fedgp", stream=Toy(tasks=1, rounds_per_task=1, clients=4, sizes={(1, 0): 0})), seen=seen)
    sizes = {
        client: [tree.tensor_bytes(r.values) for p, c, r in seen if c == client and p == MASK] for client in range(4)
    }
    assert sizes[0] == sizes[1] == sizes[2] == sizes[3] and len(sizes[0]) == 2


# other engines -------------------------------------------------------------------------------------------------------
def test_processes_and_wire_give_the_same_bits() -> None:
    own = protected(Bench("fedgp+der", stream=Toy(tasks=1)))
    makes: list[Callable[[Setup, ClientStore], Engine]] = [
        own.eager,
        lambda setup, store: Processes(setup, store, own.build_module, 2),
        lambda setup, store: Wire(own, {}),
    ]
    ends = []
    for make in makes:
        made: list[Engine] = []

        def engine(setup: Setup, store: ClientStore, make: Any = make, made: list[Engine] = made) -> Engine:
            made.append(make(setup, store))
            return Secured(made[0], setup)

        ends.append(own.run(engine).params)
        made[0].close()
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_a_resumed_run_ends_in_the_same_bits() -> None:
    own = protected(Bench("fedgp+der"))

    def engine(setup: Setup, store: ClientStore) -> Engine:
        return Secured(own.eager(setup, store), setup)

    whole, stopped = own.run(engine), own.run(engine, rounds=2)
    store = ClientStore()
    for client, state in stopped.clients.items():
        store.put(client, crossed(state))
    again = own.run(engine, state=stopped.state, store=store)
    assert torch.equal(whole.params, again.params)
    assert whole.clients[0][NAME] == {"step": "idle"}  # no key, seed or reply stays behind


def test_personal_models_are_scored_without_revealing_single_counts() -> None:
    bench = Bench("fedala", module=Norm, stream=Toy(tasks=1))
    seen: list[tuple[str, int, Reply]] = []
    secure, plain = secure_run(bench, seen=seen), bench.run()
    assert secure.state.rows == plain.state.rows
    assert all(set(reply.values) == {NAME} for phase, _, reply in seen if phase == "evaluate")


def test_rounds_without_synchronisation_send_nothing() -> None:
    bench = Bench("fedavg")
    bench = replace(bench, train=replace(bench.train, sync_every=2))
    secure, plain = secure_run(bench), bench.run()
    assert torch.allclose(plain.params, secure.params, rtol=0, atol=200 * STEP)
    silent = [event for event in events(secure, event="phase", phase="train") if event["round"] % 2 == 0]
    assert all("loss" not in event and event["bytes_up"] == 0 for event in silent)


# refusals ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", list(methods.names()))
def test_methods_that_collect_are_refused_with_the_phase_and_others_are_not(name: str) -> None:
    method = methods.build(name)
    if not method.reveals():
        assert secured(method).parts[-1].name == NAME
        return
    with pytest.raises(CompositionError, match="needs every client's own reply"):
        secured(method)


PROXY = {"glfc": {"old_model": "proxy"}}


@pytest.mark.parametrize(("name", "options", "phase"), [("fedcil", {}, "train"), ("glfc", PROXY, "prototypes")])
def test_servers_that_look_at_single_clients_are_refused_by_phase(name: str, options: Any, phase: str) -> None:
    with pytest.raises(CompositionError, match=f"phase '{phase}'.*needs every client's own reply"):
        secured(methods.build(name, options))


@pytest.mark.parametrize(
    ("name", "options"), [("mfcl", {}), ("glfc", {}), ("af-fcl", {}), ("fedcil", {"fedcil": {"server_steps": 0}})]
)
def test_generators_that_need_the_aggregate_alone_are_not(name: str, options: Any) -> None:
    assert secured(methods.build(name, options)).parts[-1].name == NAME


@pytest.mark.parametrize(
    ("options", "match"), [({"threshold": 0.5}, "threshold"), ({"bits": 40}, "bits"), ({"clip": 0.0}, "clip")]
)
def test_options_validate_themselves(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SecureAggregation(**options)


def test_values_beyond_the_clip_are_warned_about() -> None:
    warnings: list[Any] = []
    own = protected(Bench("fedavg", stream=Toy(tasks=1)), clip=0.05)
    own.run(lambda setup, store: Secured(own.eager(setup, store), setup, notify=warnings.append))
    assert warnings and "outside [-clip, clip]" in warnings[0]["message"]


def test_a_diverged_client_stops_the_run_as_without() -> None:
    bench = Bench("fedavg")
    train = replace(bench.train, optimizer=replace(bench.train.optimizer, lr=1e20))
    with pytest.raises(Diverged):
        secure_run(replace(bench, train=train))


# servers that cheat --------------------------------------------------------------------------------------------------
@dataclass
class Cheat(Flaky):
    """Changes what the clients are sent in one step."""

    step: str = ""
    change: Callable[[dict[str, Any]], dict[str, Any]] = field(default=lambda asked: asked)

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply | Absent]]:
        if phase.name == self.step and message is not None:
            message = {NAME: self.change(dict(message[NAME]))}
        return super().exchange(phase, clients, message, place)


OFF_CURVE = torch.full((1, 66), 255, dtype=torch.uint8)


def other_form(asked: dict[str, Any]) -> str:
    """Each shape of client 0's form with one number more."""
    form = json.loads(asked["forms"]["0"])
    return json.dumps({path: [kind, [*shape, 2]] for path, (kind, shape) in form.items()})


def huge_form(asked: dict[str, Any]) -> str:
    return json.dumps({"fedavg/counters": ["int64", [1 << 34]]})


def flipped(votes: dict[str, Tensor]) -> dict[str, Tensor]:
    return {voter: vote ^ 1 for voter, vote in votes.items()}


Change = Callable[[dict[str, Any]], dict[str, Any]]
OTHERS, SMALL_GROUP = "the server passes on other keys, or another form", "^2 clients; secure aggregation needs 3"
NO_SET = "the set to open is not one of clients that shared their keys, with this one"
# the step, what the server changes in it, and which check of the client's refuses that
CHEATS: dict[str, tuple[str, Change, str]] = {
    "another client's keys": (SHARE, lambda a: {**a, "keys": a["keys"].flip(0)}, OTHERS),
    "a group of two": (SHARE, lambda a: {**a, "clients": a["clients"][:2], "keys": a["keys"][:2]}, SMALL_GROUP),
    "not a list of keys": (SHARE, lambda a: {**a, "keys": a["keys"][:, :5]}, "keys of client 0 are no points"),
    "keys that are no points on the curve": (
        SHARE, lambda a: {**a, "keys": torch.cat([a["keys"][:-1], OFF_CURVE])}, "keys of client 4 are no points",
    ),
    "another form of its reply": (SHARE, lambda a: {**a, "forms": {**a["forms"], "0": "{}"}}, OTHERS),
    "two forms of one value": (
        SHARE, lambda a: {**a, "forms": {**a["forms"], "4": other_form(a)}}, "two forms of fedavg/counters",
    ),
    "a form larger than memory": (
        SHARE, lambda a: {**a, "forms": {**a["forms"], "4": huge_form(a)}}, "two forms of fedavg/counters",
    ),
    "hardly anybody shared": (MASK, lambda a: {**a, "sharing": a["sharing"][:1]}, "^1 of 5 clients shared their keys"),
    "strangers shared": (MASK, lambda a: {**a, "sharing": torch.tensor([0, 1, 2, 9])}, "^4 of 5 clients shared"),
    "without this client": (MASK, lambda a: {**a, "sharing": a["sharing"][1:]}, "^4 of 5 clients shared their keys"),
    "no letters": (MASK, lambda a: {k: v for k, v in a.items() if k != "letters"}, "no letter of client 1"),
    "letters of another size": (
        MASK, lambda a: {**a, "letters": {"1": torch.zeros(3, dtype=torch.uint8)}}, "none of the right size",
    ),
    "hardly anybody alive": (AGREE, lambda a: {"alive": a["alive"][:1]}, "^1 of 5 clients are left; too few"),
    "fewer alive than are needed": (AGREE, lambda a: {"alive": a["alive"][:3]}, "^3 of 5 clients are left; too few"),
    "a set without the client": (AGREE, lambda a: {"alive": a["alive"][1:]}, NO_SET),
    "strangers alive": (AGREE, lambda a: {"alive": torch.tensor([0, 1, 2, 3, 9])}, NO_SET),
    "no votes": (UNMASK, lambda a: {}, "^1 clients agree on the set to open; 4 are needed"),
    "votes of another set": (
        UNMASK, lambda a: {"votes": PerClient({c: flipped(v) for c, v in a["votes"].values.items()})},
        "^1 clients agree",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
def test_clients_refuse_a_server_that_cheats(name: str) -> None:
    """Client 0 refuses, which is the first that is asked, so that no other client's check stands in for its own."""
    step, change, reason = CHEATS[name]
    own = protected(SMALL)

    def engine(setup: Setup, store: ClientStore) -> Engine:
        return Secured(Cheat(own.eager(setup, store), step=step, change=change), setup)

    with pytest.raises(ClientError, match="client 0 failed") as caught:
        own.run(engine)
    assert isinstance(caught.value.cause, ProtocolError)
    assert re.search(reason, str(caught.value.cause)), caught.value.cause


def test_a_step_is_taken_once() -> None:
    part = secured(methods.build("fedavg")).part(NAME)
    request = {NAME: {"alive": torch.tensor([0]), "gone": torch.tensor([])}}
    here = {"place": "0.0", "epoch": 0}
    places = ({}, {"step": "idle"}, {"step": "idle", **here}, {"step": MASK, **here}, {"step": UNMASK, "place": "7.0"})
    for state in ({NAME: own} for own in places):
        with pytest.raises(ProtocolError, match="but this client is at"):
            phase_of(part, UNMASK).run(Bench().client(NAME, state, phase=UNMASK, messages=request))  # type: ignore[misc]


# clients that cheat --------------------------------------------------------------------------------------------------
@dataclass
class Garbled(Flaky):
    """Client 0 answers one step with something else."""

    step: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply | Absent]]:
        for client, reply in super().exchange(phase, clients, message, place):
            if client == 0 and phase.name == self.step and isinstance(reply, Reply):
                kept = {k: v for k, v in reply.values[NAME].items() if k not in self.values}
                reply = replace(reply, values={NAME: {**kept, **self.values}})
            yield client, reply


@pytest.mark.parametrize(
    ("step", "values"),
    [
        ("train", {"form": "?"}),
        ("train", {"form": '{"fedavg/params": ["float32", [3]]}'}),
        ("train", {"keys": torch.zeros(3, dtype=torch.uint8)}),
        (SHARE, {"letters": {}}),
        (SHARE, {"letters": 5}),
        (MASK, {"narrow": torch.zeros(3, dtype=torch.int32)}),
        (MASK, {"wide": torch.zeros(3)}),
        (MASK, {"narrow": None}),
    ],
)
def test_a_client_that_answers_garbage_is_left_out_and_named(step: str, values: dict[str, Any]) -> None:
    bench = Bench("fedavg", stream=Toy(tasks=1, rounds_per_task=1, clients=5))
    own = protected(bench, threshold=0.6)
    outcome = own.run(lambda setup, store: Secured(Garbled(own.eager(setup, store), step=step, values=values), setup))
    plain = plain_run(bench, {"train": (0,)})
    assert torch.allclose(outcome.params, plain.params, rtol=0, atol=STEP)
    [event] = events(outcome, event="phase", phase="train")
    assert event["absent"]["0"].startswith("rejected: ")
