"""Rates that move with every step, groups, clipping and AdamW: captured steps equal eager ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from everfed.core.context import Setup
from everfed.core.engine import Engine
from everfed.engines.eager import Eager
from everfed.engines.graphs import Graphs
from everfed.store.clients import ClientStore
from tests.core.test_optimizer_groups import bench

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def trained(kind: type[Eager] | type[Graphs], method: str) -> Tensor:
    case = bench(method)

    def build(setup: Setup, store: ClientStore) -> Engine:
        return kind(setup, store, case.build_module, "cuda", "fp32")

    return case.run(build).params.cpu()


@pytest.mark.parametrize("method", ["fedavg", "der"])
def test_captured_steps_equal_eager_ones_bit_for_bit(method: str) -> None:
    assert torch.equal(trained(Graphs, method), trained(Eager, method))
