"""Ledgers: what was released is counted once, never forgotten, and never rolled back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import everfed
from everfed import privacy
from everfed.core.context import Setup
from everfed.core.engine import Engine
from everfed.core.method import Method
from everfed.core.phase import When
from everfed.core.server import RunState
from everfed.engines.ranks import Ranks
from everfed.errors import CompositionError, UserError
from everfed.federation.client import Identity, RealClient
from everfed.federation.phase_options import PhaseOptions
from everfed.privacy.accountant import composed, epsilon, multiplier
from everfed.privacy.differential import NAME, BudgetSpent, DifferentialPrivacy, private
from everfed.privacy.secure_client import secured
from everfed.privacy.secure_server import Secured
from everfed.privacy.spending import ClientLedger, RunLedger
from everfed.store.clients import ClientStore
from everfed.store.ledger import PRIVACY_LEDGER, AppendedFile, Lost
from tests.federation.field import small_recipe
from tests.federation.loop import Loop, federated, runtime
from tests.privacy.test_gaussian import copied
from tests.support.toy import Bench, Outcome, Toy

pytest.importorskip("dp_accounting", reason="pip install 'everfed[privacy]'")
PLAIN = Bench("fedavg", stream=Toy(clients=3, tasks=1, rounds_per_task=3))


def protected(bench: Bench = PLAIN, **options: Any) -> Bench:
    plain = bench.build_method
    return replace(bench, method=lambda: private(plain(), **options))


def loop(bench: Bench, folder: Path, budget: float = 0.0) -> Loop:
    """Clients with a budget; the recipe is whatever `bench` is."""

    def site(client: int) -> RealClient:
        identity = Identity(f"site-{client}", client)
        return RealClient(folder / str(client), identity, lambda recipe, scale: runtime(bench), budget=budget)

    return Loop({client: site(client) for client in range(bench.stream.clients)})


def ledger(folder: Path) -> list[dict[str, Any]]:
    """What was charged, or of a run released."""
    found = [json.loads(line) for line in (folder / PRIVACY_LEDGER).read_text().splitlines()]
    return [entry for entry in found if "request" not in entry]  # these say which content was paid for


# the client's own ----------------------------------------------------------------------------------------------------
def test_a_recipe_without_noise_is_refused_by_a_client_with_a_budget(tmp_path: Path) -> None:
    """The server chooses the recipe, so the client must be able to refuse it."""
    for bench, why in ((PLAIN, "no [privacy.dp]"), (protected(noise=9.0, seed=1), "privacy.dp.seed set")):
        sites = loop(bench, tmp_path / why.replace(" ", ""), budget=8.0)
        with pytest.raises(Exception, match=r"a privacy budget of 8, and the recipe has ") as refused:
            federated(bench, sites)
        assert why in str(refused.value)
        assert all(b"safetensors" not in piece for _, packet in sites.received for piece in packet.pieces.values())
        assert not list(tmp_path.glob("*/*/*/steps/*.safetensors"))


@pytest.mark.parametrize("kind", ["local", "central"])
def test_a_budget_holds_over_runs_and_restarts_of_the_client(tmp_path: Path, kind: str) -> None:
    """Three rounds in one run, then the next run gets one reply more and no second."""
    bench = protected(kind=kind, noise=4.0)
    each = multiplier(4.0, 1, 2.0 if kind == "local" else 1.0)
    budget = composed({each: 4}, 1e-5) + 1e-6
    federated(bench, loop(bench, tmp_path, budget))
    assert [len(ledger(tmp_path / str(client))) for client in range(3)] == [3, 3, 3]
    sites = loop(bench, tmp_path, budget)  # new processes
    for client, packet in list(_requests(bench, tmp_path / "other").items()):
        replies = [sites.sites[client].answer(one).header["kind"] for one in packet]
        assert replies == ["reply", "refused", "refused"]
    assert [len(ledger(tmp_path / str(client))) for client in range(3)] == [4, 4, 4]
    assert {entry["multiplier"] for entry in ledger(tmp_path / "0")} == {each}


def _requests(bench: Bench, folder: Path) -> dict[int, list[Any]]:
    """The requests of another run, as a server sends them."""
    made = loop(bench, folder)
    federated(bench, made)
    renamed: dict[int, list[Any]] = {}
    for client, packet in made.sent:
        pieces = {name: data for _, other in made.sent for name, data in other.pieces.items()}
        renamed.setdefault(client, []).append(replace(packet, header={**packet.header, "run": "b2"}, pieces=pieces))
    return renamed


def test_a_second_draw_for_the_same_place_is_charged_and_a_repeated_reply_is_not(tmp_path: Path) -> None:
    bench = protected(kind="local", noise=4.0)
    sites = loop(bench, tmp_path)
    saved: list[RunState] = []
    federated(bench, sites, stop=lambda state: saved.append(copied(state)), durable=lambda state: state.round < 2)
    state = next(one for one in saved if one.place == (1, 0, 0, 0))
    for epoch, shift, entries in ((2, 0.0, 3), (3, 0.5, 5), (4, 0.0, 5)):
        other = copied(state)
        other.set_model({**other.model, "params": other.model["params"] + shift})
        federated(bench, sites, epoch=epoch, state=other, durable=lambda state: False)
        assert [len(ledger(tmp_path / str(client))) for client in range(3)] == [entries] * 3


def test_another_content_of_the_same_request_is_a_further_release(tmp_path: Path) -> None:
    """A client whose samples change between two equal requests draws other noise: the second reply is charged, too."""
    bench = protected(kind="local", noise=4.0)
    state = bench.run(rounds=1).clients[0]
    book, method = ClientLedger(tmp_path), bench.build_method()
    train = method.train_phase()
    for name in ("a", "a", "b", "b"):
        book.charge(method, train, "a1", (0, 0, 0, 0), "asked")
        book.record(method, "a1", (0, 0, 0, 0), "asked", {**state, NAME: {**state[NAME], "release": name}})
    assert len(ledger(tmp_path)) == 2
    again = ClientLedger(tmp_path)
    again.record(method, "a1", (0, 0, 0, 0), "asked", {**state, NAME: {**state[NAME], "release": "a"}})
    assert len(ledger(tmp_path)) == 2 and again.spent() == pytest.approx(book.spent())


def test_a_bare_run_is_one_entry_that_no_later_budget_can_hold(tmp_path: Path) -> None:
    federated(PLAIN, loop(PLAIN, tmp_path))
    (entry,) = ledger(tmp_path / "0")
    assert entry["multiplier"] == 0.0 and composed({0.0: 1, 5.0: 3}, 1e-5) == float("inf")
    with pytest.raises(Exception, match="epsilon would be inf"):
        federated(protected(noise=9.0), loop(protected(noise=9.0), tmp_path, budget=100.0), epoch=2)


def test_a_participation_under_secure_aggregation_is_charged_once(tmp_path: Path) -> None:
    def both() -> Method:
        return secured(private(PLAIN.build_method(), noise=2.0))

    bench = replace(PLAIN, method=both)

    def engine(setup: Setup, store: ClientStore) -> Engine:
        return Secured(bench.eager(setup, store), setup)

    outcome: Outcome = bench.run(engine)
    book, method = ClientLedger(tmp_path, budget=100.0), both()
    for phase in ("train", *(step.name for step in method.phases(When.INSIDE))):
        book.charge(method, method.phases_by_name()[phase], "a1", (0, 0, 0, 0), phase)
        book.record(method, "a1", (0, 0, 0, 0), phase, outcome.clients[0])
    assert len(ledger(tmp_path)) == 1 and ledger(tmp_path)[0]["multiplier"] == 2.0


# the run's -----------------------------------------------------------------------------------------------------------
def book_of(bench: Bench, folder: Path, events: list[dict[str, Any]]) -> Callable[[RunState], None]:
    part = bench.build_method().part(NAME)
    assert isinstance(part, DifferentialPrivacy)
    return RunLedger(folder, part, events.append).record


def test_a_sum_released_again_over_fewer_clients_is_counted_again(tmp_path: Path) -> None:
    """Killed after the second round, resumed from after the first while one client is away."""
    bench, events = protected(noise=4.0), []  # type: ignore[var-annotated]
    sites, saved = loop(bench, tmp_path), list[RunState]()
    record = book_of(bench, tmp_path, events)

    def stop(state: RunState) -> None:
        record(state)
        saved.append(copied(state))

    federated(bench, sites, stop=stop)
    state = next(one for one in saved if one.place == (1, 0, 0, 0))
    exact = federated(bench, sites, epoch=2, state=copied(state), stop=book_of(bench, tmp_path, events))
    assert exact.state.server[NAME]["spent"] == {"1": 3} and not events  # all as before: nothing new

    sites.away = {2}
    record = book_of(bench, tmp_path, events)
    alone = federated(bench, sites, epoch=3, state=copied(state), options=PhaseOptions(deadline=0.01), stop=record)
    assert alone.state.server[NAME]["spent"] == {"1": 5}  # one, and two that exist in two versions
    assert [event["event"] for event in events] == ["warning", "warning"]
    assert "counted a second time" in events[0]["message"]


def test_the_budget_of_a_run_counts_what_was_released_before_it_was_resumed(tmp_path: Path) -> None:
    bench = protected(noise=4.0, budget=epsilon(4.0, {1: 3}, 1e-5) + 1e-6)
    record = book_of(bench, tmp_path, [])
    state = RunState(bench.run(rounds=1).state.server)
    for place, name in ((1, "a"), (2, "b"), (2, "c")):
        state.round, own = place, state.server[NAME]
        state.server = {**state.server, NAME: {**own, "release": name, "values": 1}}
        record(state)
    state.server = {**state.server, NAME: {**state.server[NAME], "release": "d"}}
    with pytest.raises(BudgetSpent, match=r"would raise epsilon to .* made before the run was resumed"):
        record(state)
    assert len(ledger(tmp_path)) == 3


def test_a_run_keeps_its_ledger_in_its_folder_and_counts_each_release_once(tmp_path: Path) -> None:

    recipe = small_recipe(tmp_path, 2, "privacy.dp.noise=2.0", rounds=2)
    everfed.run(recipe, tmp_path / "run")
    entries = ledger(tmp_path / "run")
    assert [entry["values"] for entry in entries] == [1, 1, 1, 1] and len({e["release"] for e in entries}) == 4
    found = json.loads((tmp_path / "run" / "result.json").read_text())["parts"][NAME]
    assert found["releases"] == 4 and found["epsilon"] == pytest.approx(epsilon(2.0, {1: 4}, 1e-5))


@pytest.mark.parametrize("kind", ["local", "central"])
def test_a_private_federation_with_a_seed_equals_the_private_simulation(tmp_path: Path, kind: str) -> None:
    bench = protected(Bench("fedgp+der"), kind=kind, noise=0.5, seed=1)
    assert torch.equal(federated(bench, loop(bench, tmp_path)).params, bench.run().params)


def test_ranks_with_a_secret_key_are_refused() -> None:
    """Every rank makes the server's first state, and a secret key would differ from rank to rank."""

    setup = protected(noise=1.0).setup()
    with pytest.raises(CompositionError, match=r"needs privacy\.dp\.seed"):
        privacy.wrap(Ranks(PLAIN.eager(setup, ClientStore()), None), setup, "cpu", lambda event: None)  # type: ignore[arg-type]


# the file ------------------------------------------------------------------------------------------------------------
def test_a_torn_line_is_dropped_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    AppendedFile(path).add({"a": 1})
    assert path.stat().st_mode & 0o777 == 0o600
    with open(path, "ab") as file:
        file.write(b'{"a": 2')
    again = AppendedFile(path)
    again.add({"a": 3})
    assert again.entries == AppendedFile(path).entries == [{"a": 1}, {"a": 3}]
    path.write_bytes(b'{"a": 1}\nnot json\n')
    with pytest.raises(UserError, match=r"x\.jsonl, line 2 is damaged"):
        AppendedFile(path)


def test_an_entry_of_a_removed_file_is_an_error(tmp_path: Path) -> None:
    book = AppendedFile(tmp_path / "x.jsonl")
    book.add({"a": 1})
    (tmp_path / "x.jsonl").unlink()
    with pytest.raises(Lost, match="was removed"):
        book.add({"a": 2})
    assert book.entries == [{"a": 1}]
