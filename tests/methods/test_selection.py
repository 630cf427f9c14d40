"""The capped simplex, its two solvers, and the choice of samples built on them."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize

from everfed.methods.replay.diversity import (
    Candidates,
    accelerated_projected_gradient,
    convex_weights,
    largest,
    largest_eigenvalue,
    noisy_uniform,
    objective,
    pairwise_descent,
    project,
    refine_by_swaps,
    select,
    zero_diagonal_weights,
)
from everfed.methods.replay.near_optimality import draw_gradients

quick = settings(max_examples=60)
finite = st.floats(-1e6, 1e6, allow_nan=False, width=64)


@st.composite
def vectors_and_sizes(draw, longest: int = 30):
    y = draw(arrays(np.float64, st.integers(1, longest), elements=finite))
    return y, draw(st.integers(0, len(y)))


@st.composite
def gradients_and_sizes(draw):
    """Small whole numbers, so that zero, equal and opposite gradients are common."""
    shape = (draw(st.integers(1, 10)), draw(st.integers(1, 4)))
    rows = draw(arrays(np.float64, shape, elements=st.integers(-2, 2).map(float)))
    return rows, draw(st.integers(1, shape[0]))


def cosines(rows: np.ndarray) -> np.ndarray:
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return units @ units.T


def value(gram: np.ndarray, linear: np.ndarray, x: np.ndarray) -> float:
    return float(x @ gram @ x - 2 * linear @ x)


@pytest.mark.parametrize(("delta", "first"), [(0.0, 0.625), (0.5, 0.75), (-0.5, 0.5 + 1 / 12)])
def test_delta_is_subtracted_from_the_diagonal(delta: float, first: float) -> None:
    """Two orthogonal samples, one to choose, c = (1/4, 0): (1 - delta)(x_1 - x_2) = c_1 - c_2 with x_1 + x_2 = 1."""
    weights = convex_weights(Candidates.of(np.eye(2)), 1, np.array([0.25, 0.0]), delta=delta)
    assert weights == pytest.approx([first, 1.0 - first], abs=1e-8)


def scipy_minimum(gram: np.ndarray, linear: np.ndarray, n: int) -> np.ndarray:
    m = len(linear)
    result = minimize(
        lambda x: value(gram, linear, x),
        np.full(m, n / m),
        jac=lambda x: 2 * (gram @ x - linear),
        bounds=[(0, 1)] * m,
        constraints={"type": "eq", "fun": lambda x: x.sum() - n, "jac": lambda x: np.ones(m)},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 2000},
    )
    return result.x


# --- projection -----------------------------------------------------------------------------------------------------


@quick
@given(vectors_and_sizes())
def test_projection_is_feasible_and_idempotent(case) -> None:
    y, n = case
    x = project(y, n)
    assert x.min() >= 0 and x.max() <= 1
    assert abs(x.sum() - n) < 1e-12 * len(y)
    np.testing.assert_allclose(project(x, n), x, atol=1e-12)


@quick
@given(vectors_and_sizes(), st.integers(0, 2**31))
def test_projection_satisfies_the_variational_inequality(case, seed: int) -> None:
    """Only the nearest point x has (y - x)'(z - x) <= 0 for every feasible z."""
    y, n = case
    x = project(y, n)
    z = np.zeros(len(y))
    z[np.random.default_rng(seed).permutation(len(y))[:n]] = 1
    assert (y - x) @ (z - x) <= 1e-9 * max(1.0, np.abs(y).max())


@pytest.mark.parametrize("seed", range(8))
def test_projection_equals_scipy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m = int(rng.integers(2, 31))
    y, n = 2 * rng.standard_normal(m), int(rng.integers(1, m))
    np.testing.assert_allclose(project(y, n), scipy_minimum(np.eye(m), y, n), atol=1e-6)


def test_projection_by_hand() -> None:
    np.testing.assert_allclose(project(np.array([2.0, 0.5, 0.0]), 1), [1, 0, 0], atol=1e-15)
    np.testing.assert_allclose(project(np.array([0.9, 0.5, 0.0]), 1), [0.7, 0.3, 0], atol=1e-15)
    np.testing.assert_allclose(project(np.array([3.0, 0.5, 0.1]), 2), [1, 0.7, 0.3], atol=1e-15)
    np.testing.assert_allclose(project(np.full(7, -4.0), 3), np.full(7, 3 / 7), atol=1e-15)
    feasible = np.array([0.25, 1.0, 0.0, 0.75])
    np.testing.assert_allclose(project(feasible, 2), feasible, atol=1e-15)
    assert (project(np.array([5.0, -1.0]), 2) == 1).all()
    assert (project(np.array([5.0, -1.0]), 0) == 0).all()


def test_projection_of_huge_and_far_apart_numbers_keeps_the_sum() -> None:
    y = np.array([1e15, 1e15 + 1, -1e15, 3.0, 0.0])
    assert project(y, 3).sum() == pytest.approx(3, abs=1e-12)
    many = np.random.default_rng(0).standard_normal(100_000)
    assert abs(project(many, 12_345).sum() - 12_345) < 1e-12 * len(many)


@pytest.mark.parametrize(("y", "n"), [([1.0], 2), ([1.0], -1), ([np.nan], 1), ([[1.0]], 1)])
def test_projection_refuses(y, n: int) -> None:
    with pytest.raises(ValueError):
        project(np.array(y), n)


# --- solvers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("m", "d", "n"), [(12, 300, 3), (25, 8, 5), (30, 40, 1)])
def test_convex_value_equals_scipy_and_kkt_hold(seed: int, m: int, d: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((m, d)) + 0.5
    candidates, target = Candidates.of(rows), 0.3 * rng.standard_normal(d)
    linear = candidates.along(target)
    x = convex_weights(candidates, n, linear)
    reference = scipy_minimum(candidates.gram, linear, n)
    assert value(candidates.gram, linear, x) == pytest.approx(value(candidates.gram, linear, reference), abs=1e-6)
    gradient = 2 * (candidates.gram @ x - linear)
    inside = (x > 1e-7) & (x < 1 - 1e-7)
    nu = gradient[inside].mean()
    assert np.abs(gradient[inside] - nu).max() < 1e-5
    assert (gradient[x <= 1e-7] >= nu - 1e-5).all() and (gradient[x >= 1 - 1e-7] <= nu + 1e-5).all()


@pytest.mark.parametrize("diagonal", [0.0, 0.3, 1.0])
def test_projected_gradient_never_raises_the_value(diagonal: float) -> None:
    rng = np.random.default_rng(1)
    gram = cosines(rng.standard_normal((40, 10)) + 0.3)
    start, linear = noisy_uniform(40, 6, rng), 0.1 * rng.standard_normal(40)
    shifted = gram - diagonal * np.eye(40)
    values = [
        value(
            shifted,
            linear,
            accelerated_projected_gradient(shifted, linear, 6, start, largest_eigenvalue(gram), limit=k),
        )
        for k in range(60)
    ]
    assert (np.diff(values) <= 1e-12).all() and values[-1] < values[0]


def test_solving_again_from_the_solution_returns_it() -> None:
    candidates = Candidates.of(np.random.default_rng(2).standard_normal((30, 12)))
    x = convex_weights(candidates, 4, np.zeros(30))
    assert (convex_weights(candidates, 4, np.zeros(30), start=x) == x).all()


@pytest.mark.parametrize("seed", range(5))
def test_pairwise_descent_never_raises_the_value_and_ends_almost_integral(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gram, start = cosines(draw_gradients(rng, 50)) - np.eye(50), noisy_uniform(50, 5, rng)
    values = [value(gram, np.zeros(50), pairwise_descent(gram, np.zeros(50), start, limit=k)) for k in range(30)]
    assert (np.diff(values) <= 1e-12).all()
    x = pairwise_descent(gram, np.zeros(50), start)
    assert abs(x.sum() - 5) < 1e-9 and x.min() >= -1e-12 and x.max() <= 1 + 1e-12
    assert ((x > 1e-3) & (x < 1 - 1e-3)).mean() <= 0.1


def test_pairwise_descent_ends_at_a_stationary_point_of_the_relaxed_problem() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        candidates, target = Candidates.of(rng.standard_normal((40, 6))), rng.standard_normal(6)
        linear = candidates.along(target)
        x = zero_diagonal_weights(candidates, 7, linear, seed)
        gradient = 2 * ((candidates.gram - np.eye(40)) @ x - linear)
        assert abs(x.sum() - 7) < 1e-12
        assert gradient[x > 0].max() <= gradient[x < 1].min() + 1e-6


@pytest.mark.parametrize("d", [1, 2, 5])
def test_many_more_samples_than_dimensions(d: int) -> None:
    """Directions on all sides cancel: the sum of the chosen can be made short, however many stand for choice."""
    rows = np.random.default_rng(0).standard_normal((400, d))
    for n in (20, 200):
        assert objective(rows, select(rows, n)) < 2  # n at random, n^2 at worst


def test_fractions_survive_only_between_opposed_samples() -> None:
    """Along e_i - e_j the zero-diagonal curvature is -2 Q_ij, so a positive cosine pushes one of the two to a bound."""
    for seed in range(20):
        candidates = Candidates.of(draw_gradients(np.random.default_rng(seed), 30))
        x = zero_diagonal_weights(candidates, 5, np.zeros(30), seed)
        fractional = np.flatnonzero((x > 1e-2) & (x < 1 - 1e-2))
        assert all(candidates.gram[i, j] < 1e-6 for i, j in combinations(fractional, 2))


# --- objectives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_relaxed_value_bounds_the_optimum_which_bounds_every_choice(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = draw_gradients(rng, 12, 20)
    gram = cosines(rows)
    subsets = [np.array(s) for s in combinations(range(12), 4)]
    sums = np.array([gram[np.ix_(s, s)].sum() for s in subsets])
    without = np.array([(gram - np.eye(12))[np.ix_(s, s)].sum() for s in subsets])
    np.testing.assert_allclose(sums, without + 4, atol=1e-12)
    assert np.argmin(sums) == np.argmin(without)
    relaxed = convex_weights(Candidates.of(rows), 4, np.zeros(12))
    assert value(gram, np.zeros(12), relaxed) <= sums.min() + 1e-9
    for relaxation in ("convex", "zero-diagonal"):
        assert objective(rows, select(rows, 4, relaxation)) >= sums.min() - 1e-9


def test_objective_is_the_squared_length_of_the_sum_of_unit_gradients() -> None:
    rows = np.random.default_rng(3).standard_normal((9, 50))
    chosen = np.array([0, 4, 7])
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    assert objective(rows, chosen) == pytest.approx(np.linalg.norm(units[chosen].sum(axis=0)) ** 2, abs=1e-12)
    assert objective(rows, chosen) == pytest.approx(cosines(rows)[np.ix_(chosen, chosen)].sum(), abs=1e-12)
    assert objective(np.ones((6, 3)), np.arange(4)) == pytest.approx(16)  # identical: N^2
    assert objective(np.eye(6), np.arange(4)) == pytest.approx(4)  # orthogonal: N
    assert objective(rows, np.array([5])) == pytest.approx(1)


# --- selection ------------------------------------------------------------------------------------------------------


@quick
@given(gradients_and_sizes(), st.sampled_from(["convex", "zero-diagonal"]), st.booleans(), st.integers(0, 5))
def test_exactly_n_whatever_the_gradients(case, relaxation: str, swap: bool, seed: int) -> None:
    rows, n = case
    target = np.random.default_rng(seed).standard_normal(rows.shape[1]) if seed else None
    chosen = select(rows, n, relaxation, target, seed, swap_refine=swap)
    assert chosen.dtype == np.int64 and len(chosen) == n
    assert len(set(chosen.tolist())) == n and set(chosen.tolist()) <= set(range(len(rows)))
    assert (chosen == select(rows, n, relaxation, target, seed, swap_refine=swap)).all()
    directed = np.flatnonzero(np.linalg.norm(rows, axis=1) > 0)
    assert np.isin(chosen, directed).sum() == min(n, len(directed))  # no zero gradient before all others


@pytest.mark.parametrize("relaxation", ["convex", "zero-diagonal"])
def test_fewer_samples_than_asked_are_all_kept(relaxation: str) -> None:
    rows = np.random.default_rng(0).standard_normal((4, 3))
    assert select(rows, 4, relaxation).tolist() == [0, 1, 2, 3]
    assert select(rows, 9, relaxation).tolist() == [0, 1, 2, 3]
    assert select(rows[:0], 3, relaxation).tolist() == []
    assert select(rows, 0, relaxation).tolist() == []
    assert select(np.zeros((6, 3)), 9, relaxation).tolist() == list(range(6))


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_saddle_ends_in_an_opposite_pair(order: tuple[int, ...]) -> None:
    rows = np.array([[1.0, 0], [0, 1], [-1, 0], [0, -1]])[list(order)]
    for seed in range(5):
        assert objective(rows, select(rows, 2, seed=seed)) == pytest.approx(0, abs=1e-12)


def test_target_draws_the_sum() -> None:
    rows = np.array([[1.0, 0], [0, 1], [-1, 0], [0, -1], [1, 0]])
    assert select(rows, 2, target=np.array([2.0, 0])).tolist() == [0, 4]
    assert select(rows, 1, target=np.array([0.0, -1])).tolist() == [3]
    assert select(rows, 1, "convex", target=np.array([0.0, 1])).tolist() == [1]


@pytest.mark.parametrize("relaxation", ["convex", "zero-diagonal"])
def test_lengths_do_not_count(relaxation: str) -> None:
    rng = np.random.default_rng(4)
    rows = draw_gradients(rng, 30, 100)
    scaled = rows * np.exp(4 * rng.standard_normal(30))[:, None]
    assert (select(rows, 5, relaxation) == select(scaled, 5, relaxation)).all()


@pytest.mark.parametrize("seed", range(5))
def test_convex_choice_follows_a_permutation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, order = draw_gradients(rng, 20, 100), rng.permutation(20)
    assert set(order[select(rows[order], 5, "convex")]) == set(select(rows, 5, "convex"))


def test_zero_gradients_fill_up_at_random() -> None:
    rows = np.zeros((8, 5))
    rows[2], rows[6] = 1, -1
    fills = {tuple(select(rows, 3, seed=seed)) for seed in range(30)}
    assert all({2, 6} < set(chosen) for chosen in fills) and len(fills) == 6
    assert len({tuple(select(np.zeros((8, 5)), 3, seed=seed)) for seed in range(30)}) > 10


def test_tensors_arrays_and_single_precision_choose_alike() -> None:
    rows = draw_gradients(np.random.default_rng(5), 30, 100).astype(np.float32)
    assert (select(rows, 5) == select(torch.from_numpy(rows), 5)).all()
    assert (select(rows, 5) == select(rows.astype(np.float64), 5)).all()
    assert (select(torch.from_numpy(rows).requires_grad_(), 5) == select(rows, 5)).all()


def test_gram_of_many_columns_is_built_in_blocks() -> None:
    rows = np.random.default_rng(6).standard_normal((200, 50_000)).astype(np.float32)  # 80 MB in float64: two blocks
    candidates = Candidates.of(rows)
    np.testing.assert_allclose(candidates.gram, cosines(rows.astype(np.float64)), atol=1e-12)
    x = np.random.default_rng(0).random(200)
    units = rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    np.testing.assert_allclose(candidates.weighted_sum(x).numpy(), x @ units, atol=1e-10)
    np.testing.assert_allclose(candidates.along(x @ units), units @ (x @ units), atol=1e-9)


def test_swaps_end_where_no_exchange_helps() -> None:
    rng = np.random.default_rng(7)
    for _ in range(10):
        gram, linear = cosines(draw_gradients(rng, 15, 20)), 0.2 * rng.standard_normal(15)
        chosen = refine_by_swaps(gram, linear, np.arange(4))

        def cost(members: np.ndarray, gram: np.ndarray = gram, linear: np.ndarray = linear) -> float:
            return gram[np.ix_(members, members)].sum() - 2 * linear[members].sum()

        others = np.setdiff1d(np.arange(15), chosen)
        swapped = [cost(np.append(np.delete(chosen, i), j)) for i in range(4) for j in others]
        assert cost(chosen) <= min(swapped) + 1e-9 and cost(chosen) <= cost(np.arange(4)) + 1e-12


def test_largest_prefers_the_earlier_of_equals() -> None:
    assert largest(np.array([0.5, 1.0, 0.5, 0.5]), 2).tolist() == [0, 1]


def test_refusals_name_what_is_allowed() -> None:
    rows = np.ones((3, 2))
    with pytest.raises(ValueError, match=r"zero-diagonal, convex.*'nonsense'"):
        select(rows, 1, "nonsense")
    with pytest.raises(ValueError, match="sample 1 is not finite"):
        select(np.array([[1.0, 0], [np.inf, 0], [0, 1]]), 1)
    with pytest.raises(ValueError, match=r"\(2,\)"):
        select(rows, 1, target=np.ones(5))
    with pytest.raises(ValueError, match="negative"):
        select(rows, -1)
    with pytest.raises(ValueError, match="one row per sample"):
        select(np.ones(3), 1)
