"""What the graphs engine does around its CUDA graphs, on the CPU: a graph is replaced by its body, run as it comes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from everfed import Optimizer, TrainOptions
from everfed.core.context import Setup
from everfed.core.schedule import Table
from everfed.engines import captured
from everfed.engines.captured import CapturedTrainer, Workspace, kernel_search, share_of_steps
from everfed.engines.capturing import Capturing
from everfed.engines.eager import Eager
from everfed.engines.graphs import Graphs
from everfed.store.clients import ClientStore
from tests.support.toy import Bench, Norm, Toy

# with minibatches of 4: a ninth sample joins the minibatch before it, 3 and 1 are less than a minibatch
SIZES = {(0, 0): 9, (1, 0): 14, (2, 0): 3, (3, 0): 0, (0, 1): 30, (1, 1): 6, (2, 1): 4, (3, 1): 1}


class Body:
    """Stands for a CUDA graph; as in one, the network's mode is that of the capture."""

    def __init__(self, body: Callable[[], None], module: nn.Module) -> None:
        self.body, self.module, self.training = body, module, module.training

    def replay(self) -> None:
        self.module.train(self.training)
        self.body()


class Captures:
    """Replaces what needs a GPU, and notes of every capture whether it was tuned and in which thread it ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tuned: list[bool] = []
        self.threads: set[int] = set()
        self.capturing = Capturing()
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", itertools.count().__next__)
        monkeypatch.setattr(CapturedTrainer, "_capture", lambda *args: self._capture(*args))
        monkeypatch.setattr(captured, "_milliseconds", lambda graph: 1.0)

    def _capture(
        self, slot: CapturedTrainer, body: Callable[[], None], prepare: Callable[[], None], tuned: bool
    ) -> Body:
        for _ in range(2):
            prepare()
            body()
        self.tuned.append(tuned)
        self.threads.add(threading.get_ident())
        return Body(body, slot.replica.module)

    def slot(self, setup: Setup, build_module: Any, largest: int = 0) -> CapturedTrainer:
        given = (setup.stream, setup.facts.layout, build_module, "cpu", "fp32", setup.method.owner("forward"))
        slot = CapturedTrainer(*given, capturing=self.capturing, on_eager=lambda part: None)
        slot.largest = largest
        return slot


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    return Captures(monkeypatch)


def bench(method: str) -> Bench:
    stream = Toy(clients=4, sizes=SIZES, augmented=True)
    return Bench(method, stream=stream, train=TrainOptions(2, 4, Optimizer(lr=0.1)), module=Norm)


def run(case: Bench, captures: Captures, largest: int = 0) -> tuple[torch.Tensor, CapturedTrainer]:
    """The shared model at the end, and the slot that trained every client."""
    slots: list[CapturedTrainer] = []

    class OneSlot(Eager):
        def __init__(self, setup: Setup, store: ClientStore) -> None:
            super().__init__(setup, store, case.build_module)
            self.trainer = captures.slot(setup, case.build_module, largest)
            slots.append(self.trainer)

    return case.run(OneSlot).params, slots[0]


@pytest.mark.parametrize("method", ["fedavg", "fedgp+der", "agem", "fedcurv", "mfcl", "fedssi"])
def test_steps_from_fixed_places_equal_steps_as_they_come(method: str, captures: Captures) -> None:
    case = bench(method)
    assert torch.equal(run(case, captures)[0], case.run().params)
    assert captures.tuned


def test_a_shape_is_captured_once_whatever_the_sizes_of_clients(captures: Captures) -> None:
    _, slot = run(bench("fedavg"), captures, largest=30)
    (workspace,) = slot._workspaces.values()
    # minibatches of 4, a last one of 1, 2 or 3, and one that a fifth sample joined; with the draws of augmentation
    assert sorted(workspace.graphs) == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]
    assert slot.captures == len(captures.tuned) == 5


def test_a_workspace_that_becomes_too_small_is_replaced_and_freed(captures: Captures) -> None:
    made: list[Workspace] = []
    case, plain = bench("fedavg"), Workspace.__init__

    def noted(self: Workspace, *args: Any) -> None:
        plain(self, *args)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "__init__", noted)
        params, slot = run(case, captures)
    *replaced, last = made
    assert [one.capacity for one in made] == [12, 18, 38]  # 9, 14 and 30 samples, a quarter more, and one
    assert all(not one.graphs and one.step is None for one in replaced)
    assert list(slot._workspaces.values()) == [last]
    assert slot._pool == len(replaced)  # PyTorch refuses a pool whose graphs are all gone
    assert torch.equal(params, case.run().params)


def test_all_slots_capture_in_one_thread_and_errors_reach_the_caller(captures: Captures) -> None:
    case = bench("fedavg")
    for _ in range(2):
        run(case, captures)
    assert len(captures.threads) == 1
    assert captures.threads != {threading.get_ident()}
    slot = run(case, captures)[1]
    with pytest.raises(ZeroDivisionError):
        slot.capture(lambda: print(1 // 0), lambda: None, tuned=False)


def test_kernels_are_searched_only_for_shapes_that_are_frequent(captures: Captures) -> None:
    stream = Toy(clients=1, tasks=1, rounds_per_task=1, sizes={(0, 0): 27})
    run(Bench("fedavg", stream=stream, train=TrainOptions(1, 4)), captures)
    assert captures.tuned == [True, False]  # six minibatches of 4, one of 3


def test_the_share_of_steps_counts_the_shapes_of_all_tables() -> None:
    four, three, one = np.arange(4), np.arange(3), np.arange(1)
    core = {"rows": Table.of([four] * 5 + [three])}
    assert [share_of_steps({"core": core}, index) for index in (0, 4, 5)] == [5 / 6, 5 / 6, 1 / 6]
    both = {"core": core, "der": {"rows": Table.of([four] * 2 + [one] * 4)}}
    assert [share_of_steps(both, index) for index in (0, 2, 5)] == [2 / 6, 3 / 6, 1 / 6]


def test_slots_remember_the_last_minibatches_that_they_met() -> None:
    slots: list[Any] = [SimpleNamespace(shapes=set()) for _ in range(3)]
    engine: Any = SimpleNamespace(setup=SimpleNamespace(options=TrainOptions(batch_size=32)))
    first = Graphs._deal(engine, slots, {0: 64 + 5, 1: 32 + 9, 2: 7})
    met = {min(slot.shapes): hand for slot, hand in zip(slots, first, strict=True)}
    assert met == {5: [0], 9: [1], 7: [2]}
    second = Graphs._deal(engine, slots, {0: 96 + 7, 1: 64 + 5, 2: 32 + 9})  # the largest has the shape of the smallest
    assert {min(slot.shapes): hand for slot, hand in zip(slots, second, strict=True)} == {7: [0], 5: [1], 9: [2]}


@pytest.mark.parametrize(
    ("before", "wanted", "inside"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_kernel_search_is_never_switched_on_where_it_is_off(
    before: bool, wanted: bool, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    with pytest.raises(KeyError), kernel_search(wanted):
        assert torch.backends.cudnn.benchmark is inside
        raise KeyError
    assert torch.backends.cudnn.benchmark is before
