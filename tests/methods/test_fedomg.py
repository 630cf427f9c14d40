"""FedOMG: the server's step is the matched update. Closed forms of STAMP's Eq. 2 for two updates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from everfed.core.context import TrainOptions
from everfed.core.message import MODEL
from everfed.core.optimizer import Optimizer
from everfed.methods import registry as methods
from everfed.methods.project.fedomg import FedOMG
from everfed.methods.project.matching import match_gradients
from tests.support.toy import Bench, Given, Linear, Norm, Toy, mean_square

RHO = {"none": 1.0, "1+k": 1.25, "1+k2": 1.0625}
ONE_STEP = TrainOptions(1, 100, Optimizer(lr=0.1))


def aggregated(updates: list[list[float]], **options: object) -> Tensor:
    """The model after matching `updates`, from (0, ..., 0)."""
    part = FedOMG(**options)  # type: ignore[arg-type]
    reduced = {"update": {client: torch.tensor(update) for client, update in enumerate(updates)}}
    empty = torch.zeros(0)
    server = {MODEL: {"params": torch.zeros(len(updates[0])), "stats": empty, "counters": empty}}
    return part.aggregate(Bench().server("fedomg", server, reduced=reduced))["params"]


@pytest.mark.parametrize(
    ("updates", "scale", "expected"),
    [
        ([[3, 4], [3, 4]], "none", (3.75, 5.0)),
        ([[3, 4], [3, 4]], "1+k2", (3.529412, 4.705882)),
        ([[3, 4], [3, 4]], "1+k", (3.0, 4.0)),
        ([[1, 0], [0, 1]], "none", (0.625, 0.625)),
        ([[1, 0], [-0.5, 1]], "none", (0.375, 0.5625)),
        ([[1, 0], [-0.5, 1]], "1+k2", (0.352941, 0.529412)),
        ([[1, 0], [-0.5, 1]], "1+k", (0.3, 0.45)),
        ([[1, 0], [-0.5, 0]], "none", (0.1875, 0.0)),
        ([[10, 0], [-1, 1]], "none", (3.699609, 1.300391)),
        ([[1, 0], [-1, 0]], "none", (0.0, 0.0)),
        ([[0, 0], [0, 0]], "none", (0.0, 0.0)),
        ([[3, 4]], "none", (3.75, 5.0)),
    ],
)
def test_the_server_adds_what_matching_gives(updates: list[list[float]], scale: str, expected: tuple[float]) -> None:
    result = aggregated([[float(v) for v in update] for update in updates], scale=scale)
    assert torch.allclose(result, torch.tensor(expected), atol=1e-5)


def test_a_zero_update_beside_another_gives_no_nan() -> None:
    x, y = aggregated([[1.0, 0.0], [0.0, 0.0]], scale="none").tolist()
    assert 0.5 <= x <= 0.625 + 1e-6 and y == 0.0


def test_no_reply_leaves_the_model() -> None:
    server = {MODEL: {"params": torch.ones(2), "stats": torch.zeros(0), "counters": torch.zeros(0)}}
    made = FedOMG().aggregate(Bench().server("fedomg", server, reduced={"update": None}))
    assert torch.equal(made["params"], torch.ones(2))


@pytest.mark.parametrize("scale", RHO)
@pytest.mark.parametrize("clients", [1, 3])
def test_identical_clients_take_a_longer_step(scale: str, clients: int) -> None:
    """(1 + kappa) / rho times the update."""
    x, y = torch.tensor([[1.0, 2.0], [0.5, -1.0]]), torch.tensor([1.0, -1.0])
    stream = Given(clients=clients, tasks=1, rounds_per_task=1, table={(c, 0): (x, y) for c in range(clients)},
                   classes=1, objective=mean_square)  # fmt: skip
    bench = Bench("fedomg", {"fedomg": {"scale": scale}}, stream, ONE_STEP, Linear)
    update = 0.1 * (x * y.unsqueeze(1)).mean(0)  # one gradient step on half the mean squared error, from zero
    assert torch.allclose(bench.run().params, 1.25 / RHO[scale] * update, atol=1e-6)


@pytest.mark.parametrize("scale", RHO)
def test_kappa_zero_is_fedavg(scale: str) -> None:
    """rho(0) = 1."""
    flat = Bench("fedomg", {"fedomg": {"kappa": 0.0, "scale": scale}}, module=Norm).run()
    plain = Bench("fedavg", module=Norm).run()
    assert torch.allclose(flat.params, plain.params, atol=1e-6)


def test_weights_shift_the_mean() -> None:
    stream = Toy(clients=2, sizes={(0, 0): 4, (1, 0): 12}, tasks=1, rounds_per_task=1)
    options = {"fedomg": {"kappa": 0.0, "weighting": "samples"}}
    weighted = Bench("fedomg", options, stream).run()
    assert torch.allclose(
        weighted.params, Bench("fedavg", {"fedavg": {"weighting": "samples"}}, stream).run().params, atol=1e-6
    )
    assert not torch.allclose(weighted.params, Bench("fedavg", stream=stream).run().params, atol=1e-4)


def test_statistics_are_averaged_not_kept() -> None:
    """With two clients that saw different data."""
    stream = Toy(clients=2, tasks=1, rounds_per_task=1)
    matched, averaged = (Bench(name, stream=stream, module=Norm).run() for name in ("fedomg", "fedavg"))
    assert torch.equal(matched.state.model["stats"], averaged.state.model["stats"])
    assert torch.equal(matched.state.model["counters"], averaged.state.model["counters"])
    assert not torch.equal(matched.state.model["stats"], Bench(module=Norm).model()["stats"])


def test_traffic_is_fedavgs() -> None:
    traffic = [Bench(name, module=Norm).run().state.traffic.as_dict() for name in ("fedavg", "fedomg")]
    assert [t["bytes_up"] for t in traffic] == [traffic[0]["bytes_up"]] * 2
    assert [t["bytes_down"] for t in traffic] == [traffic[0]["bytes_down"]] * 2


def test_the_server_sees_single_updates() -> None:
    assert methods.build("fedomg").reveals() == {"train": ["fedomg"]}


def test_angles_are_reported_on_demand() -> None:
    quiet = Bench("fedomg").run()
    assert not [e for e in quiet.events if e["event"] == "measure"]
    reported = [e for e in Bench("fedomg", {"fedomg": {"angles": True}}).run().events if e["event"] == "measure"]
    assert len(reported) == 4 and {e["part"] for e in reported} == {"fedomg"}
    m = reported[0]["spatial_cosine"]
    assert -1.0 <= m <= 1.0
    assert reported[0]["spatial_cosine_with_self"] == pytest.approx((1 + 2 * m) / 3)


def test_one_round_matches_the_updates_of_the_clients() -> None:
    bench = Bench("fedomg", stream=Toy(tasks=1, rounds_per_task=1))
    start = bench.model()["params"]
    alone = [
        Bench(stream=Toy(tasks=1, rounds_per_task=1, cohorts={0: (client,)})).run().params - start
        for client in range(3)
    ]
    assert torch.allclose(bench.run().params, start + match_gradients(alone, 0.25, "1+k2"), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"kappa": 1.0}, "kappa"), ({"kappa": -0.1}, "kappa"), ({"scale": "k"}, "none, 1\\+k, 1\\+k2"),
     ({"solver": "x"}, "exact, softmax_sgd"), ({"rate": 0.0}, "rate"), ({"weighting": "x"}, "weighting")],
)  # fmt: skip
def test_options_are_checked(options: dict[str, object], match: str) -> None:
    with pytest.raises(methods.MethodError, match=match):
        methods.build("fedomg", {"fedomg": options})


def test_random_updates_stay_in_the_ball() -> None:
    """The defining inequalities of matching, through the aggregating part."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        updates = rng.normal(size=(rng.integers(2, 9), 5)).astype(np.float32)
        mean = torch.from_numpy(updates.mean(0))
        moved = aggregated(updates.tolist(), scale="none")
        assert (moved - mean).norm() <= 0.25 * mean.norm() + 1e-5
        assert (torch.from_numpy(updates) @ moved).min() >= (torch.from_numpy(updates) @ mean).min() - 1e-5
