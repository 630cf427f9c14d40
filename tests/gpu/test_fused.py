"""The Triton kernels of `everfed.models.fused` and of SGD's step against PyTorch's own operations in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from everfed import models
from everfed.core import data as rows_of
from everfed.core import replica as replicas
from everfed.core import stream as loss
from everfed.core.context import Setup, TrainOptions
from everfed.core.layout import Layout
from everfed.core.optimizer import Optimizer
from everfed.core.random import adopt_dropout
from everfed.core.replica import Replica, squared_norm
from everfed.data import transforms
from everfed.engines import captured_steps
from everfed.engines.eager import Eager
from everfed.engines.graphs import Graphs
from everfed.kernels import load_kernels
from everfed.models import convolution, fused
from everfed.store.clients import ClientStore
from tests.support.kernels import error
from tests.support.toy import Bench, Norm, Normed, Toy

sgd_kernel = load_kernels("everfed.kernels.sgd")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or fused.batchnorm is None, reason="needs a CUDA device and Triton"
    ),
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
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_two_uses_are_added(shape, residual, dtype) -> None:
    torch.manual_seed(0)
    norm, exact = layers(shape[1])
    x, r = (2 * normed(shape, dtype) + 3).requires_grad_(), normed(shape, dtype).requires_grad_()
    first, second = normed(shape, dtype), normed(shape, dtype)
    x64, r64 = x.detach().double().requires_grad_(), r.detach().double().requires_grad_()
    both = fused.batch_norm_act_twice(x, norm, r if residual else None)
    y64 = fused._composed(exact(x64), r64 if residual else None, 0.0)
    ours, true = ([x, r], [x64, r64]) if residual else ([x], [x64])
    got = torch.autograd.grad(both, [*ours, norm.weight, norm.bias], (first, second), retain_graph=True)
    truth = torch.autograd.grad(y64, [*true, exact.weight, exact.bias], first.double() + second.double())
    assert torch.equal(*both)
    assert all(error(a, b) < TOLERANCE[dtype] for a, b in zip(got, truth, strict=True))
    (alone,) = torch.autograd.grad(both[1], x, second)
    assert torch.equal(alone, torch.autograd.grad(fused.batch_norm_act(x, norm, r if residual else None), x, second)[0])


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
    again, mean, variance = fused.channel_moments(x, nn.BatchNorm2d(shape[1]))
    variance64, mean64 = torch.var_mean(x64, dim=[0, 2, 3], correction=0)
    assert torch.equal(again, x)
    assert error(mean, mean64) < 1e-6 and error(variance, variance64) < 1e-5
    weights, further = torch.randn(2, shape[1], device="cuda"), torch.randn(shape, device="cuda")
    loss = (mean * weights[0] + variance * weights[1]).sum()
    loss64 = (mean64 * weights[0].double() + variance64 * weights[1].double()).sum()
    (truth,) = torch.autograd.grad(loss64, x64)
    (got,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert error(got, truth) < 1e-5
    (got,) = torch.autograd.grad(loss + (again * further).sum(), x)
    assert error(got, truth + further.double()) < 1e-5


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


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("inputs", "outputs", "side", "shape"),
    [(1, 32, 5, (32, 1, 28, 28)), (32, 64, 5, (20, 32, 14, 14)), (3, 64, 3, (20, 3, 15, 17))],
)
def test_convolution_relu_and_pooling(inputs, outputs, side, shape, flat) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(inputs, outputs, side, padding=side // 2).cuda().bfloat16().to(memory_format=torch.channels_last)
    exact = nn.Conv2d(inputs, outputs, side, padding=side // 2).cuda().double()
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(shape, device="cuda").bfloat16().to(memory_format=torch.channels_last)
    y64 = fused._pooled(exact(x.double()), flat)
    dy = torch.randn_like(y64).bfloat16()
    truth = [y64, *torch.autograd.grad(y64, [exact.weight, exact.bias], dy.double())]
    ours, theirs = (
        [y, *torch.autograd.grad(y, [layer.weight, layer.bias], dy)]
        for y in (fused.conv_relu_pool(x, layer, flat), fused._pooled(layer(x), flat))
    )
    assert ours[0].dtype == torch.bfloat16 and ours[0].shape == y64.shape
    # elements of a window that are equal after rounding: another one of them may get the gradient, so that even
    # PyTorch's weights are off by some per cent
    assert all(error(a, b) < 1.1 * error(c, b) for a, b, c in zip(ours, truth, theirs, strict=True))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "side"), [(32, 28), (64, 28), (7, 8), (200, 16)])
def test_a_small_network_as_a_whole(monkeypatch, precision: torch.dtype, count: int, side: int) -> None:
    """All layers by kernels, the same numbers for dropout. In bfloat16 elements of a window are equal after rounding,
    so that even PyTorch's gradients are off by some per cent: ours are no worse."""
    torch.manual_seed(0)
    module = models.build("small-cnn", (1, side, side), 10, 0, {}, channels_last=True).cuda().to(precision)
    exact = copy.deepcopy(module).double()
    x = torch.randn(count, 1, side, side, device="cuda").relu().to(precision)
    y = torch.arange(count, device="cuda") % 10
    noise = torch.Generator("cuda")

    def step(network: nn.Module, images: Tensor) -> list[Tensor]:
        adopt_dropout(network, noise.manual_seed(1))
        out = network(images)
        return [out, *torch.autograd.grad(functional.cross_entropy(out.double(), y), list(network.parameters()))]

    ours = step(module, x)
    for owner, kernel in ((fused, "pooling"), (fused, "dense"), (convolution, "thin")):
        monkeypatch.setattr(owner, kernel, None)
    theirs, truth = step(module, x), step(exact, x.double())
    for got, plain, want in zip(ours, theirs, truth, strict=True):
        assert error(got, want) < max(3e-6, 1.5 * error(plain, want))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_in_one_kernel(momentum: float) -> None:
    """Against one vector of the gradients, the optimiser's update and the cast; gradients of both types."""
    torch.manual_seed(0)
    module = models.build("resnet18", (3, 32, 32), 10, 0, {}, channels_last=True)
    replica = Replica(module, Layout.of(module), torch.device("cuda"), "bf16")
    optimizer = Optimizer(lr=0.1, momentum=momentum, weight_decay=0.01)
    gradients = tuple(torch.randn_like(parameter) for parameter in replica.trainable)
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16, torch.float32} and replica.can_descend
    rate, params = torch.tensor(0.1, device="cuda"), replica.params.clone()
    moments = {name: torch.randn_like(moment) for name, moment in optimizer.init(params).items()}
    velocity = moments["momentum"].clone() if momentum else None
    update = sgd_kernel.Update(replica.layout, replica.device)
    update([gradients], replica.params, replica.low, velocity, rate, optimizer.weight_decay, momentum)
    optimizer.apply(params, replica.layout.flatten_gradient(gradients), moments, rate)
    assert error(replica.params, params.double()) < 1e-6
    assert torch.equal(replica.low, replica.params.bfloat16())
    assert velocity is None or error(velocity, moments["momentum"].double()) < 1e-6


@pytest.mark.parametrize("opposed", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_sgd_without_what_conflicts_in_one_kernel(count: int, opposed: bool) -> None:
    """Against the sum of the backward passes in float32, the projection in float64, and the optimiser's update."""
    torch.manual_seed(0)
    module = models.build("resnet18", (3, 32, 32), 10, 0, {}, channels_last=True)
    replica = Replica(module, Layout.of(module), torch.device("cuda"), "bf16")
    passes = [tuple(torch.randn_like(parameter) for parameter in replica.trainable) for _ in range(count)]
    assert count * len(replica.trainable) <= sgd_kernel.MOST
    gradient = sum(replica.layout.flatten_gradient(gradients) for gradients in passes).double()
    reference = (torch.randn_like(replica.params) + (-0.5 if opposed else 0.5) * gradient).float()
    norm = squared_norm(reference)
    product = gradient @ reference.double()
    assert (product < 0) == opposed
    projected = gradient - product.clamp(max=0.0) / norm * reference.double()
    want = replica.params.double() - 0.1 * projected
    replica.descend(passes, torch.tensor(0.1, device="cuda"), 0.0, 0.0, None, (reference, norm))
    assert error(replica.params, want) < 1e-6 and torch.equal(replica.low, replica.params.bfloat16())


@pytest.mark.parametrize("method", ["der", "der++", "fedgp", "fedgp+der"])
@pytest.mark.parametrize("optimizer", [Optimizer(lr=0.1), Optimizer(lr=0.1, momentum=0.9, weight_decay=0.01)])
def test_replay_and_projection_with_the_kernel_equal_those_without(
    method: str, optimizer: Optimizer, monkeypatch
) -> None:
    stream = Toy(clients=3, samples=23, augmented=True)
    case = Bench(method, stream=stream, train=TrainOptions(2, 4, optimizer), module=Norm)

    def graphs(setup: Setup, store: ClientStore) -> Graphs:
        return Graphs(setup, store, case.build_module, "cuda", "fp32", slots=2, host_threads=1)

    with_kernel = case.run(graphs).params
    monkeypatch.setattr(replicas, "sgd_kernel", None)
    assert error(with_kernel, case.run(graphs).params.double()) < 1e-4


@pytest.mark.parametrize("method", ["der", "fedgp+der++"])
def test_separate_batches_in_one_pass_equal_a_pass_for_each(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 16 channels the kernels do it; float32, so that convolutions of other sizes round alike."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    case = Bench(method, stream=Toy(clients=2, tasks=2, samples=10), module=Normed)

    def graphs(setup: Setup, store: ClientStore) -> Graphs:
        return Graphs(setup, store, case.build_module, precision="fp32", slots=2, host_threads=1)

    together = case.run(graphs).state.model
    monkeypatch.setattr(Normed, "normalises_apart", False)
    each = case.run(graphs).state.model
    assert error(together["params"], each["params"].double()) < 1e-4
    assert error(together["stats"], each["stats"].double()) < 1e-4
    assert torch.equal(together["counters"], each["counters"])


def test_rows_of_several_tensors_in_one_kernel() -> None:
    torch.manual_seed(0)
    buffer = [
        torch.randint(0, 256, (201, 3, 32, 32), device="cuda").byte(),
        torch.randint(0, 100, (201,), device="cuda"),
        torch.randn(201, 100, device="cuda"),
    ]
    index = torch.randperm(200, device="cuda")[:33]
    for rows in (index, index[1:]):  # addresses that are multiples of 16 and others
        assert rows_of._has_kernel(rows, buffer)
        found = rows_of.take_rows(buffer, rows)
        assert all(torch.equal(ours, own.index_select(0, rows)) for ours, own in zip(found, buffer, strict=True))
        values = [torch.flip(own, (0,)) for own in found]
        want = [own.index_copy(0, rows, value) for own, value in zip(buffer, values, strict=True)]
        rows_of.put_rows(buffer, rows, values)
        assert all(torch.equal(*pair) for pair in zip(buffer, want, strict=True))
    odd = [torch.randint(0, 256, (9, 5), device="cuda").byte()]  # no whole words
    assert torch.equal(rows_of.take_rows(odd, index % 9)[0], odd[0][index % 9])


@pytest.mark.parametrize("shape", [(32, 10), (128, 100), (20, 200)])
def test_cross_entropy(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    logits, y = torch.randn(shape, device="cuda").requires_grad_(), torch.randint(0, shape[1], shape[:1], device="cuda")
    logits64 = logits.detach().double().requires_grad_()
    ours, true = loss.cross_entropy(logits, y), functional.cross_entropy(logits64, y)
    assert loss._has_kernel(logits, y) and error(ours, true) < 1e-6
    pairs = [torch.autograd.grad(value, at, create_graph=True)[0] for value, at in ((ours, logits), (true, logits64))]
    assert error(torch.autograd.grad(loss.cross_entropy(logits, y), logits)[0], pairs[1]) < 1e-5
    again = [torch.autograd.grad(g.square().sum(), at)[0] for g, at in zip(pairs, (logits, logits64), strict=True)]
    assert error(*pairs) < 1e-5 and error(*again) < 1e-4


@pytest.mark.parametrize("method", ["fedavg", "fedgp+der"])
def test_several_short_steps_in_one_graph_equal_eager_ones(method: str, monkeypatch) -> None:
    monkeypatch.setattr(captured_steps, "OFTEN", 3)
    monkeypatch.setattr(captured_steps, "SEVERAL", 3)
    monkeypatch.setattr(captured_steps, "_SHORT", 1e6)
    stream = Toy(clients=3, samples=23, augmented=True)
    case = Bench(method, stream=stream, train=TrainOptions(2, 4, Optimizer(lr=0.1)), module=Norm)

    def graphs(setup: Setup, store: ClientStore) -> Graphs:
        return Graphs(setup, store, case.build_module, "cuda", "fp32", slots=2, host_threads=1)

    def eager(setup: Setup, store: ClientStore) -> Eager:
        return Eager(setup, store, case.build_module, "cuda", "fp32")

    assert error(case.run(graphs).params, case.run(eager).params.double()) < 1e-5


@pytest.mark.parametrize("shape", [(5, 3, 32, 32), (3, 1, 28, 28), (2, 3, 100, 90), (1, 4, 8, 10)])
def test_images_cut_out_mirrored_and_scaled(shape: tuple[int, ...]) -> None:
    """Against the same transforms on the CPU; draws lie in a wider table, as in a captured step."""
    torch.manual_seed(0)
    x = torch.randint(0, 256, shape, dtype=torch.uint8)
    table = torch.randint(0, 9, (shape[0], 7))
    table[:, 4] = torch.arange(shape[0]) % 2
    draws = table[:, 2:5]
    assert torch.equal(
        transforms.crop_and_flip(x.cuda(), table.cuda()[:, 2:5]).cpu(), transforms.crop_and_flip(x, draws)
    )
    for mean, std in (((), ()), ((0.5, 0.4, 0.3, 0.2), (0.2, 0.3, 0.25, 1.0)), ((0.5,) * 4, (0.25,) * 4)):
        constants = mean[: shape[1]], std[: shape[1]]
        got, truth = transforms.scale(x.cuda(), *constants).cpu(), transforms.scale(x, *constants)
        assert got.dtype == torch.float32 and (got - truth).abs().max() < 1e-6


def test_images_inside_vmap_take_pytorchs_operations() -> None:
    x = torch.randint(0, 256, (3, 2, 3, 8, 8), dtype=torch.uint8, device="cuda")
    got = torch.func.vmap(lambda one: transforms.scale(one, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)).sum())(x)
    assert torch.allclose(
        got, torch.stack([transforms.scale(one, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)).sum() for one in x])
    )


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_adam_in_one_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps against PyTorch's operations in float64."""
    torch.manual_seed(0)
    how = Optimizer(kind, lr=0.01, weight_decay=0.1)
    params = torch.randn(5003, device="cuda")
    exact, state = params.double(), how.init(params)
    state64 = how.init(exact)
    for _ in range(5):
        gradient = torch.randn(5003, device="cuda")
        assert how._has_kernel(params, gradient, state, torch.tensor(0.01, device="cuda"))
        how.apply(params, gradient, state, torch.tensor(0.01, device="cuda"))
        how.apply(exact, gradient.double(), state64, torch.tensor(0.01, device="cuda"))
    assert state["t"].item() == 5
    for got, truth in ((params, exact), (state["m"], state64["m"]), (state["v"], state64["v"])):
        assert error(got, truth) < 1e-6
