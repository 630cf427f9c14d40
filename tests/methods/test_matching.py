"""Gradient matching against closed forms, independent solvers and its defining inequalities."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize
from torch import Tensor

from everfed.methods.project import matching
from everfed.methods.project.matching import Matching, combine, gram, match_gradients, pairwise_cosines, solve_gram
from everfed.methods.project.matching_solvers import SoftmaxSGD

KAPPA = 0.25
# how many random problems: `make slow` draws many more of each kind
FEW_OR_MANY = pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])


def vectors(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def assert_close(actual: Tensor, *expected: float, tol: float = 1e-9) -> None:
    np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=tol)


def solved(G: Tensor, kappa: float = KAPPA) -> Matching:
    """The matching of the rows of G, with no warning about its gap."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return solve_gram(G @ G.T, kappa)


def worst(G: Tensor, d: Tensor) -> float:
    return float((G @ d).min())


def best_in_ball(G: np.ndarray, kappa: float, p: np.ndarray | None = None) -> np.ndarray:
    """The primal problem by SLSQP, on the vectors themselves: max v with <g_i, d> >= v, ||d - gbar|| <= r."""
    gbar = np.average(G, axis=0, weights=p)
    radius = kappa * np.linalg.norm(gbar)
    above = {
        "type": "ineq",
        "fun": lambda z: G @ z[:-1] - z[-1],
        "jac": lambda z: np.hstack([G, -np.ones((len(G), 1))]),
    }
    inside = {
        "type": "ineq",
        "fun": lambda z: 1 - ((z[:-1] - gbar) ** 2).sum() / radius**2,
        "jac": lambda z: np.r_[-2 * (z[:-1] - gbar) / radius**2, 0][None],
    }
    start = np.r_[gbar, (G @ gbar).min()]
    found = minimize(
        lambda z: -z[-1],
        start,
        jac=lambda z: np.r_[np.zeros(len(gbar)), -1.0],
        constraints=[above, inside],
        method="SLSQP",
        options={"maxiter": 1000, "ftol": 1e-15},
    )
    step = found.x[:-1] - gbar  # SLSQP leaves the ball by its tolerance; a fair rival stays inside
    return gbar + step / max(1.0, np.linalg.norm(step) / radius)


# --- closed forms -----------------------------------------------------------------------------------------------


def test_identical_updates_grow_by_the_ball_radius_over_rho():
    G = vectors((3, 4), (3, 4))
    assert_close(match_gradients(G, KAPPA), 3.75, 5)
    assert_close(match_gradients(G, KAPPA, "1+k2"), 3.529412, 4.705882, tol=1e-6)
    assert_close(match_gradients(G, KAPPA, "1+k"), 3, 4)


def test_orthogonal_updates_share_equally():
    G = vectors((1, 0), (0, 1))
    assert_close(solved(G).gamma, 0.5, 0.5)
    assert_close(match_gradients(G, KAPPA), 0.625, 0.625)


def test_conflicting_updates_are_served_equally():
    G = vectors((1, 0), (-0.5, 1))
    d = match_gradients(G, KAPPA)
    assert_close(solved(G).gamma, 5 / 7, 2 / 7)
    assert_close(d, 0.375, 0.5625)
    assert_close(G @ d, 0.375, 0.375)
    assert worst(G, G.mean(0)) == 0.25
    assert_close(match_gradients(G, KAPPA, "1+k2"), 0.352941, 0.529412, tol=1e-6)
    assert_close(match_gradients(G, KAPPA, "1+k"), 0.3, 0.45)


def test_collinear_conflict_shrinks_and_keeps_the_sign_of_the_mean():
    G = vectors((1, 0), (-0.5, 0))
    assert_close(solved(G).gamma, 0, 1)
    assert_close(match_gradients(G, KAPPA), 0.1875, 0)


def test_unequal_norms_reduce_the_conflict_without_removing_it():
    G = vectors((10, 0), (-1, 1))
    d = match_gradients(G, KAPPA)
    assert_close(solved(G).gamma, 0, 1)
    assert_close(d, 3.699609, 1.300391, tol=1e-6)
    assert worst(G, d) == pytest.approx(-2.399219, abs=1e-6)
    assert worst(G, G.mean(0)) == -4


def test_opposite_and_zero_updates_give_zero():
    assert_close(match_gradients(vectors((1, 0), (-1, 0)), KAPPA), 0, 0, tol=0)
    assert_close(match_gradients(vectors((0, 0), (0, 0), (0, 0)), KAPPA), 0, 0, tol=0)


def test_a_zero_update_beside_a_real_one_leaves_the_mean():
    assert_close(match_gradients(vectors((1, 0), (0, 0)), KAPPA), 0.5, 0)
    assert_close(match_gradients(vectors((1, 0), (0, 0)), KAPPA, "1+k"), 0.4, 0)


@pytest.mark.parametrize(("scale", "rho"), [("none", 1), ("1+k", 1.25), ("1+k2", 1.0625)])
@pytest.mark.parametrize("solver", ["exact", "softmax_sgd"])
def test_one_update_is_scaled(scale, rho, solver):
    d = match_gradients([torch.tensor([3.0, -4.0])], KAPPA, scale, solver=solver)
    assert_close(d, 3 * 1.25 / rho, -4 * 1.25 / rho, tol=1e-6)


@pytest.mark.parametrize("scale", ["none", "1+k", "1+k2"])
@pytest.mark.parametrize("solver", ["exact", "softmax_sgd"])
def test_kappa_zero_is_the_mean(scale, solver):
    G = torch.randn(7, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(match_gradients(G, 0.0, scale, solver=solver), G.mean(0), rtol=1e-14, atol=1e-15)
    p = [1.0, 2, 3, 4, 5, 6, 7]
    expected = (torch.tensor(p, dtype=torch.float64)[:, None] * G).sum(0) / 28
    torch.testing.assert_close(match_gradients(G, 0.0, scale, weights=p, solver=solver), expected)


# --- degenerate inputs ------------------------------------------------------------------------------------------


def test_vanishing_combination_gives_the_mean_with_an_honest_gap():
    # Gamma = (1/2, 1/2, 0) makes g_Gamma zero. The best d is orthogonal to g_1 and serves all with at least 0; the
    # mean serves g_1 with -1/30, and that is what the gap must say: (1/30) / (1/3 * sqrt(1.01)).
    G = vectors((1, -0.1), (-1, 0.1), (0, 1))
    found = solved(G)
    assert_close(found.weights, 1 / 3, 1 / 3, 1 / 3)
    assert_close(found.gamma, 0.5, 0.5, 0, tol=1e-6)
    assert found.gap == pytest.approx(0.1 / math.sqrt(1.01), rel=1e-6)
    assert_close(match_gradients(G, KAPPA, "1+k"), 0, 1 / 3 / 1.25)


@pytest.mark.parametrize("size", [1e-9, 1e-11])
def test_a_mean_below_the_resolution_of_k_is_returned_as_it_is(size):
    G = vectors((1, 0.3), (-1 + 2 * size, -0.3))
    assert_close(match_gradients(G, KAPPA) / size, 1, 0, tol=1e-4)


def test_updates_of_any_scale():
    G = vectors((1, 0), (-0.5, 1))
    for scale in (1e-130, 1e-40, 1e-8, 1e8, 1e40, 1e150):
        assert_close(match_gradients(G * scale, KAPPA) / scale, 0.375, 0.5625)


def test_a_long_update_does_not_hide_short_ones():
    # Gamma leans on the short ones: the two balance each other, whatever the long one is.
    G = vectors((1, 0, 0), (0, 1e-6, 0), (0, 0, 1e-6))
    found = solved(G)
    assert_close(found.gamma, 0, 0.5, 0.5, tol=1e-6)
    d = found.weights @ G
    assert_close(d[1:] / d[0], 0.25 / math.sqrt(2), 0.25 / math.sqrt(2), tol=1e-5)


def test_more_updates_than_dimensions():
    G = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = solved(G)
    assert found.gap <= 1e-12
    assert (found.gamma > 0).sum() <= 4


# --- defining inequalities, random ------------------------------------------------------------------------------

finite = st.floats(-100, 100, allow_nan=False, width=32)
kappas = st.floats(0, 0.99)
updates = st.tuples(st.integers(2, 8), st.integers(1, 8)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.one_of(finite, st.integers(-2, 2).map(float)))
)


@settings(max_examples=150)
@given(updates, kappas)
def test_feasible_and_never_worse_than_the_mean(G, kappa):
    G = torch.from_numpy(G)
    gbar, largest = G.mean(0), float(G.norm(dim=1).max())
    d = match_gradients(G, kappa)
    norm = float(gbar.norm())
    slack = 1e-7 * norm + 1e-12 * largest
    assert torch.isfinite(d).all()
    if norm <= 1e-12 * largest:
        return
    assert float((d - gbar).norm()) <= kappa * norm + slack
    assert worst(G, d) >= worst(G, gbar) - largest * slack
    assert float(d @ gbar) >= (1 - kappa) * norm**2 - norm * slack


@settings(max_examples=150)
@given(updates, kappas)
def test_gap_certifies_the_optimum_unless_the_mean_is_returned(G, kappa):
    G = torch.from_numpy(G)
    found = solve_gram(G @ G.T, kappa)
    assert float(found.gamma.min()) >= 0
    assert float(found.gamma.sum()) == pytest.approx(1)
    is_mean = bool(torch.allclose(found.weights, torch.full_like(found.weights, 1 / len(G)), rtol=0, atol=1e-12))
    if kappa > 0 and found.weights.any() and not is_mean:
        assert found.gap <= 1e-8


@settings(max_examples=100)
@given(updates, kappas)
def test_odd_and_exact_under_powers_of_two(G, kappa):
    G = torch.from_numpy(G)
    d = match_gradients(G, kappa)
    assert torch.equal(match_gradients(-G, kappa), -d)
    assert torch.equal(match_gradients(8 * G, kappa), 8 * d)


def random_problem(rng: np.random.Generator, kind: str) -> tuple[np.ndarray, float]:
    T, d = int(rng.integers(2, 9)), int(rng.integers(1, 25))
    G = rng.standard_normal((T, d))
    if kind == "uneven":
        G = G * 10 ** rng.uniform(-2, 2, (T, 1))
    if kind == "aligned":
        G = G + 2 * rng.standard_normal(d)
    if kind == "repeated":
        G = G[rng.integers(0, T, T)]
    return G, float(rng.uniform(0.01, 0.99))


KINDS = ("plain", "uneven", "aligned", "repeated")


@FEW_OR_MANY
@pytest.mark.parametrize("kind", KINDS)
def test_primal_and_dual_meet_on_the_ball(kind, times):
    rng = np.random.default_rng(0)
    for _ in range(200 * times):
        G, kappa = random_problem(rng, kind)
        found = solved(torch.from_numpy(G), kappa)
        d, g_gamma, gbar = found.weights.numpy() @ G, found.gamma.numpy() @ G, G.mean(0)
        norm, largest = np.linalg.norm(gbar), np.linalg.norm(G, axis=1).max()
        dual = g_gamma @ gbar + kappa * norm * np.linalg.norm(g_gamma)
        assert found.gap <= 1e-10
        assert (G @ d).min() == pytest.approx(dual, abs=1e-9 * norm * largest)
        assert np.linalg.norm(d - gbar) == pytest.approx(kappa * norm, rel=1e-7)


@FEW_OR_MANY
@pytest.mark.parametrize("kind", KINDS)
def test_symmetries(kind, times):
    rng = np.random.default_rng(1)
    for _ in range(60 * times):
        G, kappa = random_problem(rng, kind)
        d = match_gradients(torch.from_numpy(G), kappa).numpy()
        Q = np.linalg.qr(rng.standard_normal((G.shape[1],) * 2))[0]
        order, factor = rng.permutation(len(G)), 10 ** rng.uniform(-5, 5)
        tol = 1e-6 * np.linalg.norm(G.mean(0))
        for changed, expected in ((G @ Q, d @ Q), (G[order], d), (factor * G, factor * d)):
            actual = match_gradients(torch.from_numpy(changed), kappa).numpy()
            np.testing.assert_allclose(actual, expected, rtol=0, atol=tol * max(1.0, factor))


@FEW_OR_MANY
@pytest.mark.parametrize("kind", KINDS)
def test_worst_served_update_gains_with_kappa(kind, times):
    rng = np.random.default_rng(2)
    for _ in range(30 * times):
        G = torch.from_numpy(random_problem(rng, kind)[0])
        served = [worst(G, match_gradients(G, kappa)) for kappa in (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)]
        assert (np.diff(served) >= -1e-9 * float(G.norm(dim=1).max() * G.mean(0).norm())).all()


# --- independent solvers ----------------------------------------------------------------------------------------


@FEW_OR_MANY
@pytest.mark.parametrize("weighted", [False, True])
def test_agrees_with_a_general_solver_on_the_primal(weighted, times):
    rng = np.random.default_rng(3)
    for _ in range(60 * times):
        G, kappa = rng.standard_normal((int(rng.integers(2, 7)), int(rng.integers(2, 6)))), rng.uniform(0.05, 0.9)
        p = rng.uniform(0.1, 1, len(G)) if weighted else None
        d = match_gradients(torch.from_numpy(G), kappa, weights=p).numpy()
        expected = best_in_ball(G, kappa, p)
        norm = np.linalg.norm(np.average(G, axis=0, weights=p))
        assert (G @ d).min() >= (G @ expected).min() - 1e-12
        np.testing.assert_allclose(d, expected, rtol=0, atol=2e-3 * norm)


def test_agrees_with_a_fine_grid_on_the_dual():
    rng = np.random.default_rng(4)
    a, b = np.meshgrid(np.linspace(0, 1, 401), np.linspace(0, 1, 401))
    simplex = np.stack([a, b, 1 - a - b], axis=-1)[a + b <= 1]
    for _ in range(20):
        G = rng.standard_normal((3, 4))
        K, norm = G @ G.T, np.linalg.norm(G.mean(0))
        lengths = np.sqrt(np.einsum("ni,ij,nj->n", simplex, K, simplex))
        values = simplex @ K.mean(1) + KAPPA * norm * lengths
        found = solved(torch.from_numpy(G))
        d = found.weights.numpy() @ G
        assert (G @ d).min() <= values.min() + 1e-12
        assert (G @ d).min() == pytest.approx(values.min(), abs=2e-2 * norm)
        assert np.abs(simplex[values.argmin()] - found.gamma.numpy()).max() < 0.05


def test_the_mean_is_returned_only_where_nothing_beats_zero():
    # With a pair of opposite updates 0 lies in the hull; g_Gamma* = 0 says that the best worst case is exactly 0.
    rng = np.random.default_rng(5)
    returned = 0
    for _ in range(300):
        G = rng.integers(-2, 3, (int(rng.integers(3, 9)), int(rng.integers(1, 4)))).astype(float)
        G[0] = -G[1] * rng.choice([1, 0.5])
        norm = np.linalg.norm(G.mean(0))
        found = solve_gram(torch.from_numpy(G @ G.T), KAPPA)
        if norm > 1e-9 and torch.allclose(found.weights, torch.full_like(found.weights, 1 / len(G)), atol=1e-12):
            returned += 1
            assert abs((G @ best_in_ball(G, KAPPA)).min()) <= 1e-6 * norm
    assert returned > 10


# --- Gram matrix, blocks, precision -----------------------------------------------------------------------------


def test_gram_and_one_weighted_sum_are_all_that_is_needed():
    G = torch.randn(6, 500, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    found = solve_gram(gram(G), KAPPA)
    g_gamma, gbar = found.gamma @ G, G.mean(0)
    explicit = gbar + KAPPA * gbar.norm() / g_gamma.norm() * g_gamma
    torch.testing.assert_close(match_gradients(G, KAPPA), explicit, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(combine(G, found.weights), explicit, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("T", [1, 2, 63, 64, 100])
def test_gram_is_exact_on_whole_numbers(T):
    G = torch.randint(-9, 10, (T, 40_000), generator=torch.Generator().manual_seed(16)).float()
    assert torch.equal(gram(G), G.double() @ G.double().T)


def test_float32_agrees_with_float64_at_a_million_entries():
    generator = torch.Generator().manual_seed(7)
    G = torch.randn(8, 1_000_000, generator=generator) + 0.3 * torch.randn(1_000_000, generator=generator)
    exact = match_gradients(G.double(), KAPPA)
    single = match_gradients(G, KAPPA)
    assert single.dtype == torch.float32
    assert float((single.double() - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize("block_bytes", [1, 8 * 5 * 3, 8 * 5 * 1000])
def test_blocks_do_not_change_the_result(monkeypatch, block_bytes):
    G = torch.randn(5, 1000, generator=torch.Generator().manual_seed(8))
    expected_gram, expected = gram(G), match_gradients(G, KAPPA)
    monkeypatch.setitem(matching.BLOCK_BYTES, "cpu", block_bytes)
    torch.testing.assert_close(gram(G), expected_gram, rtol=1e-13, atol=1e-12)
    torch.testing.assert_close(match_gradients(G, KAPPA), expected)


def test_blocks_stay_within_their_bytes():
    rows = torch.zeros(50, 100_000).unbind(0)
    blocks = [(columns, block.numel() * 8) for columns, block in matching._blocks(rows)]
    assert max(size for _, size in blocks) <= matching.BLOCK_BYTES["cpu"]
    assert [columns.start for columns, _ in blocks[1:]] == [columns.stop for columns, _ in blocks[:-1]]
    assert blocks[-1][0].stop == 100_000


# --- forms of input ---------------------------------------------------------------------------------------------


def test_rows_list_and_views_are_the_same():
    G = torch.randn(4, 60, generator=torch.Generator().manual_seed(9), requires_grad=True)
    expected = match_gradients(G, KAPPA)
    assert not expected.requires_grad
    strided = torch.stack([G.detach(), G.detach()], dim=-1)[..., 0]
    for form in (list(G), tuple(G.unbind(0)), strided, G.detach()):
        assert torch.equal(match_gradients(form, KAPPA), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_result_keeps_the_dtype(dtype):
    d = match_gradients(vectors((1, 0), (-0.5, 1)).to(dtype), KAPPA)
    assert d.dtype == dtype
    assert_close(d.double(), 0.375, 0.5625)


def test_inputs_are_left_alone():
    G = torch.randn(3, 10, generator=torch.Generator().manual_seed(10))
    before = G.clone()
    match_gradients(G, KAPPA)
    assert torch.equal(G, before)


def test_weights_count_as_repetitions():
    g1, g2, g3 = torch.randn(3, 20, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    repeated = match_gradients([g1, g1, g1, g2, g2, g3], KAPPA)
    torch.testing.assert_close(match_gradients([g1, g2, g3], KAPPA, weights=[3, 2, 1]), repeated)
    shares = torch.tensor([1 / 2, 1 / 3, 1 / 6])
    torch.testing.assert_close(match_gradients([g1, g2, g3], KAPPA, weights=shares), repeated, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_agrees_with_host():
    G = torch.randn(10, 300_000, generator=torch.Generator().manual_seed(12))
    on_device = match_gradients(G.cuda(), KAPPA)
    assert on_device.is_cuda
    torch.testing.assert_close(on_device.cpu(), match_gradients(G, KAPPA), rtol=1e-5, atol=1e-6)


# --- parity solver ----------------------------------------------------------------------------------------------


def softmax_by_autograd(K: Tensor, kappa: float, options: SoftmaxSGD) -> Tensor:
    """Combination weights by torch's own SGD and StepLR on the smoothed objective."""
    T = len(K)
    K = K / (K.diagonal() + 1e-4).sqrt().mean() ** 2
    gbar_norm = (K.mean() + 1e-4).sqrt()

    def length(gamma: Tensor) -> Tensor:
        return (gamma @ K @ gamma + 1e-4).sqrt()

    logits = torch.zeros(T, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=options.lr, momentum=options.momentum)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, options.halve_every, 0.5)
    tried = []
    for _ in range(options.steps + 1):
        gamma = logits.softmax(0)
        objective = gamma @ K.mean(1) + kappa * gbar_norm * length(gamma)
        tried.append((objective.item(), gamma.detach()))
        optimizer.zero_grad()
        objective.backward()
        optimizer.step()
        schedule.step()
    gamma = min(tried, key=lambda pair: pair[0])[1]
    return 1 / T + gamma * kappa * gbar_norm / (length(gamma) + 1e-4)


@pytest.mark.parametrize("options", [SoftmaxSGD(), SoftmaxSGD(steps=25, momentum=0.1), SoftmaxSGD(lr=5, halve_every=7)])
def test_softmax_sgd_is_the_released_procedure(options):
    generator = torch.Generator().manual_seed(13)
    for T in (2, 5, 10):
        G = torch.randn(T, 40, generator=generator, dtype=torch.float64)
        found = solve_gram(gram(G), KAPPA, solver="softmax_sgd", sgd=options)
        torch.testing.assert_close(found.weights, softmax_by_autograd(gram(G), KAPPA, options), rtol=1e-7, atol=1e-9)
        assert found.iterations == options.steps


def dual_value(G: Tensor, gamma: Tensor) -> float:
    g_gamma, gbar = gamma @ G, G.mean(0)
    return float(g_gamma @ gbar + KAPPA * gbar.norm() * g_gamma.norm())


@FEW_OR_MANY
def test_softmax_sgd_is_within_one_percent_for_two_updates(times):
    generator = torch.Generator().manual_seed(14)
    for _ in range(100 * times):
        G = torch.randn(2, 30, generator=generator, dtype=torch.float64)
        parity = solve_gram(gram(G), KAPPA, solver="softmax_sgd")
        assert dual_value(G, parity.gamma) == pytest.approx(dual_value(G, solved(G).gamma), rel=0.01)


@pytest.mark.parametrize("rows", [((3, 4), (3, 4)), ((1, 0), (0, 1)), ((1, 0), (-0.5, 1)), ((10, 0), (-1, 1))])
def test_softmax_sgd_is_within_one_percent_of_the_closed_forms(rows):
    G = vectors(*rows)
    exact, parity = match_gradients(G, KAPPA), match_gradients(G, KAPPA, solver="softmax_sgd")
    assert float((parity - exact).norm() / exact.norm()) < 0.01


def test_softmax_sgd_reports_the_gap_it_leaves():
    G = torch.randn(50, 2000, generator=torch.Generator().manual_seed(15), dtype=torch.float64)
    parity, exact = solve_gram(gram(G), KAPPA, solver="softmax_sgd"), solved(G)
    assert exact.gap <= 1e-12 < parity.gap


def test_bad_softmax_options_are_refused():
    for options in ({"steps": 0}, {"halve_every": 0}, {"lr": 0.0}, {"lr": math.nan}, {"momentum": 1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            SoftmaxSGD(**options)


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 3])
def test_non_finite_updates_are_refused_by_number(bad, where):
    G = torch.ones(5, 70_000)
    G[where, 69_999] = bad
    with pytest.raises(ValueError, match=f"update {where} holds NaN or Inf"):
        match_gradients(G, KAPPA)
    with pytest.raises(ValueError, match=f"update {where} holds NaN or Inf"):
        pairwise_cosines(list(G))


def test_overflow_is_not_called_non_finite():
    with pytest.raises(ValueError, match="update 1 is too long"):
        match_gradients(vectors((1, 0), (1e200, 0)), KAPPA)


@pytest.mark.parametrize("kappa", [-0.01, 1.0, 1.5, math.nan, math.inf])
def test_kappa_outside_its_range_is_refused(kappa):
    for call in (match_gradients, solve_gram):
        with pytest.raises(ValueError, match=r"kappa must lie in \[0, 1\)"):
            call(torch.eye(2), kappa)


def test_unknown_options_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"scale must be one of \('none', '1\+k', '1\+k2'\), got 'k'"):
        match_gradients(torch.eye(2), KAPPA, "k")
    with pytest.raises(ValueError, match=r"solver must be one of \('exact', 'softmax_sgd'\), got 'qp'"):
        solve_gram(torch.eye(2), KAPPA, solver="qp")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "at least one"),
        (torch.ones(3), r"\(T, d\) or a list"),
        ([torch.ones(3), torch.ones(4)], "update 1 has 4 entries"),
        ([torch.ones(3), torch.ones(3).double()], "update 1 has 3 entries of torch.float64"),
        ([torch.ones(3), torch.ones(1, 3)], r"update 1 must be a real vector, got shape \(1, 3\)"),
        (torch.ones(2, 3, dtype=torch.int64), "update 0 must be a real vector"),
    ],
)
def test_updates_that_do_not_fit_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        match_gradients(bad, KAPPA)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.ones(2, 3), r"\(T, T\)"),
        (torch.ones(0, 0), r"\(T, T\)"),
        (torch.tensor([[1.0, 0.0], [0.0, math.nan]]), "row of update 1"),
        (torch.tensor([[1.0, 0.9], [0.0, 1.0]]), "symmetric"),
        (torch.tensor([[1.0, 0.0], [0.0, -1.0]]), "symmetric"),
    ],
)
def test_matrices_that_are_no_inner_products_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        solve_gram(bad, KAPPA)


@pytest.mark.parametrize("bad", [[1.0], [1.0, -1.0], [0.0, 0.0], [1.0, math.nan]])
def test_bad_weights_are_refused(bad):
    with pytest.raises(ValueError, match="weights must be 2 non-negative numbers"):
        match_gradients(torch.eye(2), KAPPA, weights=bad)


# --- angles -----------------------------------------------------------------------------------------------------


def test_mean_cosine_over_pairs():
    # cosines: (1, 2) 0, (1, 3) 1/sqrt 2, (2, 3) 1/sqrt 2; lengths must not matter, nor a zero update.
    G = vectors((5, 0), (0, 0.1), (3, 3), (0, 0))
    assert pairwise_cosines(G) == pytest.approx(math.sqrt(2) / 3)
    assert pairwise_cosines(vectors((1, 2), (-2, -4))) == pytest.approx(-1)
    assert math.isnan(pairwise_cosines(vectors((1, 2), (0, 0))))
