"""Convolutions by Triton kernels under Triton's interpreter, on the CPU, against PyTorch. On a GPU they run in
tests/gpu/test_convolutions.py."""

from __future__ import annotations

import importlib
import os

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed.models import convolution
from everfed.models.resnet import BasicBlock
from tests.support.kernels import error, maps

pytest.importorskip("triton", reason="needs Triton: pip install triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1, or see tests/gpu/test_convolutions.py",
)
many, thin = (importlib.import_module(f"everfed.kernels.{name}") for name in ("convolution", "thin"))


def gradients(layer: nn.Conv2d, x: Tensor) -> tuple[Tensor, ...]:
    """(output, dy, the input's gradient, the weights'), in float64, for some dy."""
    x64 = x.double().requires_grad_()
    want = layer(x64)
    dy = torch.randn_like(want).contiguous(memory_format=torch.channels_last)
    return want, dy, *torch.autograd.grad(want, [x64, layer.weight], dy)


# inputs, outputs, side, stride, padding
WINDOWS = [
    (64, 64, 3, 1, 1),
    (64, 128, 3, 1, 0),
    (128, 64, 3, 2, 1),
    (64, 64, 3, 2, 0),
    (64, 128, 1, 2, 0),
    (64, 64, 1, 1, 0),
]


@pytest.mark.parametrize(("inputs", "outputs", "side", "stride", "padding"), WINDOWS)
@pytest.mark.parametrize(("images", "size"), [(3, (9, 11)), (3, (8, 8)), (1, (3, 5))])
def test_a_convolution_of_many_channels(
    monkeypatch, inputs: int, outputs: int, side: int, stride: int, padding: int, images: int, size: tuple[int, int]
) -> None:
    """Its output and both gradients. 3 images of 8 x 8: three tiles that are full, where the size is kept; 3 x 5: less
    than one."""
    torch.manual_seed(0)
    layer = nn.Conv2d(inputs, outputs, side, stride, padding, bias=False).double().to(memory_format=torch.channels_last)
    assert many.fits(layer)
    x, weight, how = maps(images, inputs, *size), layer.weight.detach().float(), (layer.padding, layer.stride)
    want, dy, dx64, dw64 = gradients(layer, x)
    y, dx = many.forward(x, weight, *how), many.input_gradient(dy.float(), x, weight, *how)
    assert error(y, want) < 2e-6 and error(dx, dx64) < 2e-6
    for parts in (1, 2, 5):
        monkeypatch.setattr(many, "parts_of", lambda *_, parts=parts: parts)
        dw = many.weights_gradient(dy.float(), x, weight, *how)
        assert error(dw, dw64) < 2e-6 and dw.stride() == weight.stride()
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in (y, dx))


def test_large_tiles_are_for_outputs_that_have_many() -> None:
    small, large = many.product_tiling(8192, 128), many.product_tiling(128 * 256, 128)
    assert small.height < large.height and small.width == large.width == 128
    assert many.product_tiling(8192, 64).width == many.product_tiling(8192, 192).width == 64
    assert [many.parts_of(*of) for of in ((32768, 3), (512, 192), (5, 1), (128, 1))] == [22, 1, 1, 2]


def test_which_convolutions_have_many_channels() -> None:
    assert many.fits(nn.Conv2d(64, 128, 3, 2, 1)) and many.fits(nn.Conv2d(64, 128, 1, 2))
    assert not any(
        many.fits(layer)
        for layer in (
            nn.Conv2d(3, 64, 3, 1, 1),
            nn.Conv2d(64, 100, 3, 1, 1),
            nn.Conv2d(64, 64, 5, 1, 1),
            nn.Conv2d(64, 64, (3, 1), 1, 0),
            nn.Conv2d(64, 64, 3, 3, 1),
            nn.Conv2d(64, 64, 3, (1, 2), 1),
            nn.Conv2d(64, 64, 3, 1, 2),
            nn.Conv2d(64, 64, 1, 1, 1),  # a padding that the window does not reach over
            nn.Conv2d(64, 64, 3, padding="same"),
            nn.Conv2d(64, 64, 3, 1, 1, dilation=2),
            nn.Conv2d(128, 128, 3, 1, 1, groups=2),
            nn.Conv2d(64, 64, 3, 1, 1, padding_mode="reflect"),
        )
    )


def test_a_residual_block_as_a_whole(on_gpu, monkeypatch) -> None:
    """Three convolutions of many channels in half precision; none is computed by PyTorch."""
    torch.manual_seed(0)
    exact = BasicBlock(64, 128, 2).double().to(memory_format=torch.channels_last)
    block = BasicBlock(64, 128, 2).to(memory_format=torch.channels_last)
    block.load_state_dict(exact.state_dict())
    for layer in block.modules():
        if isinstance(layer, nn.Conv2d):
            layer.half()
            monkeypatch.setattr(layer, "_conv_forward", lambda *_: pytest.fail("a layer was computed by PyTorch"))
    x = maps(4, 64, 8, 8).half().requires_grad_()
    x64 = x.detach().double().requires_grad_()
    y, _ = block((x, x))
    got = [y, *torch.autograd.grad(y.float().square().sum(), [x, *block.parameters()])]
    monkeypatch.setattr(Tensor, "is_cuda", False)
    y64, _ = exact((x64, x64))
    truth = [y64, *torch.autograd.grad(y64.square().sum(), [x64, *exact.parameters()])]
    assert all(error(a, b) < 0.02 for a, b in zip(got, truth, strict=True))


class Doubled(nn.Conv2d):
    """Not what its base class computes."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "change",
    ["hook", "bias", "float32", "mixed", "order", "weights' order", "another GPU", "autocast", "subclass", "large"],
)
def test_which_layers_are_left_to_pytorch(on_gpu, monkeypatch, change: str) -> None:
    kind = torch.float32 if change == "float32" else torch.float16
    padding = int(change != "large")  # its output is smaller than its input
    layer = (Doubled if change == "subclass" else nn.Conv2d)(64, 64, 3, 1, padding, bias=change == "bias").to(kind)
    if change != "weights' order":
        layer.to(memory_format=torch.channels_last)
    x, seen = maps(2, 64, 4, 4).to(kind), []
    with torch.no_grad():
        want = layer(x)
    if change == "hook":
        layer.register_forward_hook(lambda *_: seen.append(1))
    if change == "order":
        x = x.contiguous()
    if change == "another GPU":
        monkeypatch.setattr(convolution, "_is_hopper", lambda _: False)
    if change == "large":
        monkeypatch.setattr(convolution, "_MOST", x.numel())
    if change == "mixed":  # under autocast PyTorch casts x, which kernels do not
        monkeypatch.setattr(layer, "_conv_forward", lambda x, *_: functional.conv2d(x.half(), layer.weight, None, 1, 1))
        x = x.float()
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: True)
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda *_: torch.float16)
    if change == "autocast":
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: True)
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda *_: torch.bfloat16)
    monkeypatch.setattr(convolution, "_Convolved", None)
    assert torch.allclose(convolution.convolve(x, layer), want, atol=2e-3) and len(seen) == (change == "hook")


def test_a_gradient_of_a_gradient(on_gpu, monkeypatch) -> None:
    """By kernels first, and again by what PyTorch can differentiate."""
    torch.manual_seed(0)
    layer, found = nn.Conv2d(64, 64, 3, 2, 1, bias=False).to(memory_format=torch.channels_last), []
    x = maps(2, 64, 4, 4)
    for kernels, precision in ((True, torch.float16), (False, torch.float64)):
        monkeypatch.setattr(Tensor, "is_cuda", kernels)
        weight, inputs = layer.weight.detach().to(precision).requires_grad_(), x.to(precision).requires_grad_()
        with torch.nn.utils.stateless._reparametrize_module(layer, {"weight": weight}):
            loss = convolution.convolve(inputs, layer).square().mean()
        first = torch.autograd.grad(loss, [inputs, weight], create_graph=True)
        found.append(torch.autograd.grad(sum(g.float().square().sum() for g in first), [inputs, weight]))
    assert all(error(a, b) < 0.02 for a, b in zip(*found, strict=True))


def test_a_gradient_by_functions_takes_the_layer(on_gpu) -> None:
    """torch.func has the weights as tensors of its own, which no kernel can read; and it refuses autograd's functions
    also where it looks at others."""
    layer, x = nn.Conv2d(64, 64, 1, bias=False).half().to(memory_format=torch.channels_last), maps(2, 64, 3, 3).half()

    def loss(weight: Tensor) -> Tensor:
        with torch.nn.utils.stateless._reparametrize_module(layer, {"weight": weight}):
            return convolution.convolve(x, layer).float().square().sum()

    (want,) = torch.autograd.grad(functional.conv2d(x, layer.weight).float().square().sum(), layer.weight)
    assert torch.allclose(torch.func.grad(loss)(layer.weight.detach()), want, rtol=1e-2, atol=0.1)
    head = torch.randn(64)
    of_head = torch.func.grad(lambda head: (convolution.convolve(x, layer).float().mean((0, 2, 3)) * head).sum())(head)
    assert torch.allclose(of_head, functional.conv2d(x, layer.weight).float().mean((0, 2, 3)), atol=1e-3)


def test_a_compiled_layer_is_the_compilers(monkeypatch) -> None:
    for name, value in (("thin", thin), ("many", many), ("_is_hopper", lambda _: True), ("_Convolved", None)):
        monkeypatch.setattr(convolution, name, value)
    layer, x = nn.Conv2d(64, 64, 1, bias=False).half().to(memory_format=torch.channels_last), maps(2, 64, 3, 3).half()
    compiled = torch.compile(lambda x: convolution.unbiased(x, layer), backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x), layer(x), atol=1e-3)


def test_weights_of_another_shape_than_the_layers_are_pytorchs(on_gpu) -> None:
    """96 outputs are no multiple of 64, whatever the layer says."""
    layer, x = nn.Conv2d(64, 128, 3, bias=False).half().to(memory_format=torch.channels_last), maps(2, 64, 5, 5).half()
    weight = torch.randn(96, 64, 3, 3).half().contiguous(memory_format=torch.channels_last)
    with torch.nn.utils.stateless._reparametrize_module(layer, {"weight": weight}):
        got = convolution.convolve(x, layer)
    assert torch.allclose(got, functional.conv2d(x, weight), atol=0.1)


def test_what_pytorch_refuses_is_refused(on_gpu) -> None:
    layer = nn.Conv2d(3, 16, 3, bias=False).bfloat16()
    for images in (torch.zeros(2, 1, 5, 5), torch.zeros(2, 3, 2, 2)):  # of one colour; smaller than the window
        with pytest.raises(RuntimeError):
            convolution.convolve(images.bfloat16(), layer)
    assert convolution.convolve(torch.zeros(0, 3, 5, 5).bfloat16(), layer).shape == (0, 16, 3, 3)
    many = nn.Conv2d(64, 64, 3, bias=False).half().to(memory_format=torch.channels_last)
    for images in (maps(2, 128, 5, 5), maps(2, 64, 2, 2)):
        with pytest.raises(RuntimeError):
            convolution.convolve(images.half(), many)
    assert convolution.convolve(maps(0, 64, 5, 5).half(), many).shape == (0, 64, 3, 3)


def test_the_size_of_an_output_counts_its_padding_and_stride() -> None:
    """A window of 3 with a padding of 8: 1,014 x 1,014 positions of 1,000 x 1,000, times 64 channels of 33 images."""
    x = torch.empty(33, 3, 1000, 1000, device="meta")
    assert x.numel() * 64 > 2**31 and convolution._outputs(x, nn.Conv2d(3, 64, 3, padding=8)) == 33 * 64 * 1014**2
    assert convolution._outputs(x, nn.Conv2d(3, 64, 3, 2, padding=8)) == 33 * 64 * 507**2
    assert convolution._outputs(x[:, :, :2], nn.Conv2d(3, 64, 3)) == 0


@pytest.mark.parametrize(
    ("inputs", "outputs", "side", "padding"), [(10, 20, 5, 0), (3, 9, 3, 2), (20, 8, 4, 1), (9, 12, 1, 0)]
)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_of_few_channels(inputs: int, outputs: int, side: int, padding: int, order) -> None:
    """Its output and both gradients; channels that are no power of two; a window that is larger than its padding, and
    one place only."""
    torch.manual_seed(0)
    layer = nn.Conv2d(inputs, outputs, side, padding=padding, bias=False).double().to(memory_format=order)
    assert thin.fits_narrow(layer)
    x = torch.randn(2, inputs, 9, 11).contiguous(memory_format=order)
    x64 = x.double().requires_grad_()
    want = layer(x64)
    dy = torch.randn_like(want).contiguous(memory_format=torch.channels_last)
    dx64, dw64 = torch.autograd.grad(want, [x64, layer.weight], dy)
    weight = layer.weight.detach().float()
    got = thin.forward(x, weight, layer.padding)
    dx = thin.input_gradient(dy.float(), x, weight, layer.padding)
    dw = thin.weights_gradient(dy.float(), x, weight, layer.padding)
    assert error(got, want) < 2e-6 and error(dx, dx64) < 2e-6 and error(dw, dw64) < 2e-6
    assert dx.shape == x.shape and dw.stride() == weight.stride()


def test_which_convolutions_have_few_channels() -> None:
    assert thin.fits_narrow(nn.Conv2d(1, 10, 5)) and thin.fits_narrow(nn.Conv2d(10, 20, 5))
    assert not any(
        thin.fits_narrow(layer)
        for layer in (
            nn.Conv2d(3, 32, 5),
            nn.Conv2d(32, 10, 3),
            nn.Conv2d(7, 10, 5),  # few inputs, many taps
            nn.Conv2d(10, 7, 5),
            nn.Conv2d(10, 20, 9),
            nn.Conv2d(10, 20, 5, stride=2),
            nn.Conv2d(10, 20, 5, groups=2),
        )
    )


@pytest.mark.parametrize(("inputs", "outputs", "side", "padding"), [(1, 32, 5, 2), (3, 16, 3, 0)])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_of_few_inputs(inputs: int, outputs: int, side: int, padding: int, order) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(inputs, outputs, side, padding=padding, bias=False).double().to(memory_format=order)
    assert thin.fits(layer)
    x = torch.randn(2, inputs, 9, 11).contiguous(memory_format=order)
    want = layer(x.double())
    dy = torch.randn_like(want).contiguous(memory_format=torch.channels_last)
    (gradient,) = torch.autograd.grad(want, layer.weight, dy)
    weight = layer.weight.detach().float()
    got = thin.forward(x, weight, layer.padding)
    dw = thin.weights_gradient(dy.float(), x, weight, layer.padding)
    assert got.is_contiguous(memory_format=torch.channels_last) and dw.stride() == weight.stride()
    assert error(got, want) < 2e-6 and error(dw, gradient) < 2e-6


def test_which_convolutions_have_few_inputs() -> None:
    assert not any(
        thin.fits(layer)
        for layer in (
            nn.Conv2d(3, 32, 5),  # 75 taps
            nn.Conv2d(1, 20, 5),
            nn.Conv2d(1, 32, 5, stride=2),
            nn.Conv2d(1, 32, 5, padding="same"),
            nn.Conv2d(1, 32, 3, dilation=2),
            nn.Conv2d(2, 32, 3, groups=2),
            nn.Conv2d(1, 32, 3, padding=1, padding_mode="reflect"),
        )
    )
