"""One vector for all parameters, with the module's tensors as views of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from everfed.core.layout import Layout
from everfed.core.replica import Replica


def replica_of(module: nn.Module) -> Replica:
    return Replica(module, Layout.of(module), torch.device("cpu"))


class Conv(nn.Module):
    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """The same weights used twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(3, 3, bias=False)
        self.decode = nn.Linear(3, 3, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(x)))  # type: ignore[no-any-return]


def test_sizes_and_names() -> None:
    layout = Layout.of(Conv())
    assert layout.size == 4 * 3 * 9 + 4 + 4 + 4 + 4 * 2 + 2 == 130
    assert [entry.name for entry in layout.params] == [
        "conv.weight", "conv.bias", "norm.weight", "norm.bias", "head.weight", "head.bias",
    ]  # fmt: skip
    assert [entry.name for entry in layout.stats] == ["norm.running_mean", "norm.running_var"]
    assert [entry.name for entry in layout.counters] == ["norm.num_batches_tracked"]


def test_parameters_are_views_of_the_vector() -> None:
    replica = replica_of(Conv())
    replica.params.fill_(2.0)
    assert all((parameter == 2.0).all() for parameter in replica.module.parameters())
    replica.module.get_parameter("head.bias").data[1] = 5.0
    assert replica.params[-1] == 5.0
    assert replica.layout.named(replica.params)["head.bias"].tolist() == [2.0, 5.0]


def test_loading_a_model_is_what_the_module_computes_with() -> None:
    torch.manual_seed(0)
    ours, theirs, x = replica_of(Conv()), Conv(), torch.randn(5, 3, 4, 4)
    ours.load(Layout.of(theirs).read(theirs))
    assert torch.equal(ours.module(x), theirs(x))


def test_a_model_read_back_is_a_copy() -> None:
    replica = replica_of(Conv())
    model = replica.model()
    replica.params.zero_()
    assert model["params"].abs().sum() > 0


@given(st.integers(1, 4), st.booleans())
@settings(max_examples=20)
def test_channels_last_keeps_its_memory_order_and_its_values(channels: int, channels_last: bool) -> None:
    torch.manual_seed(channels)
    module, twin = Conv(channels), Conv(channels)
    twin.load_state_dict(module.state_dict())
    if channels_last:
        module = module.to(memory_format=torch.channels_last)
    replica, x = replica_of(module), torch.randn(2, channels, 4, 4)
    weight = replica.module.get_parameter("conv.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    assert torch.equal(weight, twin.conv.weight)
    assert torch.allclose(replica.module(x), twin(x), atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_flat_gradient_lies_where_the_parameters_lie(channels: int) -> None:
    """Whatever memory order autograd gives the gradients, entry i of the vector is the gradient of parameter i."""
    torch.manual_seed(1)
    module = Conv(channels)
    twin = Conv(channels)
    twin.load_state_dict(module.state_dict())
    replica, x = replica_of(module.to(memory_format=torch.channels_last)), torch.randn(2, channels, 4, 4)
    loss = replica.module(x).square().sum()
    gradient = replica.layout.flatten_gradient(torch.autograd.grad(loss, replica.trainable))
    twin(x).square().sum().backward()
    for name, piece in replica.layout.named(gradient).items():
        assert torch.allclose(piece, twin.get_parameter(name).grad, atol=1e-4), name


def test_a_gradient_in_another_memory_order_is_put_in_order() -> None:
    layout = Layout.of(nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last))
    value = torch.arange(48.0).reshape(4, 3, 2, 2)
    for grad in (value, value.to(memory_format=torch.channels_last)):
        assert torch.equal(layout.params[0].view(layout.flatten_gradient((grad,))), value)


def test_tied_weights_are_one_slice() -> None:
    replica = replica_of(Tied())
    assert replica.layout.size == 9
    replica.load({"params": torch.eye(3).reshape(-1), "stats": torch.zeros(0), "counters": torch.zeros(0)})
    x = torch.tensor([[0.5, -1.0, 2.0]])
    assert torch.allclose(replica.module(x), torch.tanh(x))
    module: Tied = replica.module  # type: ignore[assignment]
    assert module.encode.weight is module.decode.weight


def test_the_gradient_of_tied_weights_is_the_sum_of_both_uses() -> None:
    torch.manual_seed(0)
    replica, x = replica_of(Tied()), torch.randn(4, 3)
    grads = torch.autograd.grad(replica.module(x).sum(), replica.trainable)
    first, second = (replica.params.reshape(3, 3).clone().requires_grad_() for _ in range(2))
    a, b = torch.autograd.grad((torch.tanh(x @ first.t()) @ second.t()).sum(), (first, second))
    assert torch.allclose(replica.layout.flatten_gradient(grads), (a + b).reshape(-1), atol=1e-6)


def test_batchnorm_statistics_and_counters_move_with_training() -> None:
    replica = replica_of(Conv())
    replica.module.train()
    replica.module(torch.randn(6, 3, 4, 4))
    replica.module(torch.randn(6, 3, 4, 4))
    assert replica.counters.dtype == torch.int64 and replica.counters.tolist() == [2]
    assert not torch.equal(replica.stats, torch.tensor([0.0] * 4 + [1.0] * 4))
    norm: nn.BatchNorm2d = replica.module.norm  # type: ignore[assignment]
    assert torch.equal(replica.stats, torch.cat([norm.running_mean, norm.running_var]))


def test_frozen_parameters_stay_outside_the_vector() -> None:
    module = Conv()
    module.conv.weight.requires_grad_(False)
    layout = Layout.of(module)
    assert layout.size == 130 - 108
    assert "conv.weight" not in [entry.name for entry in layout.params]


def test_personal_parameters_come_last() -> None:
    layout = Layout.of(Conv(), personal=lambda name: name.startswith("conv"))
    assert [entry.name for entry in layout.params][-2:] == ["conv.weight", "conv.bias"]
    assert (layout.shared, layout.size) == (130 - 112, 130)


def test_a_model_without_buffers_has_empty_vectors() -> None:
    model = Layout.of(Tied()).read(Tied())
    assert model["stats"].shape == (0,) and model["counters"].shape == (0,)
    assert model["stats"].dtype == torch.float32 and model["counters"].dtype == torch.int64


def test_half_precision_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        Layout.of(nn.Linear(2, 2).half())


def test_an_unknown_parameter_is_named_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="'nose'.*conv.weight"):
        Layout.of(Conv()).param("nose")


class Masked(nn.Module):
    """A constant mask, as attention layers keep one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.mask, self.linear(x), 0.0)


def test_a_boolean_buffer_stays_one() -> None:
    replica = replica_of(Masked())
    assert replica.module(torch.ones(1, 2))[0, 1] == 0.0
