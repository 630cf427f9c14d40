"""Alternating minimisation over clients, against closed forms and a central solver."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from everfed.methods.replay.coordinated import client_step, client_target, coordinate
from everfed.methods.replay.diversity import Candidates, objective, select
from everfed.methods.replay.near_optimality import draw_gradients
from everfed.methods.replay.sample_gradients import RandomProjection

quick = settings(max_examples=15)


def clients(seed: int, count: int, samples: int, d: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [draw_gradients(rng, samples, d) for _ in range(count)]


def units(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def union_objective(gradients: list[np.ndarray], choices) -> float:
    return objective(
        np.concatenate([g[c] for g, c in zip(gradients, choices, strict=True)]), np.arange(sum(map(len, choices)))
    )


@pytest.mark.parametrize(("rounding", "relaxation"), [("zero-diagonal", "zero-diagonal"), ("top-n", "convex")])
@quick
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 8))
def test_no_exchange_is_the_uncoordinated_choice(rounding: str, relaxation: str, seed: int, count: int, n: int) -> None:
    gradients = clients(seed, count, 10, 20)
    seeds = list(range(seed, seed + count))
    together = coordinate(gradients, n, 0, rounding=rounding, seeds=seeds)
    for g, choice, s in zip(gradients, together.choices, seeds, strict=True):
        assert (choice == select(g, n, relaxation, seed=s)).all()
    assert together.targets == (None,) * count and len(together.objectives) == 1


@pytest.mark.parametrize("rounding", ["zero-diagonal", "top-n"])
@pytest.mark.parametrize("n", [1, 4])
def test_one_client_and_identical_clients_choose_as_if_alone(rounding: str, n: int) -> None:
    (rows,) = clients(0, 1, 20, 50)
    alone = coordinate([rows], n, 0, rounding=rounding).choices[0]
    for exchanges in (1, 5):
        one = coordinate([rows], n, exchanges, rounding=rounding)
        assert (one.choices[0] == alone).all() and one.targets[0].abs().max() == 0
        three = coordinate([rows] * 3, n, exchanges, rounding=rounding)
        assert all((choice == alone).all() for choice in three.choices)
        assert max(target.abs().max() for target in three.targets) < 1e-9


@quick
@given(st.integers(0, 10_000), st.integers(2, 5), st.integers(1, 6), st.sampled_from([5, 60]))
def test_objective_never_increases_and_targets_sum_to_zero(seed: int, count: int, n: int, d: int) -> None:
    result = coordinate(clients(seed, count, 8, d), n, 6)
    objectives = np.array(result.objectives)
    assert len(objectives) == 7
    assert (np.diff(objectives) <= 1e-8 * objectives[0]).all()
    assert torch.stack(result.targets).sum(dim=0).abs().max() <= 1e-6 * n
    assert all(len(choice) == n for choice in result.choices)


def test_server_step_lowers_the_split_objective_to_the_common_one() -> None:
    """M sum ||y_m - h_m||^2 = ||sum y_m||^2 after every server step."""
    messages = [torch.randn(40, generator=torch.Generator().manual_seed(m), dtype=torch.float64) for m in range(5)]
    mean = torch.stack(messages).mean(dim=0)
    targets = [client_target(y, mean) for y in messages]
    split = 5 * sum(((y - h) ** 2).sum() for y, h in zip(messages, targets, strict=True))
    torch.testing.assert_close(split, (torch.stack(messages).sum(dim=0) ** 2).sum(), rtol=1e-9, atol=0)


def test_two_clients_on_a_line_halve_their_sum() -> None:
    gradients = [np.array([[1.0], [1], [-1]]), np.array([[1.0], [1], [1]])]
    result = coordinate(gradients, 1, 3)
    np.testing.assert_allclose(np.sqrt(result.objectives), [1, 0.5, 0.25, 0.125], atol=1e-9)
    np.testing.assert_allclose(coordinate(gradients, 1, 0).weights[0], [0.25, 0.25, 0.5], atol=1e-9)
    np.testing.assert_allclose(coordinate(gradients, 1, 1).weights[0], [0.125, 0.125, 0.75], atol=1e-9)
    assert coordinate(gradients, 1, 1).choices[0].tolist() == [2]


def central_optimum(gradients: list[np.ndarray], n: int) -> float:
    """Objective (6) in one place: all clients' weights at once."""
    matrix = np.concatenate([units(g) for g in gradients])
    gram, owner = matrix @ matrix.T, np.repeat(np.arange(len(gradients)), [len(g) for g in gradients])
    result = minimize(
        lambda x: x @ gram @ x,
        np.concatenate([np.full(len(g), n / len(g)) for g in gradients]),
        jac=lambda x: 2 * gram @ x,
        bounds=[(0, 1)] * len(gram),
        constraints=[
            {"type": "eq", "fun": lambda x, m=m: x[owner == m].sum() - n, "jac": lambda x, m=m: (owner == m) * 1.0}
            for m in range(len(gradients))
        ],
        method="SLSQP",
        options={"ftol": 1e-13, "maxiter": 2000},
    )
    return float(result.fun)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_tightness_many_exchanges_reach_the_central_optimum(seed: int) -> None:
    gradients = clients(seed, 4, 12, 300)
    best = central_optimum(gradients, 3)
    objectives = coordinate(gradients, 3, 200).objectives
    assert objectives[-1] >= best * (1 - 1e-6)
    assert objectives[-1] == pytest.approx(best, rel=1e-4)


def test_the_mean_is_all_a_client_needs() -> None:
    """The in-memory run equals clients that each see their own matrix and the mean, and nothing else."""
    gradients = clients(3, 3, 15, 30)
    held = [Candidates.of(g) for g in gradients]
    weights = [client_step(c, 4) for c in held]
    for _ in range(3):
        messages = [c.weighted_sum(x) for c, x in zip(held, weights, strict=True)]
        mean = torch.stack(messages).mean(dim=0)
        weights = [
            client_step(c, 4, client_target(y, mean), x) for c, y, x in zip(held, messages, weights, strict=True)
        ]
    for mine, theirs in zip(weights, coordinate(gradients, 4, 3).weights, strict=True):
        assert (mine == theirs).all()


def test_coordination_lowers_the_union_objective() -> None:
    rng = np.random.default_rng(0)
    gradients = clients(1, 20, 30, 300)
    by_exchanges = [union_objective(gradients, coordinate(gradients, 5, k).choices) for k in (0, 1, 4)]
    at_random = union_objective(gradients, [rng.choice(30, 5, replace=False) for _ in gradients])
    assert by_exchanges[2] < by_exchanges[1] < by_exchanges[0] < at_random


def test_clients_with_little_or_nothing() -> None:
    first, second = clients(4, 2, 12, 20)
    result = coordinate([first, second[:2], second[:0], np.zeros((5, 20)), second], [3, 4, 4, 2, 5], 3)
    assert [len(choice) for choice in result.choices] == [3, 2, 0, 2, 5]
    assert result.choices[1].tolist() == [0, 1] and (result.weights[1] == 1).all()
    assert result.targets[2] is None  # not counted in the mean
    targets = [target for target in result.targets if target is not None]
    assert len(targets) == 4 and torch.stack(targets).sum(dim=0).abs().max() < 1e-9
    without = coordinate([first, second[:2], np.zeros((5, 20)), second], [3, 4, 2, 5], 3)
    np.testing.assert_allclose(without.objectives, result.objectives, rtol=1e-12)
    assert coordinate([], 3, 2).choices == ()
    assert [len(c) for c in coordinate([first[:0], second[:0]], 3, 2).choices] == [0, 0]


def test_tolerance_stops_early() -> None:
    gradients = clients(5, 3, 10, 40)
    full, short = coordinate(gradients, 3, 30).objectives, coordinate(gradients, 3, 30, tolerance=0.05).objectives
    assert len(full) == 31 and len(short) < 31 and full[: len(short)] == short


def test_removing_the_common_diagonal_coordinates_too() -> None:
    gradients = clients(6, 10, 20, 100)
    plain = union_objective(gradients, coordinate(gradients, 4, 0).choices)
    assert union_objective(gradients, coordinate(gradients, 4, 4, delta=1 / 10).choices) < plain


def test_projected_gradients_keep_every_invariant() -> None:
    projection = RandomProjection(64, seed=3)
    gradients = [projection.project(torch.from_numpy(g)) for g in clients(7, 4, 12, 300)]
    result = coordinate(gradients, 3, 5)
    assert (np.diff(result.objectives) <= 1e-8 * result.objectives[0]).all()
    assert torch.stack(result.targets).sum(dim=0).abs().max() < 1e-9
    for g, choice in zip(gradients, coordinate(gradients, 3, 0).choices, strict=True):
        assert (choice == select(g, 3)).all()


def test_unknown_rounding_is_refused() -> None:
    with pytest.raises(ValueError, match="zero-diagonal, top-n"):
        coordinate([np.ones((3, 2))], 1, 0, rounding="nearest")
