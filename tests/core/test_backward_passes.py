"""The gradients of separate batches: a backward pass for each, their sum, and the step of SGD that removes a conflict
on the way. The kernel of that step runs here under Triton's interpreter; tests/gpu/test_fused.py has it on a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from everfed.core import data as core_data
from everfed.core import replica as replicas
from everfed.core.context import TrainOptions
from everfed.core.layout import Layout
from everfed.core.message import State
from everfed.core.optimizer import Optimizer
from everfed.core.replica import GraphCut, Replica
from everfed.core.step import Training, train_step
from everfed.method import Client, Gradient, Part, Server, Step, compose
from everfed.methods.project.fedgp import FedGP
from everfed.methods.replay import memory
from tests.support.toy import Bench, Norm, Toy

interpreted = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton and TRITON_INTERPRET=1, or see tests/gpu/test_fused.py",
)


def bench(method: str, **optimizer: Any) -> Bench:
    stream = Toy(clients=2, tasks=1, samples=6, augmented=True)
    return Bench(method, stream=stream, train=TrainOptions(2, 4, Optimizer(lr=0.1, **optimizer)), module=Norm)


# passes -------------------------------------------------------------------------------------------------------
class Sums(TorchDispatchMode):
    """Counts additions of two tensors by their shape."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and isinstance(args[1], Tensor):
            self.shapes[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", ["der", "der++", "fedgp+der"])
def test_gradients_of_separate_batches_are_not_added_up_one_by_one(method: str) -> None:
    with Sums() as sums:
        bench(method).run()
    assert not sums.shapes.keys() & {(3, 1, 3, 3), (3,), (4, 48), (4,)}  # Norm's parameters


@pytest.mark.parametrize("method", ["der", "der++", "fedgp+der++"])
def test_they_are_the_bits_of_a_single_backward_pass(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = bench(method, momentum=0.9).run().params

    def uncut(*args: Any, only_outputs: bool = False, **kwargs: Any) -> Any:
        return drawn(*args, **kwargs)

    drawn = memory.replayed
    monkeypatch.setattr(memory, "replayed", uncut)
    assert torch.equal(ours, bench(method, momentum=0.9).run().params)


def linear() -> Replica:
    """y = w x + b with w = 2, b = 1."""
    module = nn.Linear(1, 1)
    nn.init.constant_(module.weight, 2.0)
    nn.init.constant_(module.bias, 1.0)
    return Replica(module, Layout.of(module), torch.device("cpu"))


def test_each_cut_that_counts_has_a_backward_pass_the_last_one_first() -> None:
    """Loss 5 y(3) + 7 y(10), without y(100): (15, 5) of the loss itself, (70, 7) of the second pass, no third."""
    replica = linear()
    own, counted, unused = (replica.module(torch.full((1, 1), x)) for x in (3.0, 10.0, 100.0))
    cuts = [GraphCut.at(counted), GraphCut.at(unused)]
    passes = replica.gradients((5 * own + 7 * cuts[0].leaf).sum(), cuts)
    assert [[g.item() for g in gradients] for gradients in passes] == [[70.0, 7.0], [15.0, 5.0]]
    assert replica.flatten(passes).tolist() == [85.0, 12.0]


def test_a_loss_without_a_parameter_has_zeros_for_it() -> None:
    replica = linear()
    cut = GraphCut.at(replica.module(torch.full((1, 1), 3.0)))
    passes = replica.gradients(2 * cut.leaf.sum(), [cut])
    assert replica.flatten(passes).tolist() == [6.0, 2.0]
    assert [[g.item() for g in gradients] for gradients in passes] == [[6.0, 2.0], [0.0, 0.0]]


def test_two_conflicts_are_both_removed() -> None:
    """The gradient (1, 1) against (-1, 0) is (0, 1), and that against (0, -1) nothing."""
    gradient = Gradient(linear(), [(torch.ones(1, 1), torch.ones(1))])
    once = gradient.without_conflict(torch.tensor([-1.0, 0.0]))
    assert once.lazy and once.vector.tolist() == [0.0, 1.0]
    assert once.without_conflict(torch.tensor([0.0, -1.0])).vector.tolist() == [0.0, 0.0]


@dataclass(frozen=True)
class KeepsOutputs(Part):
    """A forward pass of its own, whose last outputs it keeps for a loss."""

    name = "keeps-outputs"

    def forward(self, module: nn.Module, x: Tensor, state: Any, message: Any) -> Tensor:
        state["last"] = module(x)
        return state["last"]  # type: ignore[no-any-return]

    def init(self, side: Client | Server) -> None:
        if isinstance(side, Client):
            side.state["scale"] = torch.ones(())

    def loss(self, step: Step) -> Tensor:
        found: Tensor = step.state.pop("last").square().mean()
        return found


def test_a_part_may_have_a_loss_of_its_own_forward_pass() -> None:
    """Its graph is that of a separate batch as well, which is then not differentiated by itself."""
    case = bench("der")
    parts = (*case.build_method().parts, KeepsOutputs())
    assert torch.isfinite(case.change(method=lambda: compose(*parts)).run().params).all()


# SGD in one kernel --------------------------------------------------------------------------------------------
@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Plain SGD by the kernel, on the CPU. Of every step: how many backward passes, is there a reference?"""
    calls: list[tuple[int, bool]] = []

    def descend(self: Replica, passes: Any, *args: Any) -> None:
        calls.append((len(passes), args[-1] is not None))
        original(self, passes, *args)

    original = Replica.descend
    monkeypatch.setattr(replicas, "sgd_kernel", importlib.import_module("everfed.kernels.sgd"))
    monkeypatch.setattr(Replica, "can_descend", True)
    monkeypatch.setattr(Replica, "descend", descend)
    return calls


def closest(case: Bench, kernel: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, bool]]:
    """Requires that runs with and without the kernel agree; the kinds of steps that the kernel did."""
    ours, kinds = case.run(), set(kernel)
    monkeypatch.setattr(Replica, "can_descend", False)
    without = case.run()
    assert torch.allclose(ours.params, without.params, rtol=1e-4, atol=1e-6)
    for client in ours.clients:
        assert _close(ours.clients[client], without.clients[client])
    return kinds


def _close(a: State, b: State) -> bool:
    keys = {key for key in a.get("memory", {}) if key != "host"}
    return all(torch.allclose(a["memory"][key].float(), b["memory"][key].float(), rtol=1e-4, atol=1e-5) for key in keys)


@interpreted
@pytest.mark.parametrize(
    ("method", "optimizer", "kinds"),
    [
        ("der", {}, {(1, False), (2, False)}),
        ("der++", {}, {(1, False), (3, False)}),
        ("fedgp", {}, {(1, False), (1, True)}),
        ("fedgp+der", {}, {(1, False), (2, False), (2, True)}),
        ("fedgp+der", {"momentum": 0.9, "weight_decay": 0.01}, {(1, False), (2, False), (2, True)}),
        ("agem", {}, {(1, False), (1, True)}),
        ("fedgp+agem", {}, {(1, False), (1, True)}),  # one rule before there is a reference, then two
        ("fedgp+der", {"clip": 1.0}, set()),
        ("fedgp+fedprox", {}, set()),  # a rule that the kernel does not know
    ],
)
def test_a_kernel_that_removes_the_conflict_equals_the_steps_one_by_one(
    method: str, optimizer: dict[str, float], kinds: set[tuple[int, bool]], kernel: Any, monkeypatch: Any
) -> None:
    assert closest(bench(method, **optimizer), kernel, monkeypatch) == kinds


@interpreted
def test_a_reference_is_as_long_as_the_parameters(kernel: Any) -> None:
    """And of any type: w = 2, b = 1, gradient (1, 0), reference (-1, 0): nothing is left of the gradient."""
    replica, rate, one = linear(), torch.tensor(1.0), torch.tensor(1.0)
    passes = [(torch.ones(1, 1), torch.zeros(1))]
    replica.descend(passes, rate, 0.0, 0.0, None, (torch.tensor([-1.0, 0.0], dtype=torch.float64), one))
    assert replica.params.tolist() == [2.0, 1.0]
    with pytest.raises(ValueError, match=r"shape \(3,\) for 2 parameters"):
        replica.descend(passes, rate, 0.0, 0.0, None, (torch.zeros(3), one))


@interpreted
def test_rows_by_a_kernel_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minibatches, replayed samples and what is stored, read and written by the kernel that a GPU has for them."""
    kernel = importlib.import_module("everfed.kernels.rows")
    launched: list[bool] = []

    def counted(*args: Any, scatter: bool) -> None:
        launched.append(scatter)
        launch(*args, scatter=scatter)

    launch, case = kernel._launch, bench("fedgp+der")
    without = case.run()
    monkeypatch.setattr(kernel, "_launch", counted)
    monkeypatch.setattr(core_data, "rows_kernel", kernel)
    monkeypatch.setattr(core_data, "_has_rows_kernel", lambda index, tensors, count=0: all(map(kernel.fits, tensors)))
    found = case.run()
    assert torch.equal(found.params, without.params) and {False, True} == set(launched)
    for key in ("x", "y", "logits"):
        assert torch.equal(found.clients[0]["memory"][key], without.clients[0]["memory"][key])


@dataclass(frozen=True)
class Halved(FedGP):
    """Half of the projected gradient."""

    def gradient(self, step: Step, gradient: Gradient) -> Tensor:
        return 0.5 * super().gradient(step, gradient).vector


@interpreted
def test_a_subclass_that_changes_the_rule_has_its_own_rule(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = bench("fedgp")
    parts = [Halved() if isinstance(part, FedGP) else part for part in case.build_method().parts]
    halved = case.change(method=lambda: compose(*parts))
    assert closest(halved, kernel, monkeypatch) == set()
    assert not torch.allclose(halved.run().params, case.run().params)


@dataclass(frozen=True)
class After(Part):
    """Halves the parameters after a step, or leaves them."""

    halves: bool = True
    name = "after"

    def after(self, step: Step) -> None:
        if self.halves:
            step.params[:1].mul_(0.5)


@interpreted
@pytest.mark.parametrize("halves", [True, False])
def test_the_network_sees_what_a_part_did_to_the_parameters(halves: bool, kernel: Any, monkeypatch: Any) -> None:
    """w = 2, b = 1, loss y(1) = 3: the gradient is (1, 1), a step of 0.5 goes to (1.5, 0.5); half of w is 0.75."""
    module = nn.Linear(1, 1)
    nn.init.constant_(module.weight, 2.0)
    nn.init.constant_(module.bias, 1.0)
    replica = Replica(module, Layout.of(module), torch.device("cpu"), "bf16")
    refreshed: list[int] = []
    monkeypatch.setattr(replica, "refresh", partial(_noted, refreshed, replica.refresh))
    empty: Any = None

    def forward(x: Tensor) -> Tensor:
        return replica.module(x.bfloat16()).float()  # type: ignore[no-any-return]

    given = [After(halves)], Optimizer(lr=0.5), {}, forward, lambda outputs, y: outputs.sum()
    training = Training(empty, replica, *given, {}, {}, replica.params)
    training.begin(torch.ones(1, 1), torch.zeros(1), {})
    loss = train_step(training, torch.tensor(0.5))
    assert loss.item() == 3.0 and replica.params.tolist() == [0.75 if halves else 1.5, 0.5]
    assert torch.equal(replica.low.float(), replica.params) and len(refreshed) == halves


def _noted(calls: list[int], function: Any) -> None:
    calls.append(1)
    function()
