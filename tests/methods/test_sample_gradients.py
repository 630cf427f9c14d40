"""Per-sample gradients against one backward pass per sample, and the projection that shortens them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from everfed.methods.common.per_sample import Network
from everfed.methods.replay.diversity import Candidates
from everfed.methods.replay.sample_gradients import (
    RandomProjection,
    activation_bytes,
    bytes_needed,
    last_layer,
    sample_gradient_norms,
    sample_gradients,
)


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(4 * 36, 16),
        nn.Tanh(),
        nn.Linear(16, 5),
    ]
    model = nn.Sequential(*layers).to(dtype)
    model(torch.randn(32, 1, 8, 8, dtype=dtype))  # gives BatchNorm statistics worth using
    return model


def batch(n: int = 11, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 1, 8, 8, generator=generator, dtype=dtype), torch.randint(5, (n,), generator=generator)


def arguments(model: nn.Module) -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]:
    return model, dict(model.named_parameters()), dict(model.named_buffers())


def of(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy) -> Network:
    return Network(*arguments(model), loss)


def one_by_one(model: nn.Module, x: Tensor, y: Tensor, names: tuple[str, ...] | None = None) -> Tensor:
    model = model.eval()
    rows = []
    for i in range(len(x)):
        model.zero_grad()
        cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        rows.append(torch.cat([p.grad.flatten() for n, p in model.named_parameters() if names is None or n in names]))
    return torch.stack(rows)


def test_equals_one_backward_pass_per_sample_in_eval_mode() -> None:
    model, (x, y) = network(), batch()
    got = sample_gradients(of(model), x, y)
    torch.testing.assert_close(got, one_by_one(model, x, y), rtol=1e-12, atol=1e-14)
    assert not got.requires_grad


def test_the_module_is_left_as_it_was() -> None:
    model, (x, y) = network(), batch()
    model[1].eval()  # a frozen BatchNorm inside a training model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sample_gradients(of(model), x, y)
    assert model.training and model[3].training and not model[1].training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_weights_come_from_the_arguments_not_from_the_module() -> None:
    model, (x, y) = network(), batch()
    _, params, buffers = arguments(model)
    other = {name: value + 0.1 for name, value in params.items()}
    got = sample_gradients(Network(model, other, buffers, cross_entropy), x, y)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    torch.testing.assert_close(got, one_by_one(model, x, y), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("projection", [None, RandomProjection(64, seed=2)])
def test_chunks_do_not_change_the_result(projection: RandomProjection | None) -> None:
    model, (x, y) = network(), batch()
    whole = sample_gradients(of(model), x, y, projection=projection)
    held = activation_bytes(of(model), x, y)
    needed = bytes_needed(dict(model.named_parameters()), len(x), projection=projection, activations=held)
    for samples in (1, 2, 5):
        memory = needed.result + samples * needed.per_sample
        got = sample_gradients(of(model), x, y, projection=projection, memory=memory)
        torch.testing.assert_close(got, whole, rtol=1e-12, atol=1e-14)
        norms = sample_gradient_norms(of(model), x, y, memory=samples * needed.per_sample)
        if projection is None:
            torch.testing.assert_close(norms, whole.norm(dim=1), rtol=1e-12, atol=1e-14)


class Recording(RandomProjection):
    """Notes how many gradients were in flight at a time."""

    in_flight: list[int] = []

    def project(self, rows: Tensor) -> Tensor:
        self.in_flight.append(len(rows))
        return super().project(rows)


def test_nothing_of_a_measured_pass_stays_in_memory() -> None:
    """A saved output that is kept as it is holds the graph that holds it: no garbage collector finds such a circle."""
    outputs: list[weakref.ref[Tensor]] = []

    class Noted(nn.Sigmoid):  # saves its output for the backward pass
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            outputs.append(weakref.ref(y))
            return y

    model = nn.Sequential(nn.Linear(4, 3), Noted())
    x, y = torch.randn(5, 4), torch.zeros(5, dtype=torch.int64)
    assert activation_bytes(of(model), x, y) > 0
    assert len(outputs) == 1 and outputs[0]() is None
    sample_gradient_norms(of(model), x, y)
    assert all(one() is None for one in outputs)


def test_chunks_stay_within_the_budget() -> None:
    model, (x, y) = network(), batch()
    projection = Recording(16)
    held = activation_bytes(of(model), x, y)
    needed = bytes_needed(dict(model.named_parameters()), len(x), projection=projection, activations=held)
    memory = needed.result + 4 * needed.per_sample + needed.per_sample // 2
    sample_gradients(of(model), x, y, projection=projection, memory=memory)
    assert projection.in_flight == [4, 4, 3]


def test_a_budget_too_small_is_refused_with_what_would_help() -> None:
    model, (x, y) = network(), batch()
    with pytest.raises(ValueError, match="memory = 1000 bytes.*last layer.*projection"):
        sample_gradients(of(model), x, y, memory=1000)


def test_no_samples_give_no_rows() -> None:
    model, (x, y) = network(), batch()
    assert sample_gradients(of(model), x[:0], y[:0]).shape == (0, 40 + 8 + 2320 + 85)
    assert sample_gradient_norms(of(model), x[:0], y[:0]).shape == (0,)


def test_last_layer_equals_its_closed_form() -> None:
    """e outer [a; 1] with softmax error e and penultimate activation a; Q_ij ~ (e_i.e_j)(a_i.a_j + 1)."""
    model, (x, y) = network(), batch()
    names = last_layer(dict(model.named_parameters()))
    assert names == ("7.weight", "7.bias")
    got = sample_gradients(of(model), x, y, only=names)
    model.eval()
    with torch.no_grad():
        a = model[:-1](x)
        e = model(x).softmax(dim=1) - nn.functional.one_hot(y, 5)
    torch.testing.assert_close(got[:, :80], torch.einsum("nc,nh->nch", e, a).flatten(1), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got[:, 80:], e, rtol=1e-10, atol=1e-12)
    products = (e @ e.T) * (a @ a.T + 1)
    scale = products.diagonal().sqrt()
    np.testing.assert_allclose(Candidates.of(got).gram, (products / scale / scale[:, None]).numpy(), atol=1e-10)


def test_only_known_parameters_can_be_named() -> None:
    model, (x, y) = network(), batch()
    for only in (["7.wait"], []):
        with pytest.raises(ValueError, match="0.weight, 0.bias"):
            sample_gradients(of(model), x, y, only=only)


def test_bytes_of_gradients_full_and_projected() -> None:
    """4 n d bytes: the small MNIST network, 21,840 parameters, 200 samples; the same projected to 4096."""
    params = {"all": torch.empty(21_840)}
    assert bytes_needed(params, 200).result == 17_472_000
    assert bytes_needed(params, 200).per_sample == 2 * 87_360
    assert bytes_needed(params, 200, projection=RandomProjection(4096)).result == 3_276_800
    assert bytes_needed(params, 200, activations=1000).per_sample == 2 * 87_360 + 3000


def test_activations_are_measured_without_the_weights() -> None:
    model = nn.Sequential(nn.Linear(1000, 3, bias=False), nn.Tanh())
    held = activation_bytes(of(model, nn.functional.mse_loss), torch.randn(5, 1000), torch.zeros(5, 3))
    assert 4 * (1000 + 3) <= held <= 4 * (1000 + 30)  # the input and a few short vectors, not 3000 weights


class Scale(nn.Module):
    """A parameter without dimensions, beside one with."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.shift


def test_scalar_parameters() -> None:
    model, x = Scale(), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    got = sample_gradients(of(model, lambda out, _: out.sum()), x, torch.zeros(2))
    assert got.tolist() == [[3.0, 1.0, 1.0], [7.0, 1.0, 1.0]]
    norms = sample_gradient_norms(of(model, lambda out, _: out.sum()), x, torch.zeros(2))
    torch.testing.assert_close(norms, got.norm(dim=1))


def test_targets_of_any_shape() -> None:
    model, x = nn.Linear(3, 2).double(), torch.randn(6, 3, dtype=torch.float64)
    y = torch.randn(6, 2, dtype=torch.float64)
    got = sample_gradients(of(model, nn.functional.mse_loss), x, y)
    errors = (model(x) - y).detach()
    torch.testing.assert_close(got[:, :6], torch.einsum("nc,nh->nch", errors, x).flatten(1))


# --- random projection ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "bound"), [(256, 0.07), (1024, 0.035), (4096, 0.018)])
def test_projection_keeps_cosines(size: int, bound: float) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((40, 50_000)) + rng.standard_normal((4, 50_000))[rng.integers(4, size=40)]
    exact = Candidates.of(rows).gram
    error = (Candidates.of(RandomProjection(size).project(torch.from_numpy(rows))).gram - exact)[np.triu_indices(40, 1)]
    assert np.sqrt((error**2).mean()) < bound and np.abs(error).max() < 5 * bound


def test_projection_is_linear_seeded_and_never_loses_short_vectors() -> None:
    rows = torch.randn(6, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    projection = RandomProjection(128, seed=7)
    got = projection.project(rows)
    assert torch.equal(got, RandomProjection(128, seed=7).project(rows))
    assert not torch.equal(got, RandomProjection(128, seed=8).project(rows))
    torch.testing.assert_close(projection.project(2 * rows[:3] + rows[3:]), 2 * got[:3] + got[3:])
    short = RandomProjection(1000).project(rows)
    torch.testing.assert_close(short @ short.T, rows @ rows.T)
    padded = RandomProjection(1500).project(rows)
    torch.testing.assert_close(padded @ padded.T, rows @ rows.T)


def test_projection_keeps_products_in_expectation() -> None:
    a, b = torch.randn(2, 60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    products = []
    for seed in range(1000):
        pa, pb = RandomProjection(8, seed).project(torch.stack([a, b]))
        products.append(float(pa @ pb))
    spread = np.std(products) / np.sqrt(len(products))
    assert np.mean(products) == pytest.approx(float(a @ b), abs=4 * spread)


def test_projection_is_pinned() -> None:
    """The numbers every client must draw, on every machine: a change here breaks running federations."""
    got = RandomProjection(4, seed=0).project(torch.arange(1.0, 11.0)[None])
    assert got.tolist() == [[6.0, 2.0, -4.0, 3.0]]


def test_projection_refuses_no_dimensions() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RandomProjection(0)
