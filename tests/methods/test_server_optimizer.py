"""FedAvgM (Hsu et al., 2019), FedAdam, FedYogi and FedAdagrad (Reddi et al., 2021, Algorithm 2) in closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everfed.core import tree
from everfed.core.context import Context
from everfed.method import MODEL, CompositionError, Optimizer, Server, State, TrainOptions, compose
from everfed.methods import registry as methods
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.methods.aggregate.server_optimizer import FedAdagrad, FedAdam, FedAvgM, FedYogi, ServerOptimizer
from everfed.privacy.secure_client import secured
from tests.support.rehearsal_free import one_parameter
from tests.support.toy import Bench, Linear, Norm, Toy

CONTEXT: Context = None  # type: ignore[assignment]  # no optimiser reads it
PRESETS = ("fedavgm", "fedadam", "fedyogi", "fedadagrad")
NON_ADAPTIVE = {"beta1": 0.0, "lr": 1e6, "tau": 1e6}


def exact(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def path(part: ServerOptimizer, *deltas: Tensor, state: dict[str, Tensor] | None = None) -> tuple[list[Tensor], State]:
    """(parameters after every round, server state): from 0, with the given updates."""
    states: State = {MODEL: {"params": torch.zeros_like(deltas[0])}, **({part.name: state} if state else {})}
    visited = []
    for delta in deltas:
        before = states[MODEL]
        server = Server(part.name, states, CONTEXT, before=before, model={"params": before["params"] + delta})
        part.update(server)
        states = {**server.states, MODEL: server.model}
        visited.append(server.model["params"])
    return visited, states


def scalars(part: ServerOptimizer, *deltas: float) -> list[float]:
    return [float(w) for w in path(part, *(exact(delta) for delta in deltas))[0]]


# closed forms --------------------------------------------------------------------------------------------------------
def test_momentum() -> None:
    """v = 1, 1.5, 1.75."""
    assert scalars(FedAvgM(momentum=0.5), 1.0, 1.0, 1.0) == [1.0, 2.5, 4.25]
    assert scalars(FedAvgM(momentum=0.5, lr=0.1), 1.0, 1.0, 1.0) == pytest.approx([0.1, 0.25, 0.425])


def test_adagrad() -> None:
    """Steps of 1, 1 / sqrt(2) and 1 / sqrt(3)."""
    part = FedAdagrad(lr=1.0, tau=0.0)
    assert scalars(part, 1.0, 1.0, 1.0) == pytest.approx([1.0, 1.7071068, 2.2844571], abs=1e-7)


@pytest.mark.parametrize(("part", "expected"), [(FedAdam, [0.4148218, 1.1124797]), (FedYogi, [0.4142136, 1.1096618])])
def test_adam_and_yogi(part: type[FedAdam], expected: list[float]) -> None:
    """m = 0.1, 0.19 and v from tau^2 = 0.01; no bias correction."""
    found = scalars(part(lr=1.0, beta1=0.9, beta2=0.99, tau=0.1), 1.0, 1.0)
    assert found == pytest.approx(expected, abs=1e-7)


def test_v_begins_at_tau_squared_or_at_zero() -> None:
    """m = 0.1; v = 0.99 * 0.01 + 0.01 = 0.0199, or 0.01."""
    for initial, v in (("tau2", 0.0199), ("zero", 0.01)):
        found = scalars(FedAdam(initial=initial), 1.0)
        assert found == pytest.approx([0.1 / (v**0.5 + 0.1)])


@pytest.mark.parametrize(("part", "expected"), [(FedAdam, 0.9901), (FedYogi, 0.9999)])
def test_yogi_forgets_slowly(part: type[FedAdam], expected: float) -> None:
    one = exact(1.0)
    _, server = path(part(), exact(0.1), state={"m": torch.zeros_like(one), "v": one})
    assert float(server[part.name]["v"]) == pytest.approx(expected)


def test_without_memory_it_is_a_sign_step() -> None:
    """lr Delta / (|Delta| + tau)."""
    (found,), _ = path(FedAdam(beta1=0.0, beta2=0.0, tau=1e-3), exact(3.0, -0.2))
    assert found.tolist() == pytest.approx([0.9996668, -0.9950249], abs=1e-7)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=5))
def test_a_large_tau_with_as_large_a_rate_is_fedavg(values: list[float]) -> None:
    (found,), _ = path(FedAdam(beta2=0.0, initial="zero", **NON_ADAPTIVE), exact(*values))
    assert torch.allclose(found, exact(*values), rtol=0, atol=1e-5)


updates = st.lists(
    st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0]), min_size=4, max_size=4), min_size=1, max_size=4
)


@given(updates, st.sampled_from([FedAdagrad, FedAdam, FedYogi]), st.floats(1e-3, 1e3))
@settings(deadline=None)
def test_without_tau_the_scale_of_updates_does_not_matter(
    rows: list[list[float]], part: type[FedAdam], factor: float
) -> None:
    made = part(tau=0.0, initial="zero", lr=1.0)
    plain, scaled = (path(made, *(exact(*row) * c for row in rows))[0][-1] for c in (1.0, factor))
    assert torch.allclose(plain, scaled, rtol=1e-6, atol=1e-9)


@given(updates, st.permutations(range(4)), st.sampled_from([FedAvgM, FedAdagrad, FedAdam, FedYogi]))
@settings(deadline=None)
def test_coordinates_are_independent(rows: list[list[float]], order: list[int], part: type[ServerOptimizer]) -> None:
    deltas = [exact(*row) for row in rows]
    plain, permuted = path(part(), *deltas)[0], path(part(), *(delta[order] for delta in deltas))[0]
    assert all(torch.equal(a[order], b) for a, b in zip(plain, permuted, strict=True))


# in a run ------------------------------------------------------------------------------------------------------------
def test_momentum_on_a_quadratic() -> None:
    """One step of rate a on (w - 1)^2 / 2 a round: Delta = a (1 - w)."""
    a, beta, w, v = 0.3, 0.8, 0.0, 0.0
    stream, train = one_parameter({0: 1.0}, rounds_per_task=5), TrainOptions(1, 1, Optimizer(lr=a))
    outcome = Bench("fedavgm", {"fedavgm": {"momentum": beta}}, stream, train, Linear).run()
    for _ in range(5):
        v = beta * v + a * (1 - w)
        w += v
    assert outcome.params.tolist() == pytest.approx([w])


def test_without_momentum_it_is_fedavg_to_the_bit() -> None:
    ours = Bench("fedavgm", {"fedavgm": {"momentum": 0.0}}, module=Norm).run()
    assert tree.equal(dict(ours.state.model), dict(Bench("fedavg", module=Norm).run().state.model))


@pytest.mark.parametrize("name", PRESETS)
def test_statistics_are_averaged_and_traffic_is_fedavgs(name: str) -> None:
    ours, plain = (Bench(n, module=Norm).run(rounds=1).state for n in (name, "fedavg"))
    assert torch.equal(ours.model["stats"], plain.model["stats"])
    assert torch.equal(ours.model["counters"], plain.model["counters"])
    assert name == "fedavgm" or not torch.equal(ours.model["params"], plain.model["params"])
    assert ours.traffic.as_dict() == plain.traffic.as_dict()
    assert set(ours.server) == {MODEL, name}


@pytest.mark.parametrize("name", PRESETS)
def test_a_round_without_replies_changes_nothing(name: str) -> None:
    bench = Bench(name, stream=Toy(sizes={(client, 1): 0 for client in range(3)}))
    before, after = bench.run(rounds=2).state.server, bench.run().state.server
    assert tree.equal(before, after)


def test_moments_are_kept_from_task_to_task_unless_reset() -> None:
    stream = Toy(tasks=2, rounds_per_task=1, samples=4)
    kept, reset = (Bench("fedavgm", {"fedavgm": {"reset": r}}, stream) for r in (False, True))
    first = reset.run(rounds=1)
    assert torch.equal(first.params, kept.run(rounds=1).params)
    last = reset.run()
    assert torch.allclose(last.state.server["fedavgm"]["v"], last.params - first.params, atol=1e-6)
    assert not torch.allclose(kept.run().params, last.params, atol=1e-4)
    assert [e["phase"] for e in last.events if e["event"] == "phase"] == ["reset-moments", "train"] * 2


def test_a_reset_needs_boundaries() -> None:
    method = methods.build("fedadam", {"fedadam": {"reset": True}})
    with pytest.raises(CompositionError, match="part 'fedadam' must know when a task begins or ends"):
        method.fit_stream(Toy(boundaries=False))
    methods.build("fedadam").fit_stream(Toy(boundaries=False))


def test_it_acts_on_any_aggregation() -> None:
    """With FedOMG's aggregate, momentum 0 changes nothing; and a median takes a server optimiser, too."""
    plain = Bench("fedomg").run().params
    ours = Bench(lambda: compose(*methods.build("fedomg").parts, FedAvgM(momentum=0.0))).run().params
    assert torch.equal(plain, ours)
    median = FedAvg(reducer="median")
    assert torch.equal(
        Bench(lambda: compose(median, FedAvgM(momentum=0.0))).run().params, Bench(lambda: compose(median)).run().params
    )


# composition ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PRESETS)
def test_the_server_needs_the_mean_alone(name: str) -> None:
    assert secured(methods.build(name)).reveals() == {}


def test_one_server_optimiser_is_enough() -> None:
    with pytest.raises(CompositionError, match="one server optimiser at most; got fedavgm, fedyogi"):
        compose(FedAvg(), FedAvgM(), FedYogi())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavgm", {"lr": -1.0}),
        ("fedavgm", {"momentum": 1.0}),
        ("fedadam", {"beta1": 1.0}),
        ("fedyogi", {"beta2": -0.1}),
        ("fedadagrad", {"tau": -1.0}),
        ("fedadam", {"initial": "one"}),
    ],
)
def test_options_are_checked(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(methods.MethodError, match=rf"method\.{name}\.{next(iter(options))} must be"):
        methods.build(name, {name: options})
