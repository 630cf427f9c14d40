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
from torch.nn.utils import prune

from everfed.methods.common import per_sample
from everfed.methods.common.per_sample import Layers, Network, closed_forms, constants
from everfed.methods.regularise import fisher as squaring
from everfed.methods.regularise.fisher import squared_gradients
from everfed.models.cnn import SmallCNN
from everfed.models.resnet import ResNet18

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
    return Network(module, params, constants(module), loss)


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
    expected, layers = one_by_one(net, x, y), closed_forms(net, x, y)
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


class Normed(nn.Module):
    """Its untrained layer normalises by the batch."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, **options).requires_grad_(False)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class Centred(Twice):
    """Samples are mixed by no layer at all."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x)) - x.mean(0) / 2 if len(x) > 1 else torch.tanh(self.inner(x)) - x / 2)


class Turned(Twice):
    """Rows come first, not samples: (6, n)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x.T[..., None])).sum(0))


class Classes(Twice):
    """Its layer maps as many embeddings of classes as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("classes", torch.randn(7, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.inner(self.classes).T + self.head(x).sum(1, keepdim=True)


class Behindhand(Twice):
    """The inner layer is called without gradients, and the head is called once."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            first = self.inner(x)
        return self.head(first + functional.linear(x, self.inner.weight, self.inner.bias))


class Dropped(Twice):
    """One layer's output is thrown away, another's weight is used twice: as many uses as there are weights."""

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        return self.head(x) + functional.linear(x, self.head.weight, self.head.bias).tanh()


class Low(Twice):
    """Computes in half precision inside."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(torch.tanh(self.inner(x)))


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
    """By what is seen of a pass, without a trial."""
    torch.manual_seed(0)
    net, (x, y) = network(kind()), images(7, 6)
    layers = Layers.of(net)
    assert layers is not None and layers.gradients(x, y) is None
    check(net, x, y, by_layers=False)


@pytest.mark.parametrize(
    "layer",
    [Bent(6, 6), nn.LayerNorm(6), nn.PReLU(6), nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))],
    ids=lambda layer: type(layer).__name__,
)
def test_other_layers_are_computed_sample_by_sample(layer: nn.Module) -> None:
    torch.manual_seed(0)
    net = network(nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 5)))
    assert Layers.of(net) is None
    check(net, *images(7, 6), by_layers=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Normed(track_running_stats=False),
        lambda: Normed(track_running_stats=False, affine=False),
        Centred,
        Classes,
    ],
    ids=["untracked", "without parameters", "by no layer", "classes"],
)
def test_mixed_samples_and_rows_that_are_none_are_found_out(make: Callable[[], nn.Module]) -> None:
    """By what is seen, or by the trial: seven rows for seven samples."""
    torch.manual_seed(0)
    net, (x, y) = network(make()), images(7, 6)
    net.module.eval()
    assert closed_forms(net, x, y) is None


def test_rows_that_come_first_are_found_out_also_where_there_are_as_many() -> None:
    torch.manual_seed(0)
    net = network(Turned())
    for samples in (6, 9):
        x, y = images(samples, 6)
        assert closed_forms(net, x, y) is None
        check(net, x, y, by_layers=False)


def test_a_batchnorm_that_stays_in_training_is_found_out() -> None:
    class Stubborn(nn.BatchNorm2d):
        def train(self, mode: bool = True) -> nn.Module:
            return super().train(True)

    module = nn.Sequential(Stubborn(2).requires_grad_(False), nn.Flatten(), nn.Linear(8, 5)).eval()
    assert closed_forms(network(module), *images(7, 2, 2, 2)) is None


def test_gradients_that_closed_forms_do_not_see_are_no_error() -> None:
    torch.manual_seed(0)
    net, (x, y) = network(Behindhand()), images(7, 6)
    assert closed_forms(net, x, y) is None
    half = Low()  # autocast takes no float64
    low = Network(half, {name: p.detach() for name, p in half.named_parameters()}, {}, net.loss)
    assert closed_forms(low, x.float(), y) is None


def test_a_layer_without_use_and_one_with_two_are_not_taken_for_two_with_one() -> None:
    torch.manual_seed(0)
    net, (x, y) = network(Dropped()), images(7, 6)
    layers = Layers.of(net)
    assert layers is not None and layers.gradients(x, y) is None


def test_hooks_of_users_that_change_an_output_come_later() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))
    module[0].register_forward_hook(lambda layer, given, output: output.tanh())
    module[1].register_forward_pre_hook(lambda layer, given: (given[0] * 2,))
    check(network(module), *images(7, 6), by_layers=True)


def test_layers_with_more_than_their_own_parameters_take_no_closed_form() -> None:
    torch.manual_seed(0)
    pruned = prune.random_unstructured(nn.Linear(6, 6), "weight", 0.5)
    check(network(nn.Sequential(pruned, nn.Tanh(), nn.Linear(6, 5))), *images(7, 6), by_layers=False)


def test_a_forward_of_the_object_takes_no_closed_form() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))
    original = module[0].forward
    module[0].forward = lambda x: original(x).tanh()
    check(network(module), *images(7, 6), by_layers=False)


def test_nothing_trained_has_no_closed_form_and_a_network_of_one_layer_has() -> None:
    assert Layers.of(network(nn.Sequential(nn.Linear(6, 5)).requires_grad_(False))) is None
    x, _ = images(7, 3, 2, 2)
    loss = lambda outputs, y: outputs.flatten(1).square().sum()  # noqa: E731
    check(network(nn.BatchNorm2d(3).eval(), loss), x, torch.zeros(7), by_layers=True)


def convolutions() -> nn.Module:
    """Two layers with BatchNorm between them, of images of 3 x 8 x 8."""
    head = nn.Flatten(), nn.Linear(5 * 2 * 2, 5)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3, 2, bias=False), *head)


def test_channels_last_makes_no_difference() -> None:
    torch.manual_seed(0)
    x, y = images(6, 3, 8, 8)
    module = convolutions().to(memory_format=torch.channels_last)
    net = network(module, seen=1.5 * x.flip(3) + 0.3)
    check(net, x.contiguous(memory_format=torch.channels_last), y, by_layers=True)


def test_the_trial_is_made_once_for_a_module_and_what_is_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    are_right = Layers.are_right
    monkeypatch.setattr(Layers, "are_right", lambda self, x, y: tries.append(len(x)) or are_right(self, x, y))
    torch.manual_seed(0)
    net, (x, y) = network(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))), images(20, 6)
    others = {name: value for name, value in net.params.items() if name != "2.weight"}
    last = Network(net.module, {"2.weight": net.params["2.weight"]}, others, net.loss)
    for _ in range(2):
        assert closed_forms(net, x, y) and closed_forms(last, x, y)
    assert tries == [8, 8]


def test_one_sample_and_gradients_of_zero_show_nothing() -> None:
    torch.manual_seed(0)
    net, (x, y) = network(Centred()), images(7, 6)
    assert closed_forms(net, x[:1], y[:1]) is None and closed_forms(net, x, y) is None
    silent = Network(net.module, net.params, net.constants, lambda outputs, y: 0.0 * outputs.sum())
    del per_sample._verdicts[net.module]
    assert closed_forms(silent, x, y) is None


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
    squared_gradients(net, x, y, 10_000)
    # first as many as 122 parameters of eight bytes go into it, then as inputs and gradients of outputs do: 32 + 12 and
    # 12 + 5 numbers; in the end what is left
    assert sizes == [10, 20, 20]
    assert max(sizes) <= squaring._MOST


@pytest.mark.parametrize("bytes_at_once", [1, 1500, 1 << 20])
def test_gradients_may_be_formed_a_few_at_a_time(bytes_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_sample, "_AT_ONCE", bytes_at_once)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5))
    check(network(module), *images(9, 2, 4, 4), by_layers=True)
    check(network(nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(24, 5))), *images(9, 8, 4), by_layers=True)


def test_nothing_of_the_network_changes() -> None:
    torch.manual_seed(0)
    module = convolutions()
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


def test_a_network_that_branches_on_data_takes_its_samples_one_by_one() -> None:
    """As transformers' networks do on a mask; `vmap` cannot."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x @ self.first if bool((x > 0).all()) else x)

    net, x = network(Branching()), torch.rand(3, 4, dtype=torch.float64)
    check(net, x, torch.tensor([0, 1, 2]), by_layers=False)


def test_what_is_wrong_with_a_network_itself_is_said_as_it_is() -> None:
    net = network(nn.Linear(4, 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net.gradients(torch.zeros(2, 5, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
