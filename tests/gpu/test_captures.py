"""How often the graphs engine captures, on streams whose clients differ in size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from everfed.core.context import Setup, TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.store.clients import ClientStore
from tests.support.toy import Bench, Norm, Toy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Sizes = dict[tuple[int, int], int]


def described(sizes: Sizes, slots: int, threads: int) -> dict[str, Any]:
    from everfed.engines.graphs import Graphs

    stream = Toy(clients=3, rounds_per_task=3, sizes=sizes)
    case = Bench("fedavg", stream=stream, train=TrainOptions(2, 4, Optimizer(lr=0.1)), module=Norm)
    engines: list[Graphs] = []

    def graphs(setup: Setup, store: ClientStore) -> Graphs:
        engine = Graphs(setup, store, case.build_module, "cuda", "bf16", slots=slots, host_threads=threads)
        engine.close = lambda: None  # type: ignore[method-assign]
        engines.append(engine)
        return engine

    case.run(graphs)
    return engines[0].describe()


def test_one_slot_captures_every_shape_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # with minibatches of 4: 9 samples are 4 and 5. The workspace is made for 14 samples and replaced once, for 30
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    found = described({(0, 0): 9, (1, 0): 14, (2, 0): 3, (0, 1): 30, (1, 1): 6, (2, 1): 4}, slots=1, threads=1)
    assert found["captures"] == len({2, 3, 4, 5}) + len({2, 4})
    assert found["capture_seconds"] > 0
    assert torch.backends.cudnn.benchmark, "searching for kernels is switched on again"


def test_clients_of_the_next_task_go_where_their_shapes_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    # in the second task 10 samples go where 14 were (4 and 2), 13 where 9 were (4 and 5), 7 where 3 were (new: 4)
    found = described({(0, 0): 14, (1, 0): 9, (2, 0): 3, (0, 1): 7, (1, 1): 13, (2, 1): 10}, slots=3, threads=3)
    assert found["captures"] == len({4, 2}) + len({4, 5}) + len({3}) + len({4})
