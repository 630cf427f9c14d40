"""FL+OGD: orthogonal gradient descent (Farajtabar et al., 2020) under federation, as in the FedSSI paper."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everfed.core.context import TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.core.tree import equal, tensor_bytes
from everfed.errors import CompositionError
from everfed.methods import registry as methods
from everfed.methods.project.ogd import OGD, extended, principal, project_out, widened
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import Bench, Given, Linear, Toy

ADAM = Optimizer("adam", lr=0.01)


def ogd(**options: Any) -> dict[str, dict[str, Any]]:
    return {"ogd": options}


def basis_of(vectors: Tensor) -> Tensor:
    return reduce(extended, vectors, torch.zeros(0, vectors.shape[1]))


def random_basis(seed: int, count: int = 5, size: int = 40) -> tuple[Tensor, Tensor]:
    """An orthonormal basis and a vector to project."""
    rng = torch.Generator().manual_seed(seed)
    return basis_of(torch.randn(count, size, generator=rng)), torch.randn(size, generator=rng)


# the basis -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tasks", [2, 4])
def test_the_basis_is_orthonormal(tasks: int) -> None:
    for client in Bench("ogd", ogd(vectors=5), stream=Toy(tasks=tasks)).run().clients.values():
        basis = client["ogd"]["basis"]
        assert torch.allclose(basis @ basis.T, torch.eye(len(basis)), atol=1e-5)
        assert len(basis) == 5 * (tasks - 1)


def test_dependent_directions_are_not_kept_twice() -> None:
    vectors = torch.tensor([[1.0, 0, 0], [2.0, 0, 0], [1.0, 1.0, 0], [0.0, 0, 0]])
    assert torch.allclose(basis_of(vectors), torch.tensor([[1.0, 0, 0], [0, 1.0, 0]]))


# the projection ------------------------------------------------------------------------------------------------------
@given(seed=st.integers(0, 500))
def test_what_is_left_is_orthogonal_shorter_and_projected_once_and_for_all(seed: int) -> None:
    basis, g = random_basis(seed)
    left = project_out(g, basis)
    assert (basis @ left).norm() < 1e-5 * g.norm()
    assert left.norm() <= g.norm() * (1 + 1e-6)
    assert torch.allclose(project_out(left, basis), left, atol=1e-5)


@given(seed=st.integers(0, 500))
def test_nothing_is_left_of_a_vector_in_the_span(seed: int) -> None:
    basis, g = random_basis(seed)
    inside = g[: len(basis)] @ basis
    assert project_out(inside, basis).norm() < 1e-5 * (1 + inside.norm())


def test_an_empty_basis_leaves_the_gradient() -> None:
    _, g = random_basis(0)
    assert torch.equal(project_out(g, torch.zeros(0, len(g))), g)
    assert equal(Bench("fedavg").run(rounds=2).state.model, Bench("ogd").run(rounds=2).state.model)


# what it protects ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("optimizer", "project"), [(Optimizer(lr=0.1), "auto"), (Optimizer(lr=0.1, momentum=0.9), "auto"), (ADAM, "auto")]
)
def test_a_linear_models_stored_logits_do_not_change(optimizer: Optimizer, project: str) -> None:
    rng = torch.Generator().manual_seed(3)
    table = {(0, t): (torch.randn(30, 20, generator=rng), torch.randint(0, 3, (30,), generator=rng)) for t in range(2)}
    stream = Given(clients=1, tasks=2, rounds_per_task=1, classes=3, table=table)
    options = ogd(vectors=8, project=project)
    bench = Bench("ogd", options, stream=stream, module=Linear, train=TrainOptions(20, 10, optimizer))
    first, last = bench.run(rounds=1), bench.run()
    ctx = bench.context(phase="basis")
    chosen = stream.data(0, 0).take(ctx.rng("basis").permutation(30)[:8])

    def logits(params: Tensor) -> Tensor:
        return bench.trainer().outputs({**bench.model(), "params": params}, chosen.x).gather(1, chosen.y.unsqueeze(1))

    assert (last.params - first.params).norm() > 0.1
    assert torch.allclose(logits(last.params), logits(first.params), atol=1e-4)


# other optimisers ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", [ADAM, Optimizer(lr=0.1, weight_decay=0.1)])
def test_other_optimisers_have_their_update_projected(optimizer: Optimizer) -> None:
    bench = Bench("ogd", ogd(vectors=4), stream=Toy(clients=1), train=TrainOptions(1, 5, optimizer))
    assert OGD().on_update(optimizer)
    first = bench.run(rounds=2)
    basis, moved = first.clients[0]["ogd"]["basis"], bench.run(rounds=3).params - first.params
    assert (basis @ moved).norm() < 1e-5 * moved.norm()
    unprojected = bench.change(method="fedavg", options={}).run(rounds=3).params - first.params
    assert (basis @ unprojected).norm() > 1e-2 * unprojected.norm()


def test_projecting_only_the_gradient_is_not_enough_for_adam() -> None:
    bench = Bench("ogd", ogd(vectors=4, project="gradient"), stream=Toy(clients=1), train=TrainOptions(1, 5, ADAM))
    first = bench.run(rounds=2)
    moved = bench.run(rounds=3).params - first.params
    assert (first.clients[0]["ogd"]["basis"] @ moved).norm() > 1e-3 * moved.norm()
    assert "not orthogonal" in methods.build("ogd", ogd(project="gradient"), optimizer=Optimizer("adam")).warnings[0]


def test_for_plain_sgd_both_ways_agree() -> None:
    by_gradient, by_update = (Bench("ogd", ogd(vectors=4, project=p)).run() for p in ("gradient", "update"))
    assert torch.allclose(by_gradient.params, by_update.params, atol=1e-5)
    assert all("before" not in client["ogd"] for client in by_update.clients.values())


# memory --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("storage", "width"), [("float32", 4), ("float16", 2)])
def test_the_bytes_are_what_the_options_say(storage: str, width: int) -> None:
    bench = Bench("ogd", ogd(vectors=3, storage=storage), stream=Toy(tasks=3))
    size = len(bench.model()["params"])
    for client in bench.run().clients.values():
        assert tensor_bytes(client) == 2 * 3 * width * size


@pytest.mark.parametrize("storage", ["float32", "float16"])
def test_max_vectors_bounds_them_for_any_number_of_tasks(storage: str) -> None:
    bench = Bench("ogd", ogd(vectors=4, max_vectors=6, storage=storage), stream=Toy(tasks=5))
    for client in bench.run().clients.values():
        basis = widened(client["ogd"]["basis"])
        assert len(basis) == 6
        assert torch.allclose(basis @ basis.T, torch.eye(6), atol=1e-5 if storage == "float32" else 3e-3)


def one_client(*tasks: Tensor, **options: Any) -> Tensor:
    """The basis after all but the last task: a linear map with one output, whose logit gradients are the samples."""
    table = {(0, task): (x, torch.zeros(len(x), dtype=torch.int64)) for task, x in enumerate(tasks)}
    stream = Given(clients=1, tasks=len(tasks), rounds_per_task=1, classes=1, table=table)
    bench = Bench("ogd", ogd(vectors=100, **options), stream=stream, module=Linear, train=TrainOptions(1, 100))
    return widened(bench.run().clients[0]["ogd"]["basis"])


def held(gradients: Tensor, basis: Tensor) -> float:
    """The share of the gradients' energy in the span of the basis."""
    return float((gradients @ basis.T).square().sum() / gradients.square().sum())


def test_many_equal_gradients_outweigh_a_longer_one() -> None:
    """One of length 2 and fifty of length 1: 4 of 54 parts of the energy against 50. By residuals it was the first."""
    gradients = torch.cat([torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 1.0]]).expand(50, 2)])
    assert held(gradients, one_client(gradients, gradients, max_vectors=1)) == pytest.approx(50 / 54, abs=1e-5)


@given(seed=st.integers(0, 500))
@settings(max_examples=15, deadline=None)
def test_the_principal_directions_are_the_top_right_singular_vectors(seed: int) -> None:
    """Of the first task's gradients; then of those at their singular values together with the second task's."""
    rng = np.random.default_rng(seed)
    first, second = (rng.normal(size=(12, 10)) * rng.exponential(size=10) for _ in range(2))
    tasks = [torch.tensor(x, dtype=torch.float32) for x in (first, second, second)]
    _, values, directions = np.linalg.svd(first)
    stacked = np.concatenate([values[:4, None] * directions[:4], second])
    for given_tasks, expected in ((tasks[:2], directions), (tasks, np.linalg.svd(stacked)[2])):
        basis = one_client(*given_tasks, max_vectors=4).double().numpy()
        assert basis.T @ basis == pytest.approx(expected[:4].T @ expected[:4], abs=1e-2)


def test_without_a_direction_there_is_no_basis() -> None:
    rows, values = principal(torch.zeros(3, 7), 2)
    assert rows.shape == (0, 7) and values.shape == (0,)


def test_half_precision_projects_to_about_a_thousandth() -> None:
    basis, g = random_basis(1, count=20, size=5000)
    stored = OGD(storage="float16")._stored(basis)
    assert stored.dtype == torch.float16
    assert (basis @ project_out(g, stored)).norm() < 2e-3 * g.norm()
    assert torch.allclose(project_out(g, stored), project_out(g, basis), atol=5e-3)


def test_blocks_do_not_change_the_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    basis, g = random_basis(1, count=4, size=1000)
    stored = OGD(storage="float16")._stored(basis)
    whole = project_out(g, stored)
    monkeypatch.setattr("everfed.methods.project.ogd._BLOCK", 4 * 77)
    assert torch.allclose(project_out(g, stored), whole, atol=1e-6)


# composition and options ---------------------------------------------------------------------------------------------
def test_a_later_gradient_rule_asks_for_the_update() -> None:
    with pytest.raises(CompositionError, match=r"fedgp changes the gradient after ogd.*set ogd\.project = 'update'"):
        methods.build("fedgp+ogd", ogd(project="gradient"))
    bench = Bench("fedgp+ogd", {"ogd": {"vectors": 4}, "memory": {"size": 8}}, stream=Toy(clients=1))
    first = bench.run(rounds=2)
    moved = bench.run(rounds=3).params - first.params
    assert (first.clients[0]["ogd"]["basis"] @ moved).norm() < 1e-5 * moved.norm()


def test_a_client_without_data_keeps_its_basis() -> None:
    clients = Bench("ogd", ogd(vectors=3), stream=ClassToy(sizes={(1, 0): 0})).run().clients
    assert "basis" in clients[0]["ogd"] and "ogd" not in clients[1]


@pytest.mark.parametrize(
    ("option", "value"), [("vectors", 0), ("storage", "int8"), ("max_vectors", -1), ("project", "never")]
)
def test_options_are_checked(option: str, value: Any) -> None:
    with pytest.raises(methods.MethodError, match=rf"method\.ogd\.{option} must be"):
        methods.build("ogd", ogd(**{option: value}))
