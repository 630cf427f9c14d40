"""The Triton kernels under Triton's interpreter, on the CPU, against PyTorch and closed forms. On a GPU they run in
tests/gpu/test_fused.py."""

from __future__ import annotations

import copy
import importlib
import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed import models
from everfed.core import optimizer
from everfed.core.layout import Entry, Layout
from everfed.core.optimizer import Optimizer
from everfed.core.random import Dropout, adopt_dropout
from everfed.core.replica import normalised_apart
from everfed.data import transforms
from everfed.methods.generative.inversion import batch_statistics
from everfed.models import convolution, fused
from tests.support.kernels import error, maps

pytest.importorskip("triton", reason="needs Triton: pip install triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1, or see tests/gpu/test_fused.py",
)


@pytest.mark.parametrize("small", [1024, 0])  # rows up to which one kernel does it all
@pytest.mark.parametrize(("slope", "residual", "twice"), [(0.0, False, True), (0.2, True, True), (0.0, True, False)])
@pytest.mark.parametrize(("shape", "sizes"), [((2, 16, 3, 5), [2]), ((3, 32, 5, 7), [3]), ((5, 32, 5, 7), [2, 3])])
def test_batchnorm_and_its_statistics(
    batchnorm, tiles, monkeypatch, shape, sizes, slope, residual, twice, small
) -> None:
    monkeypatch.setattr(batchnorm, "_SMALL", small)
    # several tiles to a program, and a last one that is not full
    monkeypatch.setattr(tiles, "sum_tiling", lambda *_: tiles.Tiling(2, 32, 16, 4))
    torch.manual_seed(0)
    norm, exact = nn.BatchNorm2d(shape[1]), nn.BatchNorm2d(shape[1]).double()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_()
    exact.load_state_dict(norm.state_dict())
    x, r, dy = 2 * maps(*shape) + 3, maps(*shape), maps(*shape)
    weight, bias = norm.weight.detach(), norm.bias.detach()
    running = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    counts = tiles.new_counts(x)
    how = (slope, counts, sizes)
    y, means, rstds = batchnorm.forward(x, r if residual else None, weight, bias, running, 0.1, 1e-5, *how)
    again = maps(*shape) if twice else None
    dx, dr, dw, db = batchnorm.backward(dy, again, x, y if residual else None, weight, bias, means, rstds, *how)
    x64, r64 = x.double().requires_grad_(), r.double().requires_grad_()
    normed = torch.cat([exact(own) for own in x64.split(sizes)])
    y64 = functional.leaky_relu(normed + r64 if residual else normed, slope)
    incoming = dy.double() if again is None else dy.double() + again.double()
    wanted = [x64, exact.weight, exact.bias, *([r64] if residual else [])]
    truth = [y64, *torch.autograd.grad(y64, wanted, incoming), exact.running_mean, exact.running_var]
    got = [y, dx, dw, db, *([dr] if residual else []), norm.running_mean, norm.running_var]
    assert all(error(a, b) < 2e-6 for a, b in zip(got, truth, strict=True))
    assert norm.num_batches_tracked == len(sizes) and not counts.any()


def test_a_channel_far_from_zero_keeps_its_variance(tiles, monkeypatch) -> None:
    """Sums of squares in float32 would be off by several per cent for a variance of 1 beside a mean of 1,000."""
    monkeypatch.setattr(tiles, "sum_tiling", lambda *_: tiles.Tiling(2, 64, 16, 4))
    torch.manual_seed(0)
    x = (torch.randn(4, 16, 9, 9) + 1_000).contiguous(memory_format=torch.channels_last)
    mean, variance = importlib.import_module("everfed.kernels.moments").moments(x, tiles.new_counts(x))
    variance64, mean64 = torch.var_mean(x.double(), dim=[0, 2, 3], correction=0)
    assert error(mean, mean64) < 1e-7 and error(variance, variance64) < 1e-5


@pytest.mark.parametrize(("slope", "residual"), [(0.0, False), (0.2, True), (1.0, False)])
def test_evaluation_and_the_statistics_of_its_input(on_gpu, slope: float, residual: bool) -> None:
    """The map, its gradient, and the gradients of mean and variance on the way of the layer's input."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(32, eps=0.01).eval().requires_grad_(False)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    norm.weight.uniform_(0.5, 1.5)
    norm.bias.normal_()
    exact = copy.deepcopy(norm).double()
    x, r, dy = maps(3, 32, 5, 7).requires_grad_(), maps(3, 32, 5, 7).requires_grad_(), maps(3, 32, 5, 7)
    x64, r64 = (t.detach().double().requires_grad_() for t in (x, r))
    with batch_statistics(norm) as seen:
        y = fused.batch_norm_act(x, norm, r if residual else None, slope)
    ((mean, variance),) = seen.seen
    normed = exact(x64) + (r64 if residual else 0.0)
    y64 = normed if slope == 1.0 else functional.leaky_relu(normed, slope)
    variance64, mean64 = torch.var_mean(x64, dim=[0, 2, 3], correction=0)
    weights = torch.randn(2, 32)
    loss = (y * dy).sum() + (mean * weights[0] + variance * weights[1]).sum()
    loss64 = (y64 * dy.double()).sum() + (mean64 * weights[0] + variance64 * weights[1]).sum()
    wanted, wanted64 = ([x, r], [x64, r64]) if residual else ([x], [x64])
    pairs = zip(torch.autograd.grad(loss, wanted), torch.autograd.grad(loss64, wanted64), strict=True)
    assert error(y, y64) < 2e-6 and error(mean, mean64) < 2e-6 and error(variance, variance64) < 2e-6
    assert all(error(got, truth) < 2e-6 for got, truth in pairs)


@pytest.mark.parametrize("small", [1024, 0])
@pytest.mark.parametrize("shape", [(1, 16, 2, 2), (1, 48, 1, 33), (2, 80, 1, 1), (1, 16, 37, 29)])
def test_batchnorm_of_odd_shapes(on_gpu, batchnorm, monkeypatch, shape: tuple[int, ...], small: int) -> None:
    """Four values to a channel, rows one beyond a block, channels that are no multiple of 32, an expanded gradient."""
    monkeypatch.setattr(batchnorm, "_SMALL", small)
    torch.manual_seed(0)
    norm, exact = nn.BatchNorm2d(shape[1]), nn.BatchNorm2d(shape[1]).double()
    x = maps(*shape).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    assert fused._fusable(x, norm, None)
    y, y64 = fused.batch_norm_act(x, norm, slope=0.1), functional.leaky_relu(exact(x64), 0.1)
    got = [y, *torch.autograd.grad(y.square().sum(), [x, norm.weight, norm.bias], retain_graph=True)]
    want = [y64, *torch.autograd.grad(y64.square().sum(), [x64, exact.weight, exact.bias], retain_graph=True)]
    assert all((a.double() - b).norm() < 2e-5 * (1 + b.norm()) for a, b in zip(got, want, strict=True))
    pairs = (torch.autograd.grad(y.sum(), norm.bias)[0], torch.autograd.grad(y64.sum(), exact.bias)[0])
    assert error(*pairs) < 1e-6


def test_minibatches_kept_apart_and_differentiated_twice(on_gpu, batchnorm, monkeypatch) -> None:
    """The gradient, by kernels, and that of its square, by PyTorch's operations: both of each minibatch by itself."""
    monkeypatch.setattr(batchnorm, "_SMALL", 0)
    torch.manual_seed(0)
    norm, exact = nn.BatchNorm2d(16), nn.BatchNorm2d(16).double()
    x = maps(5, 16, 3, 3).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    with normalised_apart([2, 3]):
        y = fused.batch_norm_act(x, norm)
    y64 = torch.cat([functional.relu(exact(own)) for own in x64.split([2, 3])])
    weight = maps(5, 16, 3, 3)
    (plain,) = torch.autograd.grad((y * weight).sum(), x, retain_graph=True)
    (twice,) = torch.autograd.grad((y * weight).sum(), x, create_graph=True)
    (truth,) = torch.autograd.grad((y64 * weight.double()).sum(), x64, create_graph=True)
    assert error(plain, truth) < 5e-6 and error(twice, truth) < 5e-6
    (again,), (again64,) = (torch.autograd.grad(g.square().sum(), t) for g, t in ((twice, x), (truth, x64)))
    assert error(again, again64) < 5e-5


def test_what_pytorch_refuses_is_refused(on_gpu) -> None:
    """One value of a channel has no variance; other channels than the layer's would be read behind its end."""
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fused.batch_norm_act(maps(1, 16, 1, 1), nn.BatchNorm2d(16))
    with normalised_apart([2, 1]), pytest.raises(ValueError, match="more than 1 value per channel"):
        fused.batch_norm_act(maps(3, 16, 1, 1), nn.BatchNorm2d(16))
    with pytest.raises(RuntimeError):
        fused.batch_norm_act(maps(4, 32, 2, 2), nn.BatchNorm2d(16))
    assert fused.batch_norm_act(maps(1, 16, 1, 1), nn.BatchNorm2d(16).eval()).shape == (1, 16, 1, 1)


@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "residual"])
def test_second_derivatives_where_some_inputs_have_no_gradient(on_gpu, frozen: str) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(16)
    inputs = {"x": maps(2, 16, 3, 3), "weight": norm.weight, "bias": norm.bias, "residual": maps(2, 16, 3, 3)}
    for name, tensor in inputs.items():
        tensor.requires_grad_(name != frozen)
    wanted = [tensor for name, tensor in inputs.items() if name != frozen]
    found = []
    for fuse in (True, False):
        normed = fused.batch_norm_act(inputs["x"], norm, inputs["residual"]) if fuse else None
        y = fused._composed(norm(inputs["x"]), inputs["residual"], 0.0) if normed is None else normed
        first = torch.autograd.grad(y.square().sum(), wanted, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), wanted))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(*found, strict=True))


def test_second_derivatives_of_pooling_with_a_frozen_bias(on_gpu) -> None:
    layer = nn.Conv2d(16, 16, 3).to(memory_format=torch.channels_last)
    layer.bias.requires_grad_(False)
    x = maps(2, 16, 6, 6)
    found = []
    for y in (fused.conv_relu_pool(x, layer), fused._pooled(layer(x), False)):
        (first,) = torch.autograd.grad(y.square().sum(), layer.weight, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), layer.weight)[0])
    assert torch.allclose(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("shape", [(3, 16, 6, 8), (2, 32, 7, 5), (3, 10, 6, 4), (2, 37, 5, 4)])
def test_bias_relu_and_pooling(tiles, shape, flat) -> None:
    """Small whole numbers, so that equal elements of a window, zeros and an odd last row and column are all there."""
    pooling = importlib.import_module("everfed.kernels.pooling")
    torch.manual_seed(0)
    x = torch.randint(-3, 4, shape).float().contiguous(memory_format=torch.channels_last).requires_grad_()
    bias = torch.randint(-2, 3, shape[1:2]).float().requires_grad_()
    want = functional.max_pool2d(functional.relu(x + bias.view(1, -1, 1, 1)), 2)
    want = want.flatten(1) if flat else want
    dy = torch.randint(-3, 4, want.shape).float()
    got = pooling.forward(x.detach(), bias.detach(), flat)
    assert torch.equal(got, want)
    gradients = pooling.backward(dy, x.detach(), bias.detach(), flat, tiles.new_counts(x))
    pairs = zip(gradients, torch.autograd.grad(want, [x, bias], dy), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


SIZES = (5000, 3, 16)  # more than one block, and starts that are no multiple of anything
KINDS = (torch.bfloat16, torch.float32, torch.bfloat16)


def sgd_update() -> Any:
    kernel = importlib.import_module("everfed.kernels.sgd")
    entries = tuple(Entry(str(i), (size,), (1,), sum(SIZES[:i]), size) for i, size in enumerate(SIZES))
    return kernel.Update(Layout(entries, (), (), sum(SIZES)), torch.device("cpu"))


def whole_numbers() -> tuple[Tensor, ...]:
    return tuple(torch.randint(-8, 9, (size,)).to(kind) for size, kind in zip(SIZES, KINDS, strict=True))


def joined(gradients: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([gradient.float() for gradient in gradients])


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_sgd_of_gradients_of_mixed_types(momentum: float) -> None:
    """p - rate (g + decay p), with momentum p - rate (momentum v + g + decay p), in numbers that float32 holds."""
    torch.manual_seed(0)
    gradients = whole_numbers()
    params, velocity = torch.randint(-8, 9, (2, sum(SIZES))).float()
    moved = momentum * velocity + joined(gradients) + 0.25 * params
    want = params - 0.5 * moved
    low = torch.zeros_like(params, dtype=torch.bfloat16)
    sgd_update()([gradients], params, low, velocity if momentum else None, torch.tensor(0.5), 0.25, momentum)
    assert torch.equal(params, want) and torch.equal(low.float(), want)
    assert not momentum or torch.equal(velocity, moved)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])  # of the norm
def test_sgd_of_two_passes_without_what_conflicts(sign: float, kind: torch.dtype) -> None:
    """g = a + b, r = +-2 g but for one number; |r|^2 is given as 4 |<g, r>|: the coefficient is -1/4 on conflict,
    0 otherwise, and all numbers are exact."""
    torch.manual_seed(0)
    first, second = whole_numbers(), whole_numbers()
    g = joined(first) + joined(second)
    reference = 2 * sign * g
    reference[-1] += 1.0
    product = g.double() @ reference.double()
    params, rate = torch.randint(-8, 9, (sum(SIZES),)).float(), torch.tensor(0.5)
    want = params - 0.5 * (g if sign > 0 else g + 0.25 * reference)
    sgd_update()([first, second], params, None, None, rate, 0.0, 0.0, (reference, (4 * product.abs()).to(kind)))
    assert torch.equal(params, want)


def test_an_infinite_norm_removes_nothing_and_a_nan_shows() -> None:
    torch.manual_seed(0)
    gradients, params = whole_numbers(), torch.zeros(sum(SIZES))
    reference, rate = -joined(gradients), torch.tensor(1.0)
    sgd_update()([gradients], params, None, None, rate, 0.0, 0.0, (reference, torch.tensor(torch.inf)))
    assert torch.equal(params, reference)
    gradients[2][5] = torch.nan
    sgd_update()([gradients], params, None, None, rate, 0.0, 0.0, (reference, torch.tensor(1.0)))
    assert params.isnan().all()


@pytest.mark.parametrize("sums", [1024, 2])  # blocks up to which every program adds up their products
def test_products_are_added_up_before_or_inside_the_update(sums: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """g is 1 in the first 5,000 places, else 0; r is 1, but v in the 904 of the second block. v = -3: <g, r> is
    4096 - 2712 > 0; v = -5: 4096 - 4520 = -424, so with |r|^2 = 848 half of r is added."""
    monkeypatch.setattr(importlib.import_module("everfed.kernels.sgd"), "SUMS", sums)
    gradients = tuple(torch.zeros(size, dtype=kind) for size, kind in zip(SIZES, KINDS, strict=True))
    gradients[0].fill_(1.0)
    for value, coefficient in ((-3.0, 0.0), (-5.0, -0.5)):
        reference = torch.ones(sum(SIZES))
        reference[4096:5000] = value
        params = torch.zeros(sum(SIZES))
        conflict = (reference, torch.tensor(848.0))
        sgd_update()([gradients], params, None, None, torch.tensor(1.0), 0.0, 0.0, conflict)
        assert torch.equal(params, -(joined(gradients) - coefficient * reference))


ROWS = (
    (torch.uint8, (1, 5, 5)),  # 25 bytes: no whole words
    (torch.uint8, (3, 32, 32)),
    (torch.int64, ()),
    (torch.float32, (10,)),
    (torch.bfloat16, (1,)),
)


@pytest.mark.parametrize("chosen", [(0, 2, 3), (1, 2), (4,), (3, 4, 0)])
def test_rows_of_several_tensors(chosen: tuple[int, ...]) -> None:
    """Against index_select and index_copy_: every third row, the last one first, of a tensor of ten."""
    kernel = importlib.import_module("everfed.kernels.rows")
    torch.manual_seed(0)
    kinds = [ROWS[number] for number in chosen]
    tensors = [torch.randint(0, 100, (10, *shape)).to(kind) for kind, shape in kinds]
    index = torch.tensor([9, 6, 3, 0])
    found = kernel.gather(tensors, index)
    assert all(torch.equal(ours, tensor.index_select(0, index)) for ours, tensor in zip(found, tensors, strict=True))
    values = [torch.randint(100, 200, (4, *shape)).to(kind) for kind, shape in kinds]
    want = [tensor.index_copy(0, index, value) for tensor, value in zip(tensors, values, strict=True)]
    kernel.scatter(tensors, index, values)
    assert all(torch.equal(*pair) for pair in zip(tensors, want, strict=True))


def test_places_outside_of_the_tensors_are_zeros_and_are_not_written() -> None:
    kernel = importlib.import_module("everfed.kernels.rows")
    around = torch.arange(50, dtype=torch.int32).view(10, 5)
    inner, index = around[2:8], torch.tensor([5, 6, -1, 0])
    (found,) = kernel.gather([inner], index)
    assert torch.equal(
        found, torch.stack([around[7], torch.zeros_like(around[0]), torch.zeros_like(around[0]), around[2]])
    )
    want = around.clone()
    want[7], want[2] = 100, 103
    kernel.scatter([inner], index, [torch.arange(100, 104, dtype=torch.int32)[:, None].expand(4, 5).contiguous()])
    assert torch.equal(around, want)


def test_which_tensors_have_rows_for_the_kernel() -> None:
    kernel = importlib.import_module("everfed.kernels.rows")
    assert kernel.fits(torch.zeros(3, 4)) and not kernel.fits(torch.zeros(4, 3).t())
    assert not kernel.fits(torch.zeros(0, 4)) and not kernel.fits(torch.zeros(3, 4, requires_grad=True))


@pytest.mark.parametrize("p", [0.25, 0.5])
def test_pooling_leaves_out_channels(tiles, p: float) -> None:
    """Of an image, not of all of them; at p itself a channel stays. A channel that is not finite shows even so."""
    pooling = importlib.import_module("everfed.kernels.pooling")
    torch.manual_seed(0)
    x = maps(3, 20, 4, 6).requires_grad_()
    bias = torch.randn(20, requires_grad=True)
    noise = torch.rand(3, 20)
    noise[0, :3] = p
    keep = (noise >= p)[..., None, None]
    assert keep[0, :3].all() and 0 < keep.sum() < keep.numel()
    want = functional.max_pool2d(functional.relu((x + bias.view(1, -1, 1, 1)) * keep / (1 - p)), 2)
    dy = torch.randn_like(want)
    assert torch.allclose(pooling.forward(x.detach(), bias.detach(), False, noise, p), want, rtol=1e-6)
    gradients = pooling.backward(dy, x.detach(), bias.detach(), False, tiles.new_counts(x), noise, p)
    pairs = zip(gradients, torch.autograd.grad(want, [x, bias], dy), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)
    broken = x.detach().clone(memory_format=torch.channels_last).fill_(math.nan)
    assert pooling.forward(broken, bias.detach(), False, torch.zeros(3, 20), p).isnan().all()


def small_cnn(precision: torch.dtype, side: int = 28) -> nn.Module:
    torch.manual_seed(0)
    module = models.build("small-cnn", (1, side, side), 10, 0, {}, channels_last=True)
    adopt_dropout(module, torch.Generator())
    return module.to(precision)


def step_of(module: nn.Module, x: Tensor, wanted: list[Tensor] | None = None, **how: bool) -> list[Tensor]:
    """Outputs and the gradients of a loss, with the same numbers for dropout every time."""
    adopt_dropout(module, torch.Generator().manual_seed(1))
    y = module(x)
    loss = functional.cross_entropy(y, torch.arange(len(x)) % 10)
    return [y, *torch.autograd.grad(loss, wanted or list(module.parameters()), **how)]


@pytest.mark.parametrize(("training", "count", "side"), [(True, 3, 28), (True, 37, 8), (False, 2, 28)])
def test_a_small_network_as_a_whole(on_gpu, monkeypatch, training: bool, count: int, side: int) -> None:
    """Every layer by kernels: two convolutions with pooling, dropout of channels and of units, two dense layers. 37:
    more than one tile of samples, and the last one is not full."""
    module, exact = (small_cnn(precision, side).train(training) for precision in (torch.float32, torch.float64))
    x = torch.randn(count, 1, side, side)
    refused = pytest.fail  # no layer is to be called
    for layer in module.children():
        for name in ("forward", "_conv_forward"):
            monkeypatch.setattr(layer, name, lambda *_: refused("a layer was computed by PyTorch"), raising=False)
    got = step_of(module, x)
    monkeypatch.setattr(Tensor, "is_cuda", False)
    pairs = zip(got, step_of(exact, x.double()), strict=True)
    assert all(error(a, b) < 2e-6 for a, b in pairs)


def test_a_gradient_of_a_small_networks_gradient(on_gpu, monkeypatch) -> None:
    found = []
    for kernels, precision in ((True, torch.float32), (False, torch.float64)):
        monkeypatch.setattr(Tensor, "is_cuda", kernels)
        module = small_cnn(precision)
        weights = [module.conv1.weight, module.conv2.weight, module.dense.weight, module.head.weight]
        _, *first = step_of(module, torch.ones(2, 1, 28, 28, dtype=precision).tril(), weights, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), weights))
    assert all(error(a, b) < 1e-4 for a, b in zip(*found, strict=True))


def test_a_gradient_by_functions_takes_layers(on_gpu) -> None:
    """torch.func has the weights as tensors of its own, which no kernel can read, though x is a plain one."""
    first, drop, second, x = nn.Linear(6, 5), Dropout(0.0), nn.Linear(5, 3), torch.randn(4, 6)

    def loss(weight: Tensor) -> Tensor:
        with torch.nn.utils.stateless._reparametrize_module(first, {"weight": weight}):
            return fused.dense_relu_dense(x, first, drop, second).square().sum()

    (want,) = torch.autograd.grad(second(functional.relu(first(x))).square().sum(), first.weight)
    assert torch.allclose(torch.func.grad(loss)(first.weight.detach()), want, rtol=1e-5)


def test_small_images_are_convolved_with_padding(on_gpu, monkeypatch) -> None:
    x = torch.randn(2, 1, 8, 8, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    (_, got), module = step_of(small_cnn(torch.float32, 8), x, [x]), small_cnn(torch.float64, 8)
    monkeypatch.setattr(Tensor, "is_cuda", False)
    assert error(got, step_of(module, x64, [x64])[1]) < 2e-6


@pytest.mark.parametrize("change", ["hook", "drop everything", "many samples", "float64", "x", "weight", "wide"])
def test_which_dense_layers_have_no_kernel(on_gpu, monkeypatch, change: str) -> None:
    """These are computed by their layers, and give what layers give."""
    monkeypatch.setattr(fused, "_Dense", None)
    hidden = 200 if change == "wide" else 5
    first, drop, second = nn.Linear(6, hidden), Dropout(0.5), nn.Linear(hidden, 3)
    drop.generator, x = torch.Generator(), torch.randn(300 if change == "many samples" else 4, 6)
    seen: list[Tensor] = []
    if change == "hook":
        second.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    if change == "drop everything":
        drop.p = 1.0
    if change == "float64":
        first, second, x = first.double(), second.double(), x.double()
    if change == "x":  # not contiguous
        x = x.T.contiguous().T
    if change == "weight":
        first.weight.data = first.weight.data.T.contiguous().T
    drop.generator.manual_seed(0)
    y = fused.dense_relu_dense(x, first, drop, second)
    assert len(seen) == (change == "hook")
    drop.generator.manual_seed(0)
    assert torch.equal(y, second(drop(functional.relu(first(x)))))


@pytest.mark.parametrize("noise", [False, True])
def test_dense_layers_at_their_largest(noise: bool) -> None:
    dense = importlib.import_module("everfed.kernels.dense")
    first, second = nn.Linear(70, 64), nn.Linear(64, 64)
    x, dy, p = torch.randn(33, 70), torch.randn(33, 64), 0.25
    assert dense.fits(x, first, second) and not dense.fits(x, nn.Linear(70, 65), nn.Linear(65, 64))
    assert not dense.fits(x, first, nn.Linear(64, 65)) and not dense.fits(torch.randn(257, 70), first, second)
    numbers = torch.rand(33, 64) if noise else None
    inputs = [t.detach().double().requires_grad_() for t in (x, *first.parameters(), *second.parameters())]
    x64, w, b, v, c = inputs
    want = functional.linear(fused._kept(functional.relu(functional.linear(x64, w, b)), numbers, p), v, c)
    weights = [t.detach() for t in (*first.parameters(), *second.parameters())]
    hidden, y = dense.forward(x, *weights, numbers, p)
    got = [y, *dense.backward(dy, x, hidden, weights[0], weights[2], numbers, p)]
    truth = [want, *torch.autograd.grad(want, inputs, dy.double())]
    assert all(error(a, b) < 2e-6 for a, b in zip(got, truth, strict=True))


def test_dropout_of_single_elements_is_left_to_the_layer(on_gpu, monkeypatch) -> None:
    """The pooling kernel knows whole channels only."""
    monkeypatch.setattr(fused, "_Pooled", None)
    layer, drop, x = nn.Conv2d(1, 10, 3).to(memory_format=torch.channels_last), Dropout(0.5), torch.randn(2, 1, 8, 8)
    drop.generator = torch.Generator().manual_seed(0)
    got = fused.conv_relu_pool(x, layer, drop=drop)
    drop.generator.manual_seed(0)
    want = functional.max_pool2d(functional.relu(drop(layer(x))), 2)
    assert torch.allclose(got, want, atol=1e-6)


def test_under_autocast_weights_of_float32_are_left_to_pytorch(on_gpu, monkeypatch) -> None:
    """It would compute in bfloat16."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda *_: torch.bfloat16)
    for owner, name in ((convolution, "_Convolved"), (fused, "_Dense")):
        monkeypatch.setattr(owner, name, None)
    x = torch.randn(2, 1, 8, 8)
    fused.conv_relu_pool(x, nn.Conv2d(1, 10, 3))
    fused.dense_relu_dense(x.flatten(1), nn.Linear(64, 5), Dropout(0.0), nn.Linear(5, 3))


@pytest.mark.parametrize("shape", [(5, 3), (32, 10)])
def test_cross_entropy_and_its_gradient(shape: tuple[int, int]) -> None:
    """Also with a target that does not count and logits that are left out."""
    kernel = importlib.import_module("everfed.kernels.loss")
    torch.manual_seed(0)
    logits, y = 10 * torch.randn(shape), torch.randint(0, shape[1] - 1, shape[:1])
    logits[:, -1], y[1] = -torch.inf, kernel.IGNORED
    logits64 = logits.double().requires_grad_()
    want = functional.cross_entropy(logits64, y)
    loss, gradient = kernel.cross_entropy(logits, y)
    assert error(loss, want) < 1e-6 and error(gradient, torch.autograd.grad(want, logits64)[0]) < 1e-6
    assert kernel.fits(logits) and not kernel.fits(torch.zeros(300, 100)) and not kernel.fits(torch.zeros(2, 3, 4))


@pytest.mark.parametrize("target", [3, -1])
def test_a_target_that_is_no_class_makes_the_loss_not_a_number(target: int) -> None:
    """PyTorch raises on a CPU and ends the process's work on a GPU; a finite loss would hide it."""
    kernel = importlib.import_module("everfed.kernels.loss")
    loss, _ = kernel.cross_entropy(torch.zeros(2, 3), torch.tensor([0, target]))
    assert loss.isnan()
    assert kernel.cross_entropy(torch.zeros(1, 3), torch.tensor([2]))[0].item() == pytest.approx(math.log(3))


@pytest.mark.parametrize("kind", ["adam", "adamw"])
@pytest.mark.parametrize("size", [1, 1024, 2500])
def test_adam_in_one_kernel(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps against PyTorch's operations in float64; the first has the largest correction of its moments."""
    monkeypatch.setattr(optimizer, "kernel", importlib.import_module("everfed.kernels.adam"))
    torch.manual_seed(0)
    how = Optimizer(kind, lr=0.01, weight_decay=0.1, beta2=0.99)
    params = torch.randn(size)
    exact, state = params.double(), how.init(params)
    state64, rate = how.init(exact), torch.tensor(0.01)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    for _ in range(4):
        gradient = torch.randn(size)
        assert how._has_kernel(params, gradient, state, rate)
        assert not how._has_kernel(exact, gradient.double(), state64, rate)
        how.apply(params, gradient, state, rate)
        how.apply(exact, gradient.double(), state64, rate)
        for got, truth in ((params, exact), (state["m"], state64["m"]), (state["v"], state64["v"])):
            assert error(got, truth) < 1e-6
    assert state["t"].item() == 4


def test_which_steps_of_adam_have_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "kernel", importlib.import_module("everfed.kernels.adam"))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    params, rate = torch.randn(4), torch.tensor(0.1)
    state = Optimizer("adam").init(params)
    assert Optimizer("adam")._has_kernel(params, params, state, rate)
    assert not Optimizer("adam", beta1=0.0)._has_kernel(params, params, state, rate)  # its logarithm is taken
    assert not Optimizer("adam")._has_kernel(params, params, state, torch.ones(4))  # groups have rates of their own
    assert not Optimizer("adam")._has_kernel(params, torch.randn(8)[::2], state, rate)


@pytest.mark.parametrize("shape", [(5, 3, 32, 32), (3, 1, 28, 28), (1, 4, 8, 10), (2, 3, 40, 36)])
def test_images_cut_out_mirrored_and_scaled(shape: tuple[int, ...]) -> None:
    """Against PyTorch's operations; the draws lie in a wider table, as in a captured step."""
    kernels = importlib.import_module("everfed.kernels.images")
    torch.manual_seed(0)
    x = torch.randint(0, 256, shape, dtype=torch.uint8)
    table = torch.randint(0, 2 * transforms.PAD + 1, (shape[0], 7))
    table[:, 4] = torch.arange(shape[0]) % 2
    draws = table[:, 2:5]
    assert torch.equal(kernels.crop_and_flip(x, draws, transforms.PAD), transforms.crop_and_flip(x, draws))
    for mean, std in (((), ()), ((0.5, 0.4, 0.3, 0.2), (0.2, 0.3, 0.25, 1.0)), ((0.5,) * 4, (0.25,) * 4)):
        constants = mean[: shape[1]], std[: shape[1]]
        got, truth = kernels.scale(x, *constants), transforms.scale(x, *constants)
        assert got.dtype == torch.float32 and (got - truth).abs().max() < 1e-6


def test_which_images_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = importlib.import_module("everfed.kernels.images")
    x = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    assert not kernels.fits(x)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    assert kernels.fits(x)
    assert not any(kernels.fits(other) for other in (x.float(), x[0], x[:0], x.transpose(2, 3)))
    inside: list[bool] = []
    torch.func.vmap(lambda one: inside.append(kernels.fits(one)) or one.float())(x[None])
    assert inside == [False]
