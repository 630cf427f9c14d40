"""FL+SI: synaptic intelligence (Zenke et al., 2017) under federation, as in the baselines of the FedSSI paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from everfed.core.context import TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.core.tree import equal
from everfed.methods.regularise.si import SynapticIntelligence, importance
from tests.support.toy import Bench, Toy

FULL_BATCH = TrainOptions(50, 12, Optimizer(lr=0.005))


def si(**options: Any) -> dict[str, dict[str, Any]]:
    return {"si": options}


def loss_at(bench: Bench, params: Tensor) -> float:
    data, trainer = bench.stream.data(0, 0), bench.trainer()
    outputs = trainer.outputs({**bench.model(), "params": params}, data.x)
    return torch.nn.functional.cross_entropy(outputs, data.y).item()


# the contribution ----------------------------------------------------------------------------------------------------
def test_the_contribution_is_the_drop_of_the_loss() -> None:
    bench = Bench("si", stream=Toy(clients=1), train=FULL_BATCH)
    stopped = bench.run(rounds=1)
    drop = loss_at(bench, bench.model()["params"]) - loss_at(bench, stopped.params)
    assert drop > 0.02
    assert stopped.clients[0]["si"]["contribution"].sum().item() == pytest.approx(drop, rel=0.02)


def test_it_is_accumulated_over_the_rounds_of_a_task() -> None:
    bench = Bench("si", stream=Toy(clients=1), train=FULL_BATCH)
    drop = loss_at(bench, bench.model()["params"]) - loss_at(bench, bench.run(rounds=2).params)
    own = bench.run(rounds=1).clients[0]["si"]["contribution"]
    ctx, state = bench.context(round_index=1), bench.run(rounds=1)
    parts = bench.build_method().parts
    fitted = ctx.train.fit(ctx, parts, state.state.model, state.params, state.clients[0], {}, bench.stream.data(0, 0))
    total = fitted.state["si"]["contribution"]
    assert total.sum() > own.sum()
    assert total.sum().item() == pytest.approx(drop, rel=0.02)


# participation -------------------------------------------------------------------------------------------------------
def test_a_client_that_was_not_selected_keeps_its_importance() -> None:
    stream = Toy(tasks=3, cohorts={2: (0, 2), 3: (0, 2)})
    first, second = (Bench("si", stream=stream).run(rounds=r).clients for r in (2, 4))
    assert torch.equal(first[1]["si"]["omega"], second[1]["si"]["omega"])
    assert not torch.equal(first[0]["si"]["omega"], second[0]["si"]["omega"])
    assert torch.equal(second[0]["si"]["anchor"], second[1]["si"]["anchor"])


# the penalty ---------------------------------------------------------------------------------------------------------
def test_the_penalty_is_not_part_of_the_contributions_gradient() -> None:
    """With the parameters away from the anchor, s of one step is -g (after - before) with the data gradient alone."""
    for strength in (0.0, 3.0):
        bench = Bench("si", si(reg_strength=strength), train=TrainOptions(1, 12, Optimizer(lr=0.1)))
        ctx, model, data = bench.context(round_index=2), bench.model(), bench.stream.data(0, 1)
        size = len(model["params"])
        state = {"client": {}, "si": {"omega": torch.ones(size), "anchor": torch.zeros(size)}}
        fitted = ctx.train.fit(ctx, bench.build_method().parts, model, model["params"], state, {}, data)
        g = ctx.train.gradient(ctx, model, data.x, data.y, tag="test")
        moved = fitted.model["params"] - model["params"]
        assert torch.allclose(fitted.state["si"]["contribution"], -g * moved, atol=1e-7)
        assert torch.allclose(moved, -0.1 * (g + 2 * strength * model["params"]), atol=1e-6)


# importance ----------------------------------------------------------------------------------------------------------
def test_importance_is_computed_from_the_global_models() -> None:
    bench = Bench("si", si(eps=0.01))
    start, end = bench.model()["params"], bench.run(rounds=2).params
    s = torch.randn(len(start), generator=torch.Generator().manual_seed(0))
    own = {"si": {"anchor": start, "contribution": s}}
    client = bench.client("si", own, 1, model={"params": end}, round_index=1, phase="consolidate")
    SynapticIntelligence(eps=0.01).consolidate(client)
    omega = client.state["omega"]
    expected = torch.clamp(s / ((end - start) ** 2 + 0.01), min=0)
    assert torch.allclose(omega, expected)
    assert torch.equal(omega, importance(torch.zeros_like(s), s, (end - start).square(), 0.01))
    assert set(client.state) == {"omega", "anchor"}  # s is reset


# what it reduces to --------------------------------------------------------------------------------------------------
def test_no_penalty_is_fedavg() -> None:
    bench = Bench("fedavg")
    assert equal(bench.run().state.model, bench.change(method="si", options=si(reg_strength=0.0)).run().state.model)
    assert not torch.equal(bench.run().params, bench.change(method="si").run().params)


def test_fedssi_without_its_surrogate_is_not_fl_si() -> None:
    without = Bench("fedssi", {"fedssi": {"psm_epochs": 0}}).run()
    assert not torch.equal(without.params, Bench("si").run().params)
    assert torch.equal(without.params, Bench("fedavg").run().params)


# state ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rounds", [1, 3, 4])
def test_three_vectors_in_a_task_and_none_of_the_scratch(rounds: int) -> None:
    for client in Bench("si").run(rounds=rounds).clients.values():
        assert set(client["si"]) == {"anchor", "contribution"} | ({"omega"} if rounds > 2 else set())


def test_rounds_cost_the_same_bytes_as_fedavg() -> None:
    assert Bench("si").run().state.traffic.as_dict() == Bench("fedavg").run().state.traffic.as_dict()
