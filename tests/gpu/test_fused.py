"""The Triton kernels of `everfed.models.fused` against PyTorch's layers in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from everfed.models import fused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or fused.kernels is None, reason="needs a CUDA device and Triton"),
]

# (images, channels, height, width): few rows and many, rows that fill no block, the shapes of ResNet-18 at 32 pixels
SHAPES = [(2, 16, 3, 5), (5, 64, 29, 31), (32, 64, 32, 32), (32, 128, 16, 16), (32, 256, 8, 8), (20, 512, 4, 4)]
# relative errors: a few roundings of the type, and of sums over up to 32,768 rows in float32
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 4e-3}


def normed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype).to(memory_format=torch.channels_last)


def layers(channels: int) -> tuple[nn.BatchNorm2d, nn.BatchNorm2d]:
    """A layer, and the same in float64."""
    norm = nn.BatchNorm2d(channels).cuda()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_()
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    exact = nn.BatchNorm2d(channels).cuda().double()
    exact.load_state_dict(norm.state_dict())
    return norm, exact


def error(got: Tensor, truth: Tensor) -> float:
    return ((got.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_training_forward_backward_and_statistics(shape, slope, residual, dtype) -> None:
    torch.manual_seed(0)
    norm, exact = layers(shape[1])
    x, r, dy = (
        (2 * normed(shape, dtype) + 3).requires_grad_(),
        normed(shape, dtype).requires_grad_(),
        normed(shape, dtype),
    )
    x64, r64 = x.detach().double().requires_grad_(), r.detach().double().requires_grad_()
    assert fused._fusable(x, norm, r)
    y = fused.batch_norm_act(x, norm, r if residual else None, slope)
    y64 = fused._composed(exact(x64), r64 if residual else None, slope)
    ours = [x, norm.weight, norm.bias, *([r] if residual else [])]
    true = [x64, exact.weight, exact.bias, *([r64] if residual else [])]
    grads, grads64 = torch.autograd.grad(y, ours, dy), torch.autograd.grad(y64, true, dy.double())
    assert y.dtype == dtype and grads[0].dtype == dtype and grads[1].dtype == torch.float32
    assert y.is_contiguous(memory_format=torch.channels_last)
    for got, truth in zip([y, *grads], [y64, *grads64], strict=True):
        assert error(got, truth) < TOLERANCE[dtype]
    assert error(norm.running_mean, exact.running_mean) < 1e-6 and error(norm.running_var, exact.running_var) < 1e-6
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:4])
def test_evaluation_with_constant_parameters(shape, residual, dtype) -> None:
    torch.manual_seed(0)
    norm, exact = (layer.eval().requires_grad_(False) for layer in layers(shape[1]))
    x, r, dy = (normed(shape, dtype).requires_grad_() for _ in range(3))
    x64, r64 = x.detach().double().requires_grad_(), r.detach().double().requires_grad_()
    y = fused.batch_norm_act(x, norm, r if residual else None)
    y64 = fused._composed(exact(x64), r64 if residual else None, 0.0)
    wanted, wanted64 = ([x, r], [x64, r64]) if residual else ([x], [x64])
    pairs = zip(torch.autograd.grad(y, wanted, dy), torch.autograd.grad(y64, wanted64, dy.double()), strict=True)
    assert error(y, y64) < TOLERANCE[dtype]
    # an output that rounds to 0 may count as positive on one side only
    assert all(error(got, truth) < 2 * TOLERANCE[dtype] for got, truth in pairs)


@pytest.mark.parametrize("shape", SHAPES)
def test_moments(shape) -> None:
    torch.manual_seed(0)
    x = (normed(shape, torch.float32) + 5).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    mean, variance = fused.channel_moments(x)
    variance64, mean64 = torch.var_mean(x64, dim=[0, 2, 3], correction=0)
    assert error(mean, mean64) < 1e-6 and error(variance, variance64) < 1e-5
    weights = torch.randn(2, shape[1], device="cuda")
    (got,) = torch.autograd.grad((mean * weights[0] + variance * weights[1]).sum(), x)
    (truth,) = torch.autograd.grad((mean64 * weights[0].double() + variance64 * weights[1].double()).sum(), x64)
    assert error(got, truth) < 1e-5


def test_the_gradient_can_be_differentiated_again() -> None:
    torch.manual_seed(0)
    norm, exact = layers(16)
    x = normed((4, 16, 6, 6), torch.float32).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    found = []
    for inputs, out in ((x, fused.batch_norm_act(x, norm)), (x64, fused._composed(exact(x64), None, 0.0))):
        (gradient,) = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), inputs)[0])
    assert error(*found) < 1e-4


def test_results_repeat_bit_for_bit() -> None:
    torch.manual_seed(0)
    norm, _ = layers(64)
    x, dy = normed((32, 64, 32, 32), torch.bfloat16).requires_grad_(), normed((32, 64, 32, 32), torch.bfloat16)
    first, second = (
        torch.autograd.grad(fused.batch_norm_act(x, norm), [x, norm.weight, norm.bias], dy) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
