"""Differential privacy: clipping is exact, noise is calibrated, spending is the library's and never shrinks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from everfed.core.client import Reply
from everfed.core.context import Setup
from everfed.core.engine import Engine
from everfed.core.handle import Server
from everfed.core.method import Method
from everfed.core.optimizer import Optimizer
from everfed.core.phase import Phase
from everfed.errors import CompositionError
from everfed.methods import registry as methods
from everfed.privacy.accountant import epsilon
from everfed.privacy.differential import NAME, BudgetSpent, DifferentialPrivacy, check_setup, clip_norm, private
from everfed.privacy.secure_client import secured
from everfed.privacy.secure_server import Secured
from everfed.store.clients import ClientStore
from tests.support.toy import Bench, Norm, Outcome, Toy
from tests.support.wire import crossed

pytest.importorskip("dp_accounting", reason="pip install 'everfed[privacy]'")


def protected(bench: Bench, **options: Any) -> Bench:
    plain = bench.build_method
    return replace(bench, method=lambda: private(plain(), **options))


def events(outcome: Outcome, **wanted: Any) -> list[dict[str, Any]]:
    return [event for event in outcome.events if wanted.items() <= event.items()]


# clipping ------------------------------------------------------------------------------------------------------------
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.floats(1e-3, 1e3))
@settings(max_examples=100)
def test_clipping_keeps_the_direction_and_bounds_the_norm(values: list[float], limit: float) -> None:
    vector = torch.tensor(values, dtype=torch.float64)
    clipped = clip_norm(vector, limit)
    assert float(clipped.norm()) <= limit * (1 + 1e-12)
    if float(vector.norm()) <= limit:
        assert torch.equal(clipped, vector)
    else:
        assert torch.allclose(clipped, vector * (limit / vector.norm()), rtol=1e-12)


@pytest.mark.parametrize("kind", ["local", "central"])
def test_what_is_not_finite_counts_as_zero(kind: str) -> None:
    assert torch.equal(clip_norm(torch.tensor([math.nan, 1.0]), 1.0), torch.zeros(2))
    bench = protected(Bench("fedavg"), kind=kind, noise=1e-9)
    start = replace(bench, train=replace(bench.train, optimizer=Optimizer(lr=1e38))).run(rounds=1)
    assert torch.allclose(start.params, bench.model()["params"], atol=1e-6)


def test_of_the_model_it_is_the_update_that_is_clipped() -> None:
    bench = Bench("fedavg")
    own = protected(bench, clip=0.5)
    part, base = own.build_method().part(NAME), bench.model()["params"]
    for step, expected in ((3.0, 0.5), (1e-3, 1e-3)):
        direction = torch.ones_like(base) / math.sqrt(len(base))
        reply = Reply({"fedavg": {"params": base + step * direction}}, 9, 2, 1.0)
        sent = part.seal(own.client(NAME), Phase("train"), reply)
        assert float((sent.values["fedavg"]["params"] - base).norm()) == pytest.approx(expected, rel=1e-3)
        assert (sent.samples, sent.steps, sent.loss) == (0, 0, None)  # not protected, so not sent


def test_with_much_room_and_hardly_any_noise_it_is_the_plain_run() -> None:
    bench = Bench("fedgp+der")
    almost = protected(bench, clip=1e4, noise=1e-12).run()
    assert torch.allclose(bench.run().params, almost.params, rtol=0, atol=1e-5)


# noise ---------------------------------------------------------------------------------------------------------------
def released(part: DifferentialPrivacy, value: Any, weight: float, round_index: int = 0) -> Any:
    server = initial(part, round_index)
    weights = {"fedavg": {"params": weight}}
    return part.release(server, Phase("train"), {"fedavg": {"params": value}}, weights)["fedavg"]["params"]


def initial(part: Any, round_index: int = 0) -> Server:
    """The server's handle of its first state."""
    server = Bench("fedavg").server(NAME, round_index=round_index)
    part.init(server)
    return server


def central(**options: Any) -> DifferentialPrivacy:
    part = private(methods.build("fedavg"), **options).part(NAME)
    assert isinstance(part, DifferentialPrivacy)
    return part


def test_a_mean_of_k_clients_gets_noise_of_noise_times_clip_by_k() -> None:
    noise = released(central(noise=1.5, clip=2.0), torch.zeros(40_000, dtype=torch.float64), 8.0).numpy() / (
        1.5 * 2.0 / 8
    )
    assert stats.kstest(noise, "norm").pvalue > 1e-4
    assert abs(noise.std() - 1) < 5 / math.sqrt(2 * 40_000) and abs(noise.mean()) < 5 / math.sqrt(40_000)


@pytest.mark.parametrize("kind", ["central", "local"])
def test_every_place_has_noise_of_its_own(kind: str) -> None:
    """The same noise twice could be subtracted: another round, phase, repeat or value draws anew, the same one not;
    with a seed, too, where the place alone decides."""
    part, like = central(kind=kind, seed=1), torch.zeros(8, dtype=torch.float64)
    server = initial(part)

    def drawn(path: str, **place: Any) -> tuple[float, ...]:
        there = Server(NAME, server.states, server.context.at(**place))
        return tuple(part._noise(there, b"", path, like).tolist())

    places: list[dict[str, Any]] = [{}, {"round": 1}, {"phase": "reference"}, {"repeat": 1}]
    found = [*(drawn("fedavg/params", **place) for place in places), drawn("fedavg/other")]
    assert len(set(found)) == 5
    assert drawn("fedavg/params") == found[0]


def test_a_sum_gets_noise_of_noise_times_clip() -> None:
    part = private(methods.build("fedcurv"), noise=2.0, clip=3.0).part(NAME)
    reduced = {"fedcurv": {"u": torch.zeros(40_000, dtype=torch.float64)}}
    out = part.release(initial(part), Phase("train"), reduced, {"fedcurv": {"u": 5.0}})
    assert abs(float(out["fedcurv"]["u"].std()) / 6.0 - 1) < 5 / math.sqrt(2 * 40_000)


def test_local_noise_is_added_by_every_client_to_its_own() -> None:
    bench = Bench(
        "fedavg", module=lambda shape, classes: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2000))
    )
    own = protected(bench, kind="local", noise=2.0, clip=0.5)
    part, base = own.build_method().part(NAME), bench.model()["params"]
    sent = []
    for client in (0, 1):
        reply = Reply({"fedavg": {"params": base.clone()}}, 1, 1, 0.1)
        sent.append(part.seal(own.client(NAME, number=client), Phase("train"), reply))
    noise = [(s.values["fedavg"]["params"] - base).double().numpy() for s in sent]
    assert abs(noise[0].std() - 1.0) < 0.03 and abs(np.corrcoef(noise[0], noise[1])[0, 1]) < 0.03
    released = {"fedavg": {"params": torch.ones(3)}}
    after = part.release(initial(part), Phase("train"), released, {"fedavg": {"params": 2.0}})
    assert torch.equal(after["fedavg"]["params"], torch.ones(3))  # the server adds none


def test_noise_differs_by_run_round_and_key_and_a_seed_repeats_it() -> None:
    zeros = torch.zeros(100)
    secret = [released(central(), zeros, 1.0) for _ in range(2)]
    assert not torch.equal(secret[0], secret[1])
    first, again, later = (released(central(seed=3), zeros, 1.0, at) for at in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, later)


# spending ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("noise", "rounds", "delta"), [(1.0, 1, 1e-5), (1.0, 100, 1e-5), (4.0, 50, 1e-6)])
def test_epsilon_is_the_library_s(noise: float, rounds: int, delta: float) -> None:
    import dp_accounting

    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(noise), rounds))
    assert epsilon(noise, {1: rounds}, delta) == pytest.approx(accountant.get_epsilon(delta), rel=1e-9)
    exact = dp_accounting.get_epsilon_gaussian(noise / math.sqrt(rounds), delta)  # closed form of T Gaussian releases
    assert exact <= epsilon(noise, {1: rounds}, delta) <= 1.35 * exact + 0.1


def test_four_values_at_once_cost_what_four_releases_do() -> None:
    assert epsilon(2.0, {4: 1}, 1e-5) == pytest.approx(epsilon(2.0, {1: 4}, 1e-5), rel=1e-6)
    assert epsilon(2.0, {1: 3}, 1e-5, sensitivity=2.0) == pytest.approx(epsilon(1.0, {1: 3}, 1e-5), rel=1e-9)
    assert epsilon(2.0, {}, 1e-5) == epsilon(2.0, {1: 0}, 1e-5) == 0.0


@given(st.floats(0.5, 10), st.integers(0, 40), st.integers(1, 40))
@settings(max_examples=15, deadline=None)
def test_spending_grows_with_releases_and_shrinks_with_noise(noise: float, rounds: int, more: int) -> None:
    before, after = epsilon(noise, {1: rounds}, 1e-5), epsilon(noise, {1: rounds + more}, 1e-5)
    assert before < after
    assert epsilon(noise * 1.5, {1: rounds + more}, 1e-5) < after


def test_every_phase_is_accounted_for_and_reported() -> None:
    outcome = protected(Bench("fedgp"), noise=3.0).run()
    spent = [event["epsilon"] for event in events(outcome, event="measure", part=NAME)]
    assert spent == [pytest.approx(epsilon(3.0, {1: n}, 1e-5)) for n in range(1, 9)]  # train and reference, four rounds
    part = private(methods.build("fedgp"), noise=3.0).part(NAME)
    facts = part.summary(outcome.state.server)
    assert facts["epsilon"] == spent[-1] and facts["releases"] == 8 and facts["simulated"] is False


def test_two_vectors_in_one_reply_are_two() -> None:
    outcome = protected(Bench("fedcurv", stream=Toy(samples=4)), noise=3.0, clip=100.0).run(rounds=1)
    assert outcome.state.server[NAME]["spent"] == {"3": 1}  # params, u and v


def test_a_budget_stops_the_run_before_it_is_overdrawn() -> None:
    bench = protected(Bench("fedavg"), noise=3.0, budget=epsilon(3.0, {1: 2}, 1e-5) + 1e-6)
    with pytest.raises(BudgetSpent, match=r"phase 'train' of round 3 would raise epsilon to"):
        bench.run()


def test_a_resumed_run_spends_nothing_twice_and_ends_in_the_same_bits() -> None:
    for kind in ("central", "local"):
        bench = protected(Bench("fedgp+der"), kind=kind, noise=0.5, seed=1)
        whole, stopped = bench.run(), bench.run(rounds=2)
        store = ClientStore()
        for client, state in stopped.clients.items():
            store.put(client, crossed(state))
        again = bench.run(state=stopped.state, store=store)
        assert torch.equal(whole.params, again.params)
        assert whole.state.server[NAME]["spent"] == again.state.server[NAME]["spent"] == {"1": 8}


# with secure aggregation ---------------------------------------------------------------------------------------------
def test_clipped_replies_are_added_under_masks_and_the_server_adds_the_noise() -> None:
    plain = Bench("fedavg", stream=Toy(clients=4))
    both = replace(plain, method=lambda: secured(private(plain.build_method(), noise=0.1, seed=5)))

    def engine(setup: Setup, store: ClientStore) -> Engine:
        return Secured(both.eager(setup, store), setup)

    alone = protected(plain, noise=0.1, seed=5).run()
    assert torch.allclose(alone.params, both.run(engine).params, rtol=0, atol=1e-3)


# refusals ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("stamp", {}, "the server needs every client's own fedomg/"),
        ("fedavg", {"fedavg": {"weighting": "samples"}}, "weighed by samples"),
        ("lora", {}, "set method.fedavg.weighting = 'uniform', or choose another method"),
        ("lorm", {}, "weighed by samples.*part 'lorm' has no other weights; choose another method"),
        ("fedavg", {"fedavg": {"reducer": "median"}}, "the server needs every client's own fedavg/params"),
    ],
)
def test_methods_that_cannot_have_it_are_refused(name: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(CompositionError, match=match):
        private(methods.build(name, options))


def test_statistics_and_equalised_traffic_are_refused() -> None:
    def build() -> Method:
        return private(methods.build("fedavg"))

    bench = Bench(build, module=Norm)
    with pytest.raises(CompositionError, match="model.batchnorm = 'local'"):
        check_setup(bench.setup())
    check_setup(replace(bench, train=replace(bench.train, batchnorm="local")).setup())
    with pytest.raises(CompositionError, match="sync_every"):
        check_setup(replace(Bench(build), train=replace(bench.train, sync_every=2)).setup())


@pytest.mark.parametrize("options", [{"kind": "x"}, {"noise": 0.0}, {"clip": -1.0}, {"delta": 1.0}, {"budget": -1.0}])
def test_options_validate_themselves(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=name):
        DifferentialPrivacy(**options)


def test_a_fixed_seed_is_warned_about() -> None:
    assert any("protects nothing" in warning for warning in private(methods.build("fedavg"), seed=1).warnings)
