"""CCVR (Luo et al., 2021) and HGP (Salami et al., 2024): Gaussians from sums, and heads trained on draws from them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everfed.method import CompositionError, Optimizer, TrainOptions, compose
from everfed.methods import registry as methods
from everfed.methods.features.calibration import CCVR, HGP, gaussian, scaled
from everfed.methods.features.ridge import Ridge
from everfed.privacy.secure_client import secured
from everfed.session.result import HasSummary
from tests.support.flaky import secure_run
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import Bench, Given, Linear, Norm, Toy, small_memory

FROZEN = TrainOptions(1, 5, Optimizer(lr=0.0))
SMALL = {"per_class": 20, "epochs": 2}
Table = dict[tuple[int, int], tuple[Tensor, Tensor]]


def of_inputs(name: str, table: Table, classes: int = 2, module: Any = Linear, **options: Any) -> Bench:
    """Features are the inputs, and local training moves nothing."""
    clients = max(client for client, _ in table) + 1
    stream = Given(clients=clients, tasks=1, rounds_per_task=1, classes=classes, table=table)
    return Bench(name, {name: {**SMALL, **options}}, stream, FROZEN, module)


def samples(seed: int, count: int, features: int = 3, classes: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, features, generator=generator), torch.arange(count) % classes


# CCVR ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_clients_0_2_and_4_have_mean_2_and_variance_4(covariance: str) -> None:
    table = {
        (0, 0): (torch.tensor([[0.0], [2.0]]), torch.tensor([0, 0])),
        (1, 0): (torch.tensor([[4.0]]), torch.tensor([0])),
    }
    case = of_inputs("ccvr", table, covariance=covariance)
    own = case.run().state.server["ccvr"]
    means, spreads = CCVR(covariance=covariance).gaussians({key: value[:1] for key, value in own.items()})
    assert float(means) == 2.0
    assert float(spreads) ** 2 == pytest.approx(4.0)


@given(st.lists(st.integers(0, 2), min_size=14, max_size=14), st.sampled_from(["diagonal", "full"]))
@settings(deadline=None, max_examples=12)
def test_sums_give_the_pooled_covariance_for_any_partition(owners: list[int], covariance: str) -> None:
    x, y = samples(2, 14)
    x = (x * 1024).round() / 1024  # what fixed point holds
    table = {(c, 0): (x[torch.tensor(owners) == c], y[torch.tensor(owners) == c]) for c in range(3)}
    own = of_inputs("ccvr", table, covariance=covariance).run().state.server["ccvr"]
    means, spreads = CCVR(covariance=covariance).gaussians(own)
    for label in range(2):
        rows = x[y == label]
        found = spreads[label].square() if covariance == "diagonal" else spreads[label] @ spreads[label].T
        expected = rows.var(0) if covariance == "diagonal" else torch.cov(rows.T)
        assert torch.allclose(means[label], rows.mean(0), atol=1e-6)
        assert torch.allclose(found, expected, atol=1e-5)


def test_the_papers_merging_of_moments_is_the_same() -> None:
    """sum (n_k - 1) / (n - 1) S_k + sum n_k / (n - 1) m_k m_k^T - n / (n - 1) m m^T."""
    x, _ = samples(3, 15)
    x = (x * 1024).round() / 1024
    parts = x.double().split([4, 9, 2])
    n, mean = 15, x.double().mean(0)
    merged = sum(
        (len(p) - 1) / (n - 1) * torch.cov(p.T) + len(p) / (n - 1) * torch.outer(p.mean(0), p.mean(0)) for p in parts
    )
    merged = merged - n / (n - 1) * torch.outer(mean, mean)
    table = {(k, 0): (p.float(), torch.zeros(len(p), dtype=torch.int64)) for k, p in enumerate(parts)}
    own = of_inputs("ccvr", table, covariance="full").run().state.server["ccvr"]
    _, spreads = CCVR(covariance="full").gaussians({key: value[:1] for key, value in own.items()})
    assert torch.allclose((spreads[0] @ spreads[0].T).double(), merged, atol=1e-5)


def test_a_single_sample_has_no_spread() -> None:
    x, y = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([0])
    for covariance in ("diagonal", "full"):
        own = of_inputs("ccvr", {(0, 0): (x, y)}, covariance=covariance).run().state.server["ccvr"]
        means, spreads = CCVR(covariance=covariance).gaussians({key: value[:1] for key, value in own.items()})
        assert means.tolist() == x.tolist() and not spreads.any()


@pytest.mark.parametrize("name", ["ccvr", "hgp"])
def test_only_the_head_changes(name: str) -> None:
    """After one round, all but the head is FedAvg's to the bit."""
    one = Toy(tasks=1, rounds_per_task=1)
    ours, plain = Bench(name, {name: SMALL}, one, module=Norm), Bench("fedavg", stream=one, module=Norm)
    first = ours.layout().param("head.weight").start
    a, b = ours.run(), plain.run()
    assert torch.equal(a.params[:first], b.params[:first])
    assert torch.equal(a.state.model["stats"], b.state.model["stats"])
    assert not torch.equal(a.params[first:], b.params[first:])


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_two_spherical_classes_are_divided_by_the_midplane(covariance: str) -> None:
    """LDA's boundary is orthogonal to the difference of the means; within 5 degrees."""
    generator = torch.Generator().manual_seed(0)
    centre = torch.tensor([1.0, 2.0, -1.0])
    x = torch.randn(400, 3, generator=generator)
    y = torch.arange(400) % 2
    x = x + torch.where(y == 1, 1.0, -1.0).unsqueeze(1) * centre
    case = of_inputs(
        "ccvr", {(0, 0): (x, y)}, module=torch_linear, covariance=covariance, per_class=3000, epochs=4, lr=0.05
    )
    head = case.run().params
    normal, offset = head[:6].reshape(2, 3)[1] - head[:6].reshape(2, 3)[0], float(head[7] - head[6])
    cosine = float(torch.nn.functional.cosine_similarity(normal, centre, dim=0))
    assert math.degrees(math.acos(min(cosine, 1.0))) < 5.0
    assert abs(offset) / float(normal.norm()) < 0.1  # how far the boundary is from the midpoint, which is 0


def torch_linear(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    module = torch.nn.Linear(shape[0], classes)
    torch.nn.init.zeros_(module.weight)
    torch.nn.init.zeros_(module.bias)
    return module


@pytest.mark.parametrize(("covariance", "squares"), [("diagonal", 8), ("full", 36)])
def test_the_numbers_that_travel(covariance: str, squares: int) -> None:
    """Once a task, for its two classes: counts, sums, squares, and which classes they are."""
    outcome = Bench("ccvr", {"ccvr": {**SMALL, "covariance": covariance}}, ClassToy()).run()
    assert outcome.state.traffic.up["ccvr"] == 2 * 2 * 8 * (2 * (1 + 8 + squares) + 2)


def test_secure_aggregation_adds_the_same_bits() -> None:
    case = Bench("ccvr", {"ccvr": SMALL}, train=FROZEN)
    plain, ours = case.run(), secure_run(case)
    assert secured(case.build_method()).reveals() == {}
    assert all(torch.equal(plain.state.server["ccvr"][key], value) for key, value in ours.state.server["ccvr"].items())


# HGP -----------------------------------------------------------------------------------------------------------------
def test_labels_are_uniform_and_clients_by_their_counts() -> None:
    """Chi-squared below the 99.9 % quantiles of 3 and of 1 degrees of freedom."""
    part, generator = HGP(per_class=25_000), torch.Generator().manual_seed(7)
    y = part._labels(4, generator)
    seen = torch.bincount(y, minlength=4).double()
    assert float(((seen - 25_000).square() / 25_000).sum()) < 16.27
    shares = torch.tensor([[1.0, 3.0], [5.0, 0.0], [2.0, 2.0], [1.0, 9.0]])
    means = torch.stack([torch.full((4, 1), -100.0), torch.full((4, 1), 100.0)])  # the sign names the client
    drawn = part.features(y, shares, means, torch.ones(2, 4, 1), generator).flatten() > 0
    for label in range(4):
        count, second = float(seen[label]), float(drawn[y == label].sum())
        expected = count * float(shares[label, 1] / shares[label].sum())
        if expected:
            assert (second - expected) ** 2 * (1 / expected + 1 / (count - expected)) < 10.83
        else:
            assert second == 0


def test_variances_are_scaled() -> None:
    part, generator = HGP(variance_scale=3.0), torch.Generator().manual_seed(1)
    y = torch.zeros(100_000, dtype=torch.int64)
    drawn = part.features(y, torch.ones(1, 1), torch.full((1, 1, 1), 2.0), torch.full((1, 1, 1), 0.5), generator)
    assert (float(drawn.mean()), float(drawn.var())) == pytest.approx((2.0, 1.5), rel=0.02)


@given(st.floats(1e-3, 1e3))
def test_normalised_logits_do_not_depend_on_the_scale_of_the_head(factor: float) -> None:
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.allclose(scaled(logits, 0.1), scaled(factor * logits, 0.1), rtol=1e-9)
    assert scaled(logits, 0.0) is logits


def test_with_one_client_both_levels_have_the_same_gaussians() -> None:
    x, y = samples(4, 10)
    one, two = (of_inputs("hgp", {(0, 0): (x, y)}, levels=levels).run().state.server["hgp"]["0"] for levels in (1, 2))
    for key in ("counts", "means", "variances"):
        assert torch.allclose(one[key], two[key], atol=1e-6)
    assert torch.allclose(one["means"][0], x[y == 0].mean(0), atol=1e-6)
    assert torch.allclose(one["variances"][1], x[y == 1].var(0), atol=1e-5)


def test_a_class_that_no_client_has_twice_is_left_out() -> None:
    """Class 1 has one sample at each of two clients: no Gaussian at two levels, one at one level."""
    x = torch.tensor([[1.0], [2.0], [5.0], [7.0]])
    table = {(0, 0): (x[[0, 1, 2]], torch.tensor([0, 0, 1])), (1, 0): (x[[3]], torch.tensor([1]))}
    assert gaussian(torch.tensor([1.0]), torch.ones(1, 2), torch.ones(1, 2))["counts"].tolist() == [0.0]
    two = of_inputs("hgp", table, levels=2).run()
    assert two.params[1] == 0.0 and torch.isfinite(two.params).all()  # the head's row of class 1 was not touched
    one = of_inputs("hgp", table, levels=1).run().state.server["hgp"]["0"]
    assert one["counts"].tolist() == [2.0, 2.0] and one["variances"][1].tolist() == [2.0]


def test_gaussians_of_earlier_classes_stay() -> None:
    case = Bench("hgp", {"hgp": SMALL}, ClassToy())
    before, after = case.run(rounds=2).state.server["hgp"], case.run().state.server["hgp"]
    for client in before:
        assert torch.equal(before[client]["means"][:2], after[client]["means"][:2])
        assert after[client]["means"][2:].any() and not before[client]["means"][2:].any()


@pytest.mark.parametrize("levels", [1, 2])
def test_moments_of_the_tasks_classes_travel(levels: int) -> None:
    """In every round: 2 F + 1 numbers a class, and which classes they are."""
    outcome = Bench("hgp", {"hgp": {**SMALL, "levels": levels}}, ClassToy()).run()
    assert outcome.state.traffic.up["hgp"] == 4 * 2 * 8 * 2 * (2 * 8 + 1 + 1)


@pytest.mark.parametrize(
    "lie",
    [
        {"classes": torch.tensor([0, 99])},
        {"classes": torch.tensor([-1, 0])},
        {"counts": torch.ones(3)},
        {"sums": torch.ones(2, 5)},
        {"squares": torch.ones(3, 8)},
    ],
)
def test_a_reply_that_does_not_fit_is_left_out(lie: dict[str, Tensor]) -> None:
    part = methods.build("hgp").part("hgp")
    honest = {"counts": torch.full((2,), 3.0), "sums": torch.ones(2, 8), "squares": torch.ones(2, 8) * 5}
    replies = [{**honest, "classes": torch.tensor([0, 1])}, {**honest, "classes": torch.tensor([0, 1]), **lie}]
    reduced = {key: {client: one[key].double() for client, one in enumerate(replies)} for key in replies[0]}
    server = Bench("hgp").server("hgp", reduced=reduced)
    part.update(server)
    assert set(server.state) == {"0"}


def test_what_the_server_sees_and_what_the_record_holds() -> None:
    assert methods.build("hgp").reveals() == {"train": ["hgp"]}
    assert secured(methods.build("hgp", {"hgp": {"levels": 1}})).reveals() == {}
    part = methods.build("hgp").part("hgp")
    assert isinstance(part, HasSummary)
    assert part.summary({}) == {"levels": 2, "variance_scale": 3.0}


# both ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["ccvr", "hgp"])
def test_personal_models_and_two_heads_are_refused(name: str) -> None:
    part = methods.build(name).part(name)
    with pytest.raises(CompositionError, match=f"{name!r} needs the same features on every client; 'dbe'"):
        compose(*methods.build("feddbe").parts, part)
    with pytest.raises(CompositionError, match=f"one part at most may replace the head; got {name}, ridge"):
        compose(methods.build("fedavg").parts[0], part, Ridge(train_first=True))


@pytest.mark.parametrize("name", ["ccvr", "hgp"])
def test_they_compose_with_replay_and_fedgp(name: str) -> None:
    options = small_memory(f"fedgp+{name}")
    assert torch.isfinite(Bench(f"fedgp+{name}", options).run().params).all()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ccvr", {"covariance": "none"}),
        ("ccvr", {"per_class": 0}),
        ("ccvr", {"lr": 0.0}),
        ("hgp", {"levels": 3}),
        ("hgp", {"variance_scale": 0.0}),
        ("hgp", {"temperature": -1.0}),
    ],
)
def test_options_are_checked(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(methods.MethodError, match=rf"method\.{name}\.{next(iter(options))} must be"):
        methods.build(name, {name: options})


def test_hgp_trains_the_head_as_its_authors_do() -> None:
    hgp = methods.build("hgp").part("hgp")
    assert (hgp.lr, hgp.variance_scale) == (0.001, 3.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("levels", [1, 2])
def test_gaussians_of_hgp_are_those_of_the_trained_network(levels: int) -> None:
    """Of one round: they depend on how far it trains, which the received network does not."""
    case = Bench("hgp", {"hgp": {"levels": levels, "per_class": 4, "epochs": 1}}, Toy(clients=1, tasks=1))
    rates = (TrainOptions(1, 4, Optimizer(lr=lr)) for lr in (0.1, 0.2))
    near, far = (case.change(train=train).run(rounds=1).state.server["hgp"]["0"]["means"] for train in rates)
    assert near.any() and not torch.allclose(near, far)
