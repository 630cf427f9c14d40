"""Convolutions by Triton kernels on a GPU, against PyTorch's in float64 and in the same precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed import models
from everfed.models import convolution
from tests.support.kernels import error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or convolution.thin is None, reason="needs a CUDA device and Triton"
    ),
]
# inputs, outputs, pixels, side, stride: those of ResNet-18 at 32 pixels
LAYERS = [
    (64, 64, 32, 3, 1),
    (128, 128, 16, 3, 1),
    (256, 256, 8, 3, 1),
    (512, 512, 4, 3, 1),
    (64, 128, 32, 3, 2),
    (256, 512, 8, 3, 2),
    (64, 128, 32, 1, 2),
    (192, 64, 9, 3, 2),
]


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:  # asked here: it starts CUDA, which collecting tests must not
        pytest.skip("needs a Hopper GPU")


@pytest.mark.parametrize("images", [32, 7, 128])
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs", "pixels", "side", "stride"), LAYERS)
def test_a_convolution_of_many_channels(
    hopper,
    monkeypatch,
    inputs: int,
    outputs: int,
    pixels: int,
    side: int,
    stride: int,
    images: int,
    precision: torch.dtype,
) -> None:
    """Its output and both gradients are as near to float64's as cuDNN's, and repeat bit for bit."""
    torch.manual_seed(0)
    order = torch.channels_last
    layer = nn.Conv2d(inputs, outputs, side, stride, side // 2, bias=False).cuda().to(precision).to(memory_format=order)
    exact = copy.deepcopy(layer).double()
    x = torch.randn(images, inputs, pixels, pixels, device="cuda").to(precision).to(memory_format=order)
    dy = torch.randn_like(exact(x.double())).to(precision).to(memory_format=order)

    def step(network: nn.Conv2d, x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = convolution.convolve(x, network)
        return [y, *torch.autograd.grad(y, [x, network.weight], dy.to(y.dtype))]

    assert convolution._kernels(x, layer) is convolution.many
    ours, again = step(layer, x), step(layer, x)
    monkeypatch.setattr(convolution, "many", None)
    theirs, truth = step(layer, x), step(exact, x.double())
    for got, repeated, plain, want in zip(ours, again, theirs, truth, strict=True):
        assert torch.equal(got, repeated) and got.is_contiguous(memory_format=order)
        assert error(got, want) < 1.1 * error(plain, want) + 1e-6


def test_resnet18_as_a_whole(hopper, monkeypatch) -> None:
    """A step of it is as near to float64's as with cuDNN."""
    torch.manual_seed(0)
    module = models.build("resnet18", (3, 32, 32), 10, 0, {}, channels_last=True).cuda()
    exact = copy.deepcopy(module).double()
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.bfloat16()
    x, y = torch.randn(32, 3, 32, 32, device="cuda").bfloat16(), torch.arange(32, device="cuda") % 10

    def step(network: nn.Module, images: Tensor) -> list[Tensor]:
        out = network(images)
        return [out, *torch.autograd.grad(functional.cross_entropy(out.double(), y), list(network.parameters()))]

    ours = step(module, x)
    monkeypatch.setattr(convolution, "many", None)
    theirs, truth = step(module, x), step(exact, x.double())
    for got, plain, want in zip(ours, theirs, truth, strict=True):
        assert error(got, want) < 1.5 * error(plain, want) + 1e-3


@pytest.mark.parametrize("inputs", [1, 3])
def test_a_convolution_of_few_inputs(inputs: int) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(inputs, 64, 3, padding=1, bias=False).cuda().bfloat16()
    exact = nn.Conv2d(inputs, 64, 3, padding=1, bias=False).cuda().double()
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(32, inputs, 32, 32, device="cuda").bfloat16()
    y, y64 = convolution.convolve(x, layer), exact(x.double())
    dy = torch.randn_like(y64).bfloat16()
    (got,), (truth,) = torch.autograd.grad(y, layer.weight, dy), torch.autograd.grad(y64, exact.weight, dy.double())
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert error(y, y64) < 4e-3 and error(got, truth) < 4e-3
