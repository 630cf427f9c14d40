"""How often the graphs engine captures, on streams whose clients differ in size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from everfed import Optimizer, TrainOptions
from everfed.core.context import World
from everfed.store.clients import ClientStore
from tests.support.toy import Bench, Norm, Toy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# with minibatches of 4: rests of 1 (joins the minibatch before), 2 and 3
SIZES = {(0, 0): 9, (1, 0): 14, (2, 0): 3, (0, 1): 30, (1, 1): 6, (2, 1): 4}


def described(slots: int, threads: int) -> dict[str, Any]:
    from everfed.engines.graphs import Graphs

    stream = Toy(clients=3, rounds_per_task=3, sizes=SIZES)
    case = Bench("fedavg", stream=stream, train=TrainOptions(2, 4, Optimizer(lr=0.1)), module=Norm)
    engines: list[Graphs] = []

    def graphs(world: World, store: ClientStore) -> Graphs:
        engine = Graphs(world, store, case.build_module, "cuda", "bf16", slots=slots, host_threads=threads)
        engine.close = lambda: None  # type: ignore[method-assign]
        engines.append(engine)
        return engine

    case.run(graphs)
    return engines[0].describe()


def test_one_slot_captures_every_shape_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # the workspace is made for the largest client of the first task (14) and replaced once, for 30 samples
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    found = described(1, 1)
    assert found["captures"] == len({2, 3, 4, 5}) + len({2, 4})
    assert found["capture_seconds"] > 0
    assert torch.backends.cudnn.benchmark, "searching for kernels is switched on again"


def test_slots_served_by_several_threads_capture_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    found = described(3, 3)
    # a client each, the largest first: 14, 9 and 3 samples, then 30 (which 14's workspace cannot hold), 6 and 4
    assert found["captures"] == len({4, 2}) + len({4, 5}) + len({3}) + len({4, 2}) + len({2}) + len({4})
