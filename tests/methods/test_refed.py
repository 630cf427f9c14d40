"""Re-Fed's scores against closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from everfed.method import Optimizer, TrainOptions
from everfed.methods.common.per_sample import Network
from everfed.methods.replay.refed import ReFed, importance, informative_step, most_important, proximity
from everfed.methods.replay.sample_gradients import sample_gradient_norms
from tests.support.toy import Bench

CENTRES = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0], [0.5, 0.5]], dtype=torch.float64)
START = torch.zeros(2, dtype=torch.float64)


def norms(v: Tensor, rows: np.ndarray) -> Tensor:
    """Of the losses ||v - c_i||^2 / 2, whose gradients are v - c_i."""
    return (v - CENTRES[rows]).norm(dim=1)


def gradient(v: Tensor, rows: np.ndarray) -> Tensor:
    return (v - CENTRES[rows]).mean(dim=0)


def batches(size: int) -> list[np.ndarray]:
    return np.split(np.arange(4), range(size, 4, size))


def test_one_pass_ranks_by_the_gradient_norms_of_the_start() -> None:
    scores = importance(START, norms, gradient, batches(2), learning_rate=0.5, passes=1)
    np.testing.assert_allclose(scores, CENTRES.norm(dim=1).numpy(), rtol=1e-15)
    assert most_important(scores, 2).tolist() == [1, 2]


def test_passes_are_weighted_by_their_inverse_number() -> None:
    """Full batch, lambda = 1/2: v_1 = eta * mean, v_2 = v_1 - eta ((v_1 - mean) + v_1 / 2)."""
    mean, eta = CENTRES.mean(dim=0), 0.4
    v1 = eta * mean
    v2 = v1 - eta * ((v1 - mean) + 0.5 * v1)
    expected = sum((v - CENTRES).norm(dim=1) / p for p, v in enumerate((START, v1, v2), start=1))
    scores = importance(START, norms, gradient, batches(4), learning_rate=eta, passes=3, informative=0.5)
    np.testing.assert_allclose(scores, expected.numpy(), rtol=1e-12)
    squared = importance(START, norms, gradient, batches(4), learning_rate=eta, passes=1, power=2)
    np.testing.assert_allclose(squared, (CENTRES**2).sum(dim=1).numpy(), rtol=1e-12)


def test_minibatches_step_one_after_the_other() -> None:
    eta, q = 0.4, proximity(0.5)
    v = START
    for rows in batches(2):
        v = v - eta * (gradient(v, rows) + q * (v - START))
    expected = norms(START, np.arange(4)) + norms(v, np.arange(4)) / 2
    scores = importance(START, norms, gradient, batches(2), learning_rate=eta, passes=2)
    np.testing.assert_allclose(scores, expected.numpy(), rtol=1e-12)


def test_scoring_as_batches_come_uses_the_moving_model() -> None:
    eta = 0.4
    moved = informative_step(START, START, gradient(START, np.array([0, 1])), eta, 0.5)
    scores = importance(START, norms, gradient, batches(2), learning_rate=eta, passes=1, exact=False)
    np.testing.assert_allclose(scores[:2], norms(START, np.array([0, 1])).numpy(), rtol=1e-12)
    np.testing.assert_allclose(scores[2:], norms(moved, np.array([2, 3])).numpy(), rtol=1e-12)


def test_scores_of_one_pass_do_not_depend_on_the_batch_size() -> None:
    by_size = [importance(START, norms, gradient, batches(b), learning_rate=0.4, passes=1) for b in (1, 2, 3, 4)]
    assert all((scores == by_size[0]).all() for scores in by_size)


def test_fixed_point_solves_the_penalised_problem() -> None:
    """mean gradient + q (v - w) = 0 at v = (mean + q w) / (1 + q)."""
    w, q, v = torch.tensor([5.0, -1.0], dtype=torch.float64), proximity(0.2), START
    for _ in range(500):
        v = informative_step(v, w, gradient(v, np.arange(4)), 0.1, q)
    torch.testing.assert_close(v, (CENTRES.mean(dim=0) + q * w) / (1 + q), rtol=1e-10, atol=1e-10)


def test_lambda_moves_the_model_between_global_and_local() -> None:
    def distance(informative: float) -> float:
        v = START
        for _ in range(200):
            v = informative_step(v, START, gradient(v, np.arange(4)), 0.01, proximity(informative))
        return float(v.norm())

    distances = [distance(lam) for lam in (0.006, 0.1, 0.5, 0.9, 0.999999)]
    assert distances == sorted(distances) and distances[0] < 0.05
    plain = START
    for _ in range(200):
        plain = plain - 0.01 * gradient(plain, np.arange(4))
    assert distances[-1] == pytest.approx(float(plain.norm()), rel=1e-4)


@pytest.mark.parametrize("informative", [0.0, 1.0, -0.5, 2.0])
def test_lambda_outside_is_refused(informative: float) -> None:
    with pytest.raises(ValueError, match="informative must be"):
        ReFed(informative=informative)


def test_power_is_one_or_two() -> None:
    with pytest.raises(ValueError, match="power"):
        ReFed(power=3)


def test_a_sample_without_gradient_scores_zero_and_comes_last() -> None:
    def with_zero(v: Tensor, rows: np.ndarray) -> Tensor:
        return norms(v, rows) * torch.from_numpy((rows != 2).astype(np.float64))

    scores = importance(START, with_zero, gradient, batches(3), learning_rate=0.1)
    assert scores[2] == 0 and (np.delete(scores, 2) > 0).all()
    assert 2 not in most_important(scores, 3)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 3), max_size=12), st.integers(0, 15))
def test_most_important_is_a_stable_top(scores: list[int], m: int) -> None:
    kept = most_important(np.array(scores, dtype=float), m)
    expected = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:m]
    assert kept.tolist() == sorted(expected)


def test_the_informative_model_moves_at_the_rate_with_which_a_task_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a schedule that decays to 0 it would stay at the global model, whatever lambda is."""
    used = []

    def spied(*arguments: Any, learning_rate: float, **options: Any) -> np.ndarray:
        used.append(learning_rate)
        return importance(*arguments, learning_rate=learning_rate, **options)

    monkeypatch.setattr("everfed.methods.replay.refed.importance", spied)
    falling = TrainOptions(1, 8, Optimizer(lr=0.2, schedule="linear"))
    options = {"memory": {"size": 5, "policy": {"kind": "re-fed"}}}
    Bench("er", options, train=falling).run()
    assert used and set(used) == {0.2}


def test_a_pull_that_diverges_is_refused() -> None:
    """eta q = 0.1 (1 - 0.02) / 0.04 = 2.45."""
    options = {"memory": {"size": 5, "policy": {"kind": "re-fed", "informative": 0.02}}}
    with pytest.raises(RuntimeError, match=r"informative = 0\.02: .* must exceed 0\.0243902, or lower train"):
        Bench("er", options, train=TrainOptions(1, 8, Optimizer(lr=0.1))).run()


def test_everything_fits_or_nothing_does() -> None:
    scores = np.array([0.3, 0.1])
    assert most_important(scores, 5).tolist() == [0, 1]
    assert most_important(scores, 0).tolist() == []


def test_linear_classifier_closed_form_and_nothing_is_touched() -> None:
    """G_p = ||p - y|| sqrt(||x||^2 + 1) for a linear model with bias under cross-entropy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 4)).double().train()
    x, y = torch.randn(10, 3, dtype=torch.float64), torch.randint(4, (10,))
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def unflatten(v: Tensor) -> dict[str, Tensor]:
        return {"1.weight": v[:12].view(4, 3), "1.bias": v[12:]}

    def model_norms(v: Tensor, rows: np.ndarray) -> Tensor:
        network = Network(model, unflatten(v), buffers, nn.functional.cross_entropy)
        return sample_gradient_norms(network, x[rows], y[rows])

    flat = torch.cat([value.detach().flatten() for value in params.values()])
    start = flat.clone()
    scores = importance(
        flat, model_norms, lambda v, rows: torch.ones_like(v), [np.arange(6), np.arange(6, 10)], learning_rate=0.1
    )
    shown = x / np.sqrt(1 + 1e-5)  # running mean 0, running variance 1
    expected, v = np.zeros(10), start
    for p in range(1, 6):
        weights = unflatten(v)
        errors = (shown @ weights["1.weight"].T + weights["1.bias"]).softmax(dim=1) - nn.functional.one_hot(y, 4)
        expected += (errors.norm(dim=1) * ((shown**2).sum(dim=1) + 1).sqrt()).numpy() / p
        for _ in range(2):
            v = v - 0.1 * (1 + proximity(0.5) * (v - start))
    np.testing.assert_allclose(scores, expected, rtol=1e-10)
    assert model.training and torch.equal(flat, start)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
