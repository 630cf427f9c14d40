"""Losses that invert a classifier (MFCL, Babakniya et al., 2023, Eq. 5; after ABD, Smith et al., 2021)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from everfed.methods.generative.inversion import (
    batch_statistics,
    content,
    diversity,
    gaussian,
    negative_entropy,
    normal_divergences,
    only,
    roughness,
    smoothing,
)


def kl(mean: float, variance: float, other_mean: float, other_variance: float) -> float:
    return normal_divergences(*(torch.tensor([v]) for v in (mean, variance, other_mean, other_variance))).item()


def at(*probabilities: float, rows: int = 3) -> Tensor:
    """Logits of images that are all predicted with these probabilities."""
    return torch.tensor([probabilities]).log().expand(rows, -1)


# BatchNorm statistics ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("seen", "expected"), [((0.0, 1.0), 0.0), ((1.0, 1.0), 0.5), ((0.0, 4.0), 0.318147), ((0.0, 0.25), 0.806853)]
)
def test_the_divergence_of_normals_has_its_closed_form(seen: tuple[float, float], expected: float) -> None:
    assert kl(0.0, 1.0, *seen) == pytest.approx(expected, abs=1e-6)


def test_the_divergence_is_not_symmetric() -> None:
    assert kl(0.0, 1.0, 0.0, 4.0) != pytest.approx(kl(0.0, 4.0, 0.0, 1.0), abs=0.1)


@given(st.floats(-3, 3), st.floats(1e-3, 9), st.floats(-3, 3), st.floats(1e-3, 9))
def test_the_divergence_is_never_negative(mean: float, variance: float, other: float, other_variance: float) -> None:
    assert kl(mean, variance, other, other_variance) >= -1e-6


def test_statistics_are_those_of_what_a_layer_is_given_in_eval_mode() -> None:
    norm = nn.BatchNorm2d(2).eval()
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    x = torch.tensor([0.0, 2.0]).reshape(2, 1, 1, 1).expand(2, 2, 3, 3) + torch.tensor([0.0, 1.0]).reshape(1, 2, 1, 1)
    with batch_statistics(norm) as statistics:
        norm(x)
    mean, variance = statistics.seen[0]
    assert mean.tolist() == [1.0, 2.0]
    assert variance.tolist() == [1.0, 1.0]  # biased
    assert statistics.divergence().item() == pytest.approx((0.5 + 2.0) / 2)  # KL(N(0,1) || N(m,1)) = m^2 / 2
    assert all(torch.equal(before[name], tensor) for name, tensor in norm.state_dict().items())


def test_every_layer_counts_alike_however_wide_it_is() -> None:
    """The mean over layers of their own means, and a layer that stores nothing is left out."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False), nn.BatchNorm1d(2), nn.BatchNorm1d(7)]
    network = nn.Sequential(*norms[:3], nn.Linear(2, 7), norms[3]).eval()
    for norm in (norms[0], norms[2], norms[3]):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    with batch_statistics(network) as statistics:
        network(torch.randn(9, 2))
    by_layer = [
        normal_divergences(layer.running_mean, layer.running_var, *seen).mean()
        for layer, seen in zip((norms[0], norms[2], norms[3]), statistics.seen, strict=True)
    ]
    assert statistics.divergence().item() == pytest.approx(torch.stack(by_layer).mean().item(), rel=1e-6)


def test_no_hook_stays_behind() -> None:
    norm = nn.BatchNorm2d(2).eval()
    with pytest.raises(ValueError, match="expected 4D"), batch_statistics(norm):
        norm(torch.zeros(2, 2))
    assert not norm._forward_pre_hooks


# diversity -----------------------------------------------------------------------------------------------------------
def test_diversity_is_0_when_uniform_and_1_when_peaked() -> None:
    assert diversity(at(0.25, 0.25, 0.25, 0.25)).item() == pytest.approx(0.0, abs=1e-6)
    assert diversity(torch.tensor([[100.0, 0.0, 0.0]] * 4)).item() == pytest.approx(1.0, abs=1e-6)


def test_diversity_is_of_the_mean_prediction() -> None:
    one_each = torch.tensor([[100.0, 0.0], [0.0, 100.0]])
    assert diversity(one_each).item() == pytest.approx(0.0, abs=1e-6)


def test_one_class_has_no_diversity_to_lose() -> None:
    outputs = torch.randn(3, 1, requires_grad=True)
    value = diversity(outputs)
    (gradient,) = torch.autograd.grad(value, outputs)
    assert value.item() == 0.0
    assert torch.equal(gradient, torch.zeros(3, 1))


def test_the_papers_form_differs_by_a_factor_and_a_constant() -> None:
    outputs, q = torch.randn(6, 5), 5
    assert negative_entropy(outputs).item() == pytest.approx((diversity(outputs).item() - 1) * math.log(q) / q)
    assert negative_entropy(at(0.5, 0.5)).item() == pytest.approx(-math.log(2) / 2)


def test_classes_that_do_not_compete_change_nothing() -> None:
    outputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    masked = only(outputs, torch.tensor([True, False, True, True, False]))
    kept = outputs[:, [0, 2, 3]]
    for loss in (diversity, negative_entropy):
        assert loss(masked).item() == pytest.approx(loss(kept).item(), abs=1e-6)
        (gradient,) = torch.autograd.grad(loss(masked), outputs, retain_graph=True)
        assert gradient.isfinite().all()
        assert not gradient[:, [1, 4]].any()
    labels = torch.tensor([0, 2, 3, 0, 2, 3])
    sliced = content(kept, torch.tensor([0, 1, 2, 0, 1, 2]))
    assert content(masked, labels).item() == pytest.approx(sliced.item(), abs=1e-6)


def test_minimising_it_from_a_peaked_start_makes_predictions_more_even() -> None:
    outputs = torch.tensor([[3.0, 0.0, 0.0]] * 4, requires_grad=True)
    values = []
    for _ in range(30):
        value = diversity(outputs)
        (gradient,) = torch.autograd.grad(value, outputs)
        outputs = (outputs - 2.0 * gradient).detach().requires_grad_()
        values.append(value.item())
    assert all(later < earlier for earlier, later in itertools.pairwise(values))


# content -------------------------------------------------------------------------------------------------------------
def test_a_high_temperature_makes_the_content_term_nearly_inert() -> None:
    outputs = 10 * torch.randn(8, 10, generator=torch.Generator().manual_seed(1))
    outputs.requires_grad_()
    loss = content(outputs, outputs.argmax(1), 1000.0)
    (gradient,) = torch.autograd.grad(loss * 8, outputs)
    assert loss.item() == pytest.approx(math.log(10), abs=0.03)
    assert gradient.abs().max().item() == pytest.approx(0.9e-3, abs=0.1e-3)


# prior ---------------------------------------------------------------------------------------------------------------
def test_the_kernel_is_the_one_of_the_authors_code() -> None:
    weights = gaussian()
    assert sum(weights) == pytest.approx(1.0)
    row = [round(weights[2] * w, 6) for w in weights]
    assert row == [0.033918, 0.071804, 0.092198, 0.071804, 0.033918]


def test_smoothing_is_a_convolution_with_reflected_borders() -> None:
    images = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kernel = torch.tensor(gaussian(), dtype=torch.float64)
    kernel = torch.outer(kernel, kernel).expand(3, 1, 5, 5)
    padded = nn.functional.pad(images, (2, 2, 2, 2), mode="reflect")
    expected = nn.functional.conv2d(padded, kernel, groups=3)
    smoother = smoothing(9).double()
    assert torch.allclose(smoother @ images @ smoother.T, expected, atol=1e-6)


def test_a_constant_image_is_smooth_and_a_checkerboard_is_not() -> None:
    smoother = smoothing(32)
    assert roughness(torch.full((2, 3, 32, 32), 0.7), smoother).item() < 1e-12
    squares = torch.ones(32, 32)
    squares[::2, 1::2] = squares[1::2, ::2] = -1.0
    assert roughness(squares.expand(1, 1, 32, 32), smoother).item() == pytest.approx(0.994156, abs=1e-6)
