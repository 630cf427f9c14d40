"""BatchNorm with a residual sum and ReLU as one operation: the same function as PyTorch's layers, on every device.

The kernels run here under Triton's interpreter where Triton is installed (TRITON_INTERPRET=1), and for real in
tests/gpu/test_fused.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed.core.random import Dropout
from everfed.models.fused import batch_norm_act, channel_moments, conv_relu_pool, dense_relu_dense


def layer(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_()
    return norm


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("slope", "act"), [(0.0, functional.relu), (0.2, None), (1.0, nn.Identity())])
def test_it_is_the_layers_one_after_the_other(slope: float, act, training: bool) -> None:
    torch.manual_seed(0)
    norm, twin = layer(16), layer(16)
    twin.load_state_dict(norm.state_dict())
    x, residual = torch.randn(2, 4, 16, 5, 5).unbind()
    act = act or (lambda v: functional.leaky_relu(v, slope))
    got = batch_norm_act(x, norm.train(training), residual, slope)
    assert torch.equal(got, act(twin.train(training)(x) + residual))
    assert all(torch.equal(a, b) for a, b in zip(norm.buffers(), twin.buffers(), strict=True))


def test_hooks_on_the_layer_see_its_input() -> None:
    norm, seen = layer(16), []
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.randn(2, 16, 3, 3)
    batch_norm_act(x, norm)
    assert len(seen) == 1 and seen[0] is x


def test_moments_are_those_of_the_channels() -> None:
    x = torch.arange(24.0).view(2, 3, 2, 2).requires_grad_()
    again, mean, variance = channel_moments(x, layer(3))
    assert again is x
    own: Tensor = x.detach().transpose(0, 1).flatten(1)
    assert torch.allclose(mean, own.mean(1)) and torch.allclose(variance, own.var(1, correction=0))
    (gradient,) = torch.autograd.grad(variance.sum(), x)
    assert torch.allclose(gradient, 2 * (x - mean.view(1, 3, 1, 1)) / 8)


@pytest.mark.parametrize("flat", [False, True])
def test_pooling_before_or_after_relu_has_the_same_bits(flat: bool) -> None:
    """Small whole numbers, so that windows have equal elements, and zeros beside negative ones."""
    convolution = nn.Conv2d(1, 3, 1)
    convolution.weight.data, convolution.bias.data = torch.randint(-2, 3, (3, 1, 1, 1)).float(), torch.zeros(3)
    x = torch.randint(-2, 3, (4, 1, 7, 6)).float().requires_grad_()
    want = functional.max_pool2d(functional.relu(convolution(x)), 2)
    want = want.flatten(1) if flat else want
    got, dy = conv_relu_pool(x, convolution, flat), torch.randn_like(want)
    leaves = [x, convolution.weight, convolution.bias]
    assert torch.equal(got, want)
    pairs = zip(torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, leaves, dy), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_dropout_between_layers_draws_what_the_layer_would() -> None:
    """One row of numbers for both, in the order of the layers."""
    convolution, first, second = nn.Conv2d(1, 4, 3), nn.Linear(36, 5), nn.Linear(5, 2)
    of_channels, of_units = Dropout(0.5, channels=True), Dropout(0.5)
    x = torch.randn(6, 1, 8, 8)
    of_channels.generator = of_units.generator = torch.Generator().manual_seed(3)
    features = conv_relu_pool(x, convolution, flat=True, drop=of_channels)
    got = dense_relu_dense(features, first, of_units, second)
    of_units.generator.manual_seed(3)
    pooled = functional.max_pool2d(functional.relu(of_channels(convolution(x))), 2)
    assert torch.equal(got, second(of_units(functional.relu(first(pooled.flatten(1))))))
    assert (features.view(6, 4, -1) == 0).all(2).any() and not (features == 0).all()
