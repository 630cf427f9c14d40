"""Networks with random layers of their own: captured steps draw what eager ones draw, whatever the global state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from everfed.core.context import Setup
from everfed.core.engine import Engine
from everfed.engines.eager import Eager
from everfed.engines.graphs import Graphs
from everfed.store.clients import ClientStore
from tests.parity.test_random_layers import Attention, Residual, bench

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def trained(module: type[nn.Module], kind: type[Eager] | type[Graphs], seed: int) -> Tensor:
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    case = bench(module)

    def build(setup: Setup, store: ClientStore) -> Engine:
        return kind(setup, store, case.build_module, "cuda", "fp32")

    return case.run(build).params.cpu()


@pytest.mark.parametrize("module", [Attention, Residual])
def test_captured_steps_equal_eager_ones_bit_for_bit(module: type[nn.Module]) -> None:
    first = trained(module, Graphs, seed=1)
    assert torch.equal(first, trained(module, Graphs, seed=2))
    assert torch.equal(first, trained(module, Eager, seed=3))
