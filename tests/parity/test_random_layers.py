"""Layers that draw from torch's global generator give the same bits in every engine and after a resume."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from everfed.core import tree
from everfed.core.context import TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.engines.graphs import draws_globally
from tests.parity.test_processes import on_processes
from tests.parity.test_resume import assert_resumes
from tests.parity.test_wire import assert_same
from tests.support.toy import Bench, Norm, Outcome, Toy, comparable
from tests.support.wire import run_over_wire


class Attention(nn.Module):
    """Rows of an image as a sequence; the dropout is inside torch's own attention."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1, 2)
        return self.head((rows + self.attention(rows, rows, rows)[0]).flatten(1))  # type: ignore[no-any-return]


class DropPath(nn.Module):
    """Leaves a residual branch out for single samples, as timm writes it."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * x.new_empty((len(x), *[1] * (x.dim() - 1))).bernoulli_(0.7) / 0.7


class Residual(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.branch, self.drop_path = nn.Linear(16, 16), DropPath()
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return self.head(flat + self.drop_path(torch.relu(self.branch(flat))))  # type: ignore[no-any-return]


def bench(module: type[nn.Module]) -> Bench:
    return Bench("fedgp+er", stream=Toy(clients=3), module=module, train=TrainOptions(2, 5, Optimizer(lr=0.1)))


@cache
def eager(module: type[nn.Module]) -> Outcome:
    """What every other run is compared with, made once."""
    return bench(module).run()


MODULES = pytest.mark.parametrize("module", [Attention, Residual])


@MODULES
def test_the_run_s_seed_decides_and_the_global_generator_is_left_alone(module: type[nn.Module]) -> None:
    torch.manual_seed(1)
    first, after = bench(module).run(), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(after, torch.get_rng_state())
    torch.manual_seed(2)
    torch.rand(7)
    assert tree.equal(comparable(first.state), comparable(bench(module).run().state))
    assert not torch.equal(first.params, bench(module).change(seed=1).run().params)


@MODULES
def test_the_order_of_clients_and_fresh_networks_change_nothing(module: type[nn.Module]) -> None:
    assert_same(eager(module), run_over_wire(bench(module)))


@MODULES
def test_processes_equal_eager(module: type[nn.Module]) -> None:
    assert_same(eager(module), on_processes(bench(module)))


@MODULES
def test_a_resumed_run_equals_an_unbroken_one(module: type[nn.Module]) -> None:
    assert_resumes(bench(module), 2, eager(module))


@pytest.mark.parametrize(("module", "draws"), [(Attention, True), (Residual, True), (Norm, False)])
def test_such_networks_are_recognised(module: type[nn.Module], draws: bool) -> None:
    """On a GPU they get one slot: captured steps of several streams would share the generator's state."""
    setup = bench(module).setup()
    assert draws_globally(bench(module).build_module(), setup) is draws
