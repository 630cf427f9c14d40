"""FedAvg (McMahan et al., 2017): the mean of the clients' models, uniform or weighted by samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from everfed.core.client import run_client
from everfed.core.context import TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.core.phase import Reduction
from everfed.methods.aggregate.fedavg import FedAvg
from tests.support.toy import Bench, Norm, Toy

FULL_BATCH = TrainOptions(1, 1000, Optimizer(lr=0.2))


def trained(bench: Bench, client: int) -> dict[str, Tensor]:
    """What `client` uploads in round 0."""
    method, ctx = bench.build_method(), bench.context(client)
    data, message = bench.stream.data(client, 0), {"model": dict(bench.model())}
    return run_client(method, method.train_phase(), bench.new_client(client), message, data, ctx)[1].values["fedavg"]


def averaged(part: FedAvg, *models: tuple[dict[str, Tensor], int]) -> dict[str, Any]:
    reduction = Reduction({"fedavg": dict(part.reducers())})
    for client, (model, samples) in enumerate(models):
        reduction.add(client, {"fedavg": model}, float(samples))
    return dict(part.aggregate(Bench().server("fedavg", {"model": models[0][0]}, reduced=reduction.result()["fedavg"])))


def test_one_client_is_taken_over_exactly() -> None:
    bench = Bench(stream=Toy(clients=1), module=Norm)
    model, upload = bench.run(rounds=1).state.model, trained(bench, 0)
    assert all(torch.equal(model[key], upload[key]) for key in ("params", "stats", "counters"))


@given(st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=5), st.integers(1, 7))
def test_equal_models_stay_what_they_are(numbers: list[float], clients: int) -> None:
    model = {"params": torch.tensor(numbers)}
    assert torch.equal(averaged(FedAvg(), *[(model, 5)] * clients)["params"], model["params"])


@given(st.permutations(range(6)), st.booleans())
def test_the_order_of_clients_is_irrelevant(order: list[int], weighted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    models = [({"params": torch.randn(20, generator=generator)}, 3 + k) for k in range(6)]
    part = FedAvg("samples" if weighted else "uniform")
    one, other = averaged(part, *models), averaged(part, *(models[k] for k in order))
    assert torch.allclose(one["params"], other["params"], rtol=2e-7, atol=0)


def test_a_full_batch_step_of_equal_clients_is_gradient_descent_on_the_union() -> None:
    bench = Bench(train=FULL_BATCH)
    data = [bench.stream.data(client, 0) for client in range(3)]
    module = bench.build_module()
    outputs = module(bench.stream.inputs(torch.cat([d.x for d in data])))
    torch.nn.functional.cross_entropy(outputs, torch.cat([d.y for d in data])).backward()
    descended = torch.cat([(p - 0.2 * p.grad).detach().reshape(-1) for p in module.parameters()])
    assert torch.allclose(bench.run(rounds=1).params, descended, rtol=1e-5, atol=1e-7)


def test_unequal_clients_weighted_by_samples_are_gradient_descent_on_the_union() -> None:
    stream = Toy(sizes={(0, 0): 5, (1, 0): 11, (2, 0): 23})
    bench = Bench(options={"fedavg": {"weighting": "samples"}}, train=FULL_BATCH, stream=stream)
    data = [stream.data(client, 0) for client in range(3)]
    module = bench.build_module()
    outputs = module(stream.inputs(torch.cat([d.x for d in data])))
    torch.nn.functional.cross_entropy(outputs, torch.cat([d.y for d in data])).backward()
    descended = torch.cat([(p - 0.2 * p.grad).detach().reshape(-1) for p in module.parameters()])
    assert torch.allclose(bench.run(rounds=1).params, descended, rtol=1e-5, atol=1e-7)
    uniform = bench.change(options={}).run(rounds=1).params
    assert not torch.allclose(uniform, descended, rtol=1e-3, atol=1e-5)


def test_lr_zero_keeps_the_model() -> None:
    bench = Bench(train=TrainOptions(2, 5, Optimizer(lr=0.0)))
    assert torch.equal(bench.run().params, bench.model()["params"])


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_a_client_without_samples_changes_nothing(weighting: str) -> None:
    options = {"fedavg": {"weighting": weighting}}
    without = Bench(options=options, stream=Toy(clients=2)).run()
    with_empty = Bench(options=options, stream=Toy(clients=3, sizes={(2, 0): 0, (2, 1): 0})).run()
    assert torch.equal(without.params, with_empty.params)


def test_weighting_by_equal_numbers_of_samples_is_uniform() -> None:
    uniform = Bench(module=Norm).run().params
    assert torch.allclose(
        uniform, Bench(options={"fedavg": {"weighting": "samples"}}, module=Norm).run().params, rtol=1e-5, atol=1e-7
    )


def test_weights_by_hand() -> None:
    models = (({"params": torch.tensor([0.0])}, 10), ({"params": torch.tensor([4.0])}, 30))
    assert averaged(FedAvg(), *models)["params"].tolist() == [2.0]
    assert averaged(FedAvg("samples"), *models)["params"].tolist() == [3.0]


def test_integer_buffers_keep_their_type() -> None:
    bench = Bench(module=Norm, stream=Toy(sizes={(0, 0): 5, (1, 0): 10, (2, 0): 15}))
    model = bench.run(rounds=1).state.model
    assert model["counters"].dtype == torch.int64
    assert model["counters"].tolist() == [4]  # 2, 4 and 6 minibatches
    assert model["stats"].dtype == torch.float32


def test_what_no_client_sent_stays_as_it_was() -> None:
    model, sent = {"params": torch.ones(2), "stats": torch.full((1,), 7.0)}, {"params": torch.zeros(2), "stats": None}
    made = FedAvg().aggregate(Bench().server("fedavg", {"model": model}, reduced=sent))
    assert made["params"].tolist() == [0.0, 0.0] and made["stats"].tolist() == [7.0]


@pytest.mark.parametrize("reducer", ["mean", "norm-clipping"])
@pytest.mark.parametrize("batchnorm", ["mean", "local"])
def test_statistics_that_stay_local_are_not_uploaded(reducer: str, batchnorm: str) -> None:
    bench = Bench(module=Norm, train=TrainOptions(1, 5, Optimizer(lr=0.1), batchnorm=batchnorm))
    sent = FedAvg(reducer=reducer).upload(bench.client("fedavg"))
    first = "params" if reducer == "mean" else "update"
    assert set(sent) == ({first} if batchnorm == "local" else {first, "stats", "counters"})
