"""FisherAvg (Matena and Raffel, 2022): parameters averaged by their Fisher information."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from everfed.core.context import TrainOptions
from everfed.core.message import MODEL
from everfed.core.optimizer import Optimizer
from everfed.core.phase import Reduction
from everfed.methods.aggregate.fisheravg import FisherAvg
from tests.support.toy import Bench, Linear, Toy

ONE_STEP = TrainOptions(1, 3000, Optimizer(lr=0.5))


def averaged(part: FisherAvg, start: list[float], *clients: tuple[list[float], list[float], int]) -> Tensor:
    """The new parameters from (trained parameters, Fisher information, samples) of every client."""
    reduction, before = Reduction({"fisheravg": dict(part.reducers())}), torch.tensor(start)
    for number, (params, fisher, samples) in enumerate(clients):
        u = torch.tensor(fisher).clamp_min(part.floor)
        reduction.add(number, {"fisheravg": {"u": u, "v": u * (torch.tensor(params) - before)}}, float(samples))
    model = {"params": before, "stats": torch.zeros(0), "counters": torch.zeros(0)}
    server = Bench("fisheravg").server("fisheravg", {MODEL: model}, reduced=reduction.result()["fisheravg"])
    return part.aggregate(server)["params"]


def test_worked_by_hand() -> None:
    """(1 * 1 + 3 * 3) / 4 = 2.5 and (2 * 2 + 0.5 * 6) / 2.5 = 2.8; by samples, 2 and 1: (2 + 9) / 5 and 11 / 4.5."""
    clients = (([1.0, 2.0], [1.0, 2.0], 2), ([3.0, 6.0], [3.0, 0.5], 1))
    assert torch.allclose(averaged(FisherAvg(), [0.5, -1.0], *clients), torch.tensor([2.5, 2.8]))
    by_samples = averaged(FisherAvg(weighting="samples"), [0.5, -1.0], *clients)
    assert torch.allclose(by_samples, torch.tensor([11 / 5, 11 / 4.5]))


numbers = st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4)
positive = st.lists(st.floats(0.0, 4.0, width=32), min_size=4, max_size=4)


@given(st.lists(st.tuples(numbers, positive), min_size=1, max_size=4), numbers)
def test_is_the_joint_mode_and_lies_between_the_clients(
    drawn: list[tuple[list[float], list[float]]], start: list[float]
):
    clients = [(params, fisher, 1) for params, fisher in drawn]
    found = averaged(FisherAvg(floor=1e-3), start, *clients).double().numpy()
    params = np.array([params for params, _ in drawn], dtype=np.float64)
    fisher = np.maximum(np.array([fisher for _, fisher in drawn], dtype=np.float64), 1e-3)
    assert np.allclose(found, (fisher * params).sum(0) / fisher.sum(0), atol=2e-6)
    assert (found >= params.min(0) - 2e-6).all() and (found <= params.max(0) + 2e-6).all()


def test_a_large_floor_is_fedavg() -> None:
    plain = Bench("fedavg", train=ONE_STEP).run(rounds=2).params
    assert torch.allclose(Bench("fisheravg", {"fisheravg": {"floor": 1e6}}, train=ONE_STEP).run(rounds=2).params, plain)
    assert not torch.allclose(Bench("fisheravg", train=ONE_STEP).run(rounds=2).params, plain, atol=1e-3)


@pytest.mark.parametrize("labels", ["true", "drawn"])
def test_a_round_from_the_equations(labels: str) -> None:
    """Softmax regression has gradients and Fisher information in closed form; every client takes one step."""
    options: dict[str, dict[str, Any]] = {"fisheravg": {"labels": labels, "fisher_samples": 100_000}}
    stream = Toy(samples=3000, only={0: (0, 1), 1: (1, 2, 3)})
    bench = Bench("fisheravg", options, train=ONE_STEP, module=Linear, stream=stream)
    above, below = 0.0, 0.0
    for client in range(3):
        data = bench.stream.data(client, 0)
        x, hot = (data.x.double() / 255).flatten(1).numpy(), np.eye(4)[data.y.numpy()]
        weight = 0.5 * (hot - 0.25).T @ x / len(x)  # one step from 0
        p = np.exp(x @ weight.T)
        p /= p.sum(1, keepdims=True)
        squares = p * (1 - p) if labels == "drawn" else (hot - p) ** 2  # of d log p(y | x) / d outputs, over y ~ p
        fisher = np.maximum(squares.T @ x**2 / len(x), 1e-6)
        above, below = above + fisher * weight, below + fisher
    found = bench.run(rounds=1).params.double().numpy().reshape(4, 16)
    # drawn labels: sampling error of 3000 draws
    error, largest = np.abs(found - above / below).max(), np.abs(above / below).max()
    assert error < (1e-6 if labels == "true" else 0.03) * largest
