"""SCAFFOLD (Karimireddy et al., 2020), FedDyn (Acar et al., 2021) and FedNova (Wang et al., 2020) on losses with closed
forms: where clients drift, FedAvg's fixed point is not the optimum, theirs is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everfed.core import tree
from everfed.method import CompositionError, Optimizer, TrainOptions, compose
from everfed.methods import registry as methods
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.methods.aggregate.feddyn import FedDyn
from everfed.methods.aggregate.fednova import FedNova, steps_of
from everfed.methods.aggregate.scaffold import Scaffold
from everfed.methods.regularise.fedprox import FedProx
from everfed.privacy.secure_client import secured
from tests.support.toy import Bench, Given, Linear, Norm, Outcome, Toy, mean_square

RATE, STEPS = 0.1, 5
# client k: a_k / 2 (w - b_k)^2, from the inputs sqrt(a_k) and the targets sqrt(a_k) b_k
CURVES = {0: (1.0, 0.0), 1: (4.0, 1.0)}
OPTIMUM = 0.8  # (1 * 0 + 4 * 1) / (1 + 4)


def quadratics(
    name: str,
    rounds: int,
    options: Mapping[str, Any] | None = None,
    cohorts: Mapping[int, tuple[int, ...]] | None = None,
    steps: int = STEPS,
    tasks: int = 1,
) -> Bench:
    table = {
        (client, task): (torch.tensor([[a**0.5]]), torch.tensor([a**0.5 * b]))
        for client, (a, b) in CURVES.items()
        for task in range(tasks)
    }
    stream = Given(clients=2, tasks=tasks, rounds_per_task=rounds, classes=1, table=table, objective=mean_square,
                   cohorts=cohorts or {})  # fmt: skip
    return Bench(name, options or {}, stream, TrainOptions(steps, 1, Optimizer(lr=RATE)), Linear)


def at(outcome: Outcome) -> float:
    return float(outcome.params)


def fedavg_fixed_point(steps: Mapping[int, int], share: Mapping[int, float], rate: float = RATE) -> float:
    """Local training moves w by (1 - (1 - rate a)^K) (b - w); where these cancel out."""
    pull = {client: share[client] * (1 - (1 - rate * a) ** steps[client]) for client, (a, _) in CURVES.items()}
    return sum(pull[client] * CURVES[client][1] for client in CURVES) / sum(pull.values())


def test_fedavg_comes_to_rest_elsewhere() -> None:
    expected = fedavg_fixed_point({0: STEPS, 1: STEPS}, {0: 0.5, 1: 0.5})
    assert at(quadratics("fedavg", 40).run()) == pytest.approx(expected, abs=1e-6)
    assert abs(expected - OPTIMUM) > 0.1


@pytest.mark.parametrize(("name", "options"), [("scaffold", {}), ("feddyn", {"feddyn": {"alpha": 2.0}})])
@pytest.mark.parametrize("steps", [1, 5, pytest.param(20, marks=pytest.mark.slow)])
def test_without_drift_the_fixed_point_is_the_optimum(name: str, options: dict[str, Any], steps: int) -> None:
    assert at(quadratics(name, 60, options, steps=steps).run()) == pytest.approx(OPTIMUM, abs=1e-5)


@pytest.mark.parametrize(("name", "options"), [("scaffold", {}), ("feddyn", {"feddyn": {"alpha": 2.0}})])
def test_also_when_clients_take_turns(name: str, options: dict[str, Any]) -> None:
    turns = {index: (index % 2,) for index in range(60)}
    assert at(quadratics(name, 60, options, turns).run()) == pytest.approx(OPTIMUM, abs=1e-4)


# SCAFFOLD ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cohorts", [{}, {1: (1,), 2: (0,)}], ids=["all", "some"])
def test_scaffold_is_its_recurrence(cohorts: dict[int, tuple[int, ...]]) -> None:
    """Algorithm 1, option II, in plain numbers."""
    x, c, own = 0.0, 0.0, {0: 0.0, 1: 0.0}
    for index in range(4):
        ends, changes = [], []
        for client in cohorts.get(index, (0, 1)):
            (a, b), y = CURVES[client], x
            for _ in range(STEPS):
                y -= RATE * (a * (y - b) - own[client] + c)
            new = own[client] - c + (x - y) / (STEPS * RATE)
            changes.append(new - own[client])
            own[client] = new
            ends.append(y)
        x, c = sum(ends) / len(ends), c + sum(changes) / 2
    outcome = quadratics("scaffold", 4, cohorts=cohorts).run()
    assert at(outcome) == pytest.approx(x, abs=1e-6)
    assert float(outcome.state.server["scaffold"]["c"]) == pytest.approx(c, abs=1e-5)
    assert [float(outcome.clients[k]["scaffold"]["c"]) for k in (0, 1)] == pytest.approx([own[0], own[1]], abs=1e-5)


def test_the_first_variates_are_mean_gradients() -> None:
    """One step from 0: the gradients there are a (0 - b), 0 and -4; their mean is the server's."""
    outcome = quadratics("scaffold", 1, steps=1).run()
    assert [float(outcome.clients[k]["scaffold"]["c"]) for k in (0, 1)] == pytest.approx([0.0, -4.0], abs=1e-5)
    assert float(outcome.state.server["scaffold"]["c"]) == pytest.approx(-2.0, abs=1e-5)


def test_variates_sum_to_the_servers_whoever_takes_part() -> None:
    stream = Toy(cohorts={1: (0,), 2: (1, 2)})
    outcome = Bench("scaffold", stream=stream).run()
    own = [outcome.clients[client]["scaffold"]["c"] for client in range(3)]
    assert torch.allclose(torch.stack(own).mean(0), outcome.state.server["scaffold"]["c"], atol=1e-5)


def test_between_synchronisations_steps_are_added_up() -> None:
    """Two rounds of 5 steps that are averaged once are one round of 10."""
    twice = quadratics("scaffold", 4)
    twice = twice.change(train=TrainOptions(STEPS, 1, Optimizer(lr=RATE), sync_every=2))
    assert at(twice.run()) == pytest.approx(at(quadratics("scaffold", 2, steps=2 * STEPS).run()), abs=1e-6)


def test_a_reset_forgets_the_last_task() -> None:
    kept, reset = (quadratics("scaffold", 1, {"scaffold": {"reset": r}}, tasks=2) for r in (False, True))
    first = reset.run(rounds=1)
    expected = quadratics("fedavg", 2).run()  # two rounds without variates
    assert at(first) == at(kept.run(rounds=1))
    assert at(reset.run()) == pytest.approx(at(expected), abs=1e-6)
    assert at(kept.run()) != pytest.approx(at(expected), abs=1e-3)


@pytest.mark.parametrize(
    "optimizer", [Optimizer("adam"), Optimizer(momentum=0.9), Optimizer(clip=1.0), Optimizer(by="step")]
)
def test_scaffold_refuses_what_is_no_plain_sgd(optimizer: Optimizer) -> None:
    with pytest.raises(CompositionError, match="'scaffold' reads gradients off local updates"):
        compose(FedAvg(), Scaffold(), optimizer=optimizer)


def test_scaffold_refuses_weights() -> None:
    with pytest.raises(CompositionError, match=r"method\.fedavg\.weighting = 'uniform'"):
        compose(FedAvg(weighting="samples"), Scaffold())


# FedDyn --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cohorts", [{}, {1: (1,), 2: (0,)}], ids=["all", "some"])
def test_feddyn_is_its_recurrence(cohorts: dict[int, tuple[int, ...]]) -> None:
    """Algorithm 1, with 5 gradient steps for the local minimum."""
    alpha, x, h, own = 0.5, 0.0, 0.0, {0: 0.0, 1: 0.0}
    for index in range(4):
        ends = []
        for client in cohorts.get(index, (0, 1)):
            (a, b), w = CURVES[client], x
            for _ in range(STEPS):
                w -= RATE * (a * (w - b) - own[client] + alpha * (w - x))
            own[client] -= alpha * (w - x)
            ends.append(w)
        h -= alpha / 2 * sum(w - x for w in ends)
        x = sum(ends) / len(ends) - h / alpha
    outcome = quadratics("feddyn", 4, {"feddyn": {"alpha": alpha}}, cohorts).run()
    assert at(outcome) == pytest.approx(x, abs=1e-6)
    assert float(outcome.state.server["feddyn"]["h"]) == pytest.approx(h, abs=1e-6)
    assert set(outcome.state.server["feddyn"]) == {"h"}


def test_at_rest_every_clients_h_is_its_gradient() -> None:
    """At w = 0.8: 1 (0.8 - 0) and 4 (0.8 - 1); they sum to 0."""
    outcome = quadratics("feddyn", 60, {"feddyn": {"alpha": 2.0}}).run()
    assert [float(outcome.clients[k]["feddyn"]["h"]) for k in (0, 1)] == pytest.approx([0.8, -0.8], abs=1e-4)


def test_a_round_without_replies_changes_nothing() -> None:
    for name in ("scaffold", "feddyn", "fednova"):
        bench = Bench(name, stream=Toy(sizes={(client, 1): 0 for client in range(3)}))
        assert tree.equal(bench.run(rounds=2).state.server, bench.run().state.server)


# FedNova -------------------------------------------------------------------------------------------------------------
def slopes(name: str, options: Mapping[str, Any] | None = None, train: TrainOptions | None = None) -> Bench:
    """Linear losses: gradients 1 and 5 everywhere, with 1 and 3 samples, so 1 and 3 steps of one sample."""
    table = {(0, 0): (torch.ones(1, 1), torch.ones(1)), (1, 0): (torch.ones(3, 1), torch.full((3,), 5.0))}
    stream = Given(clients=2, tasks=1, rounds_per_task=1, classes=1, table=table,
                   objective=lambda outputs, y: (outputs.squeeze(1) * y).mean())  # fmt: skip
    return Bench(name, options or {}, stream, train or TrainOptions(1, 1, Optimizer(lr=RATE)), Linear)


def test_every_client_counts_by_its_gradient_not_by_its_steps() -> None:
    """Mean gradients 3, or 1/4 + 15/4 = 4 by samples; mean steps 2, or 1/4 + 9/4 = 2.5. FedAvg: (1 * 1 + 3 * 5) / 2."""
    uniform = {"fednova": {"weighting": "uniform"}}
    assert at(slopes("fednova", uniform).run()) == pytest.approx(-RATE * 2 * 3)
    assert at(slopes("fednova").run()) == pytest.approx(-RATE * 2.5 * 4)
    assert at(slopes("fedavg").run()) == pytest.approx(-RATE * 8)


def test_the_weights_of_gradients_under_momentum() -> None:
    """Velocities 1, 1.5 and 1.75 at a momentum of 1/2."""
    assert [steps_of(3), steps_of(3, 0.5), steps_of(1, 0.9)] == pytest.approx([3.0, 4.25, 1.0])
    train = TrainOptions(1, 1, Optimizer(lr=RATE, momentum=0.5))
    found = slopes("fednova", {"fednova": {"weighting": "uniform"}}, train).run()
    assert at(found) == pytest.approx(-RATE * (1.0 + 4.25) / 2 * 3)


def test_steps_are_counted_anew_after_they_were_sent() -> None:
    """Client 0 alone takes 1 step along 1; then both: mean steps 2, mean gradient 3."""
    bench = slopes("fednova", {"fednova": {"weighting": "uniform"}})
    stream = replace(bench.stream, rounds_per_task=2, cohorts={0: (0,), 1: (0, 1)})
    assert at(bench.change(stream=stream).run()) == pytest.approx(-RATE * (1 + 2 * 3))


@given(st.integers(1, 3))
@settings(deadline=None, max_examples=3)
def test_with_equal_steps_it_is_fedavg(epochs: int) -> None:
    train = TrainOptions(epochs, 4, Optimizer(lr=0.1))
    for weighting in ("uniform", "samples"):
        ours = Bench("fednova", {"fednova": {"weighting": weighting}}, module=Norm, train=train).run(rounds=2)
        plain = Bench("fedavg", {"fedavg": {"weighting": weighting}}, module=Norm, train=train).run(rounds=2)
        assert torch.allclose(ours.params, plain.params, atol=1e-6)
        assert torch.equal(ours.state.model["counters"], plain.state.model["counters"])


def test_with_other_steps_the_fixed_point_is_less_biased() -> None:
    """Client 0 takes 2 steps, client 1 takes 8. At rest sum_k s_k / tau_k (b_k - w) = 0, with s_k as in FedAvg; for a
    rate that tends to 0 that is the optimum, where FedAvg's tends to (2 * 0 + 8 * 4) / (2 + 8 * 4)."""
    x0, x1 = (torch.full((n, 1), CURVES[k][0] ** 0.5) for k, n in ((0, 2), (1, 8)))
    table = {(0, 0): (x0, torch.zeros(2)), (1, 0): (x1, torch.full((8,), 2.0))}
    stream = Given(clients=2, tasks=1, rounds_per_task=60, classes=1, table=table, objective=mean_square)
    train, uniform = TrainOptions(1, 1, Optimizer(lr=RATE)), {"fednova": {"weighting": "uniform"}}
    ours = at(Bench("fednova", uniform, stream, train, Linear).run())
    plain = at(Bench("fedavg", {}, stream, train, Linear).run())
    assert ours == pytest.approx(fedavg_fixed_point({0: 2, 1: 8}, {0: 1 / 2, 1: 1 / 8}), abs=1e-5)
    assert plain == pytest.approx(fedavg_fixed_point({0: 2, 1: 8}, {0: 1.0, 1: 1.0}), abs=1e-5)
    slow = {
        share: fedavg_fixed_point({0: 2, 1: 8}, dict(enumerate(share)), 1e-7) for share in ((1.0, 1.0), (1 / 2, 1 / 8))
    }
    assert list(slow.values()) == pytest.approx([32 / 34, OPTIMUM], abs=1e-5)


@pytest.mark.parametrize("optimizer", [Optimizer("adam"), Optimizer(momentum=0.9, state="kept")])
def test_fednova_refuses_what_it_cannot_count(optimizer: Optimizer) -> None:
    with pytest.raises(CompositionError, match="'fednova' counts local steps"):
        compose(FedNova(), optimizer=optimizer)


def test_fednova_refuses_fedprox_whose_pull_it_would_not_count() -> None:
    with pytest.raises(CompositionError, match="'fednova' counts whole local steps, and 'fedprox' shrinks"):
        compose(FedNova(), FedProx(mu=0.1))
    assert compose(FedNova(), FedProx(mu=0.0))


# all -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fednova"])
def test_the_server_needs_sums_alone(name: str) -> None:
    assert secured(methods.build(name)).reveals() == {}


@pytest.mark.parametrize("part", [Scaffold(), FedDyn(), FedNova()])
def test_personal_parameters_are_refused(part: Any) -> None:
    dbe = methods.build("feddbe").part("dbe")
    with pytest.raises(CompositionError, match=f"'{part.name}' sends all parameters, but 'dbe' keeps some personal"):
        compose(*([FedAvg()] if part.name == "scaffold" else []), dbe, part)


@pytest.mark.parametrize("part", [Scaffold(), FedDyn(), FedNova()])
def test_adapters_of_single_tasks_are_refused(part: Any) -> None:
    with pytest.raises(CompositionError, match=f"'{part.name}' follows all parameters; 'lora' trains some at a time"):
        compose(*([FedAvg()] if part.name == "scaffold" else []), methods.build("lora").part("lora"), part)


@pytest.mark.parametrize(("name", "options"), [("feddyn", {"alpha": 0.0}), ("fednova", {"weighting": "size"})])
def test_options_are_checked(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(methods.MethodError, match=rf"method\.{name}\.{next(iter(options))} must be"):
        methods.build(name, {name: options})
