"""Gradients of single samples from batched passes, against one backward pass for each; all in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from everfed.models.cnn import SmallCNN
from everfed.models.resnet import ResNet18
from everfed.parts.shared import per_sample
from everfed.parts.shared import squared_gradients as squaring
from everfed.parts.shared.per_sample import Layers, Network
from everfed.parts.shared.squared_gradients import squared_gradients

MEMORY = 1 << 28


def network(module: nn.Module, loss: Any = functional.cross_entropy, seen: Tensor | None = None) -> Network:
    """Of a module, its BatchNorm layers with the statistics of `seen`."""
    module.double()
    if seen is not None and any(isinstance(layer, nn.BatchNorm2d) for layer in module.modules()):
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = 1.0
        module.train()(seen)
    params = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
    return Network(module, params, {**frozen, **dict(module.named_buffers())}, loss)


def one_by_one(net: Network, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """A backward pass for each sample, by PyTorch."""
    net.module.eval()
    trained = {name: p for name, p in net.module.named_parameters() if p.requires_grad}
    rows = [
        torch.autograd.grad(net.loss(net.module(one[None]), label[None]), list(trained.values()))
        for one, label in zip(x, y, strict=True)
    ]
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(trained)}


def check(net: Network, x: Tensor, y: Tensor, by_layers: bool) -> None:
    """Gradients, and the sums of their squares, which take ways of their own."""
    expected, layers = one_by_one(net, x, y), Layers.of(net)
    found = layers.gradients(x, y) if layers else None
    assert (found is not None) is by_layers
    sums = squared_gradients(net, x, y, MEMORY)
    for name, rows in expected.items():
        assert rows.abs().sum() > 0, name
        close = {"rtol": 1e-9, "atol": 1e-12 * float(rows.abs().max())}
        torch.testing.assert_close((found or net.gradients(x, y))[name], rows, **close)
        torch.testing.assert_close(sums[name], rows.square().sum(0), **close)


def images(*shape: int, classes: int = 5) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(*shape, dtype=torch.float64), torch.randint(0, classes, (shape[0],))


# networks of closed forms --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: ResNet18((3, 8, 8), 5), (6, 3, 8, 8)),
        (lambda: SmallCNN((1, 28, 28), 5), (7, 1, 28, 28)),
        (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 5)), (9, 6)),
        (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, 2, 1, 1, groups=2), nn.Flatten(), nn.Linear(54, 5)), (5, 4, 6, 5)),
        (lambda: nn.Sequential(nn.Conv2d(2, 4, (3, 2), 1, (0, 1), 2), nn.Flatten(), nn.LazyLinear(5)), (5, 2, 8, 7)),
        (
            lambda: nn.Sequential(
                nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 5)
            ),
            (5, 2, 6, 6),
        ),
    ],
    ids=["resnet18", "small-cnn", "mlp", "groups", "dilation", "in place"],
)
def test_every_sample_s_gradient_is_its_own(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, y = images(*shape)
    module = make()
    module.eval()(x.float())  # lazy layers take their shape
    check(network(module, seen=1.5 * x.flip(3) + 0.3 if x.dim() == 4 else None), x, y, by_layers=True)


def test_a_sample_of_several_rows_has_one_gradient() -> None:
    """(n, words, features), as in a transformer."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5))
    check(network(module), *images(8, 3, 6), by_layers=True)


def test_frozen_layers_are_constants() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5))
    module[0].requires_grad_(False)
    module[1].weight.requires_grad_(False)
    net = network(module)
    check(net, *images(8, 6), by_layers=True)
    assert sorted(net.params) == ["1.bias", "3.bias", "3.weight"]


# what must not take the closed forms ---------------------------------------------------------------------------------
class Twice(nn.Module):
    """A layer that is called twice: the sum of two gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(torch.tanh(self.inner(x))))


class Behind(Twice):
    """Called once, but the weight is used a second time without a call."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.linear(torch.tanh(self.inner(x)), self.inner.weight))


class Tied(Twice):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 6, bias=False)
        self.other.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.other(torch.tanh(self.inner(x))))


class Penalised(Twice):
    """Called once, with the output depending on the bias by another way, too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)) * self.head.bias.square().sum()


class Bent(nn.Linear):
    """A linear layer by its class, not by what it does."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class Unbatched(nn.Module):
    """Its layer sees rows that are not the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(2, 4), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x.reshape(-1, 2))).reshape(len(x), -1))


class ByName(Twice):
    """Its layer is called with an argument by name, which hooks do not see."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(input=x)))


@pytest.mark.parametrize("kind", [Twice, Behind, Tied, Penalised, Unbatched, ByName], ids=lambda kind: kind.__name__)
def test_other_uses_of_a_layer_are_found_out(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    check(network(kind()), *images(7, 6), by_layers=False)


@pytest.mark.parametrize(
    "layer",
    [Bent(6, 6), nn.LayerNorm(6), nn.PReLU(6), nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))],
    ids=lambda layer: type(layer).__name__,
)
def test_other_layers_are_computed_sample_by_sample(layer: nn.Module) -> None:
    torch.manual_seed(0)
    check(network(nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 5))), *images(7, 6), by_layers=False)


def test_a_layer_that_mixes_samples_sees_one_at_a_time() -> None:
    class Mixing(nn.Linear):
        mixes_samples = True

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0) / 2)

    for module in (nn.Sequential(Mixing(6, 5)), nn.Sequential(nn.Linear(6, 6), Mixing(6, 5).requires_grad_(False))):
        assert Layers.of(network(module)) is None
        check(network(module), *images(7, 6), by_layers=False)


# losses, memory, state -----------------------------------------------------------------------------------------------
def test_the_loss_is_that_of_each_sample_by_itself() -> None:
    """A loss that is no mean over samples."""

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, y, reduction="sum").square()

    torch.manual_seed(0)
    check(network(nn.Sequential(nn.Linear(6, 5)), loss), *images(7, 6), by_layers=True)


@settings(deadline=None, max_examples=25)
@given(samples=st.integers(0, 23), memory=st.integers(1, 1 << 16))
def test_however_samples_are_divided_the_sum_is_the_same(samples: int, memory: int) -> None:
    torch.manual_seed(0)
    net = network(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 5)))
    x, y = images(samples, 2, 4, 4)
    found = squared_gradients(net, x, y, memory)
    whole = {name: rows.square().sum(0) for name, rows in net.gradients(x, y).items()} if samples else {}
    for name, value in net.params.items():
        torch.testing.assert_close(found[name], whole.get(name, torch.zeros_like(value)), rtol=1e-9, atol=1e-12)


def test_samples_in_flight_stay_within_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    squares = Layers.squares
    monkeypatch.setattr(Layers, "squares", lambda self, x, y: sizes.append(len(x)) or squares(self, x, y))
    torch.manual_seed(0)
    net = network(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 5)))
    x, y = images(50, 2, 4, 4)
    squared_gradients(net, x, y, 20_000)
    # a sample: twice the inputs of both layers, 32 and 12 numbers of eight bytes
    assert sizes == [squaring._FIRST, 28, 14]


@pytest.mark.parametrize("bytes_at_once", [1, 1500, 1 << 20])
def test_gradients_may_be_formed_a_few_at_a_time(bytes_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_sample, "_AT_ONCE", bytes_at_once)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5))
    check(network(module), *images(9, 2, 4, 4), by_layers=True)
    check(network(nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(24, 5))), *images(9, 8, 4), by_layers=True)


def test_nothing_of_the_network_changes() -> None:
    torch.manual_seed(0)
    module = ResNet18((3, 8, 8), 5)
    net = network(module)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    x, y = images(5, 3, 8, 8)
    for _ in range(2):
        squared_gradients(net, x, y, MEMORY)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(layer._forward_hooks for layer in module.modules())
    assert all(p.grad is None and p.requires_grad for p in module.parameters())


def test_values_count_and_not_what_the_module_holds() -> None:
    """Weights and running statistics are those that are given."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    x, y = images(5, 2, 6, 6)
    net = network(module, seen=x + 0.3)
    expected = squared_gradients(net, x, y, MEMORY)
    params = {name: value.clone() for name, value in net.params.items()}
    constants = {name: value.clone() for name, value in net.constants.items()}
    with torch.no_grad():
        for value in [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]:
            value.mul_(3.0)
    found = squared_gradients(Network(module, params, constants, net.loss), x, y, MEMORY)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
