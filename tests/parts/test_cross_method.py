"""What holds for every method: baselines_replay.md section 12."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from everfed import methods
from everfed.core import tree
from everfed.core.context import TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.core.part import overrides
from everfed.parts.memory.buffer import NAME
from tests.support.presets import each_preset
from tests.support.toy import Bench, Norm, Toy

ZERO: list[tuple[str, dict[str, dict[str, Any]]]] = [
    ("fedprox", {"fedprox": {"mu": 0.0}}),
    ("fedcurv", {"fedcurv": {"weight": 0.0}}),
    ("er", {"memory": {"size": 0}}),
    ("der", {"der": {"weight": 0.0}}),
    ("der", {"memory": {"size": 0}}),
    ("der++", {"der++": {"weight": 0.0, "label_weight": 0.0}}),
    ("der++", {"memory": {"size": 0}}),
    ("agem", {"memory": {"size": 0}}),
    ("fedgp", {"memory": {"size": 0}}),
    ("fedgp+fedprox", {"memory": {"size": 0}, "fedprox": {"mu": 0.0}}),
    ("fedgp+fedcurv", {"memory": {"size": 0}, "fedcurv": {"weight": 0.0}}),
    ("fedgp+er", {"memory": {"size": 0}}),
    ("fedgp+der", {"memory": {"size": 0}}),
    ("fedgp+der++", {"memory": {"size": 0}}),
    ("fedgp+agem", {"memory": {"size": 0}}),
]

FAMILY = ["ideal", *dict.fromkeys(name for name, _ in ZERO)]


@pytest.mark.parametrize(("name", "options"), ZERO, ids=lambda value: str(value))
def test_strength_zero_is_fedavg_bit_for_bit(name: str, options: dict[str, dict[str, Any]]) -> None:
    """On a network with dropout and BatchNorm and a stream that augments: separate random streams for everything."""
    stream = Toy(augmented=True)
    plain = Bench(stream=stream, module=Norm).run()
    zero = Bench(name, options, stream=stream, module=Norm).run()
    assert tree.equal(plain.state.model, zero.state.model)
    assert plain.state.rows == zero.state.rows


@pytest.mark.parametrize("name", FAMILY)
def test_strength_above_zero_is_not(name: str) -> None:
    assert not torch.equal(Bench(name).run().params, Bench().run().params)


SMALL: dict[str, Any] = {"clients": 2, "rounds_per_task": 1}
STREAMS = {
    "one client": Toy(clients=1, rounds_per_task=1),
    "one class": Toy(**SMALL, only={0: (2,), 1: (2,)}),
    "one sample": Toy(**SMALL, samples=1),
    "an empty task": Toy(**SMALL, sizes={(0, 0): 0, (1, 1): 0}),
    "one round": Toy(clients=2, tasks=1, rounds_per_task=1),
    "a batch and one sample": Toy(**SMALL, samples=6),
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("name", each_preset())
def test_every_method_runs_on_small_streams(name: str, stream: Toy) -> None:
    outcome = Bench(name, stream=stream, train=TrainOptions(1, 5, Optimizer(lr=0.1))).run()
    assert outcome.state.round == stream.rounds
    assert torch.isfinite(outcome.params).all()


@pytest.mark.parametrize("name", ["er", "der", "der++", "agem", "fedgp", "fedgp+der"])
def test_a_buffer_larger_than_all_data(name: str) -> None:
    outcome = Bench(name, {"memory": {"size": 500}}).run()
    assert all(state[NAME]["host"]["n"] == 24 for state in outcome.clients.values())
    assert torch.isfinite(outcome.params).all()


def test_a_last_batch_of_one_sample_passes_batchnorm() -> None:
    """16 samples by 5: the last one joins the third minibatch (BatchNorm1d refuses a batch of one)."""

    class Flat(torch.nn.Module):
        def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(16, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, classes)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)  # type: ignore[no-any-return]

    outcome = Bench(module=Flat, stream=Toy(samples=16)).run(rounds=1)
    assert outcome.state.model["counters"].tolist() == [2 * 3]


def trains_on_what_it_is_given(name: str) -> bool:
    """No part of it changes the data set (as Ideal does)."""
    return not any(overrides(part, "dataset") for part in methods.build(name).parts)


@dataclass(frozen=True)
class Watching(Toy):
    """Keeps every minibatch that is augmented, with its draws, in a list that belongs to the test."""

    augmented: bool = True
    log: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def augment(self, x: Tensor, draws: Tensor) -> Tensor:
        self.log.append((x.clone(), draws.clone()))
        return super().augment(x, draws)


@pytest.mark.parametrize("name", [name for name in FAMILY if trains_on_what_it_is_given(name)])
def test_no_method_changes_the_order_of_the_data(name: str) -> None:
    plain, other = Watching(**SMALL), Watching(**SMALL)
    Bench(stream=plain).run()
    Bench(name, stream=other).run()
    assert len(plain.log) == 2 * 2 * 2 * 3  # tasks x clients x epochs x minibatches
    assert all(
        torch.equal(a, b) for one, two in zip(plain.log, other.log, strict=True) for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("name", ["fedavg", "fedcurv", "fedgp+der", "fedgp+agem"])
def test_the_same_seed_gives_the_same_bits_and_another_does_not(name: str) -> None:
    """The same bits for every method: wire and resume parity."""
    first, again, other = (Bench(name, module=Norm, seed=seed).run(rounds=3).params for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", ["er", "der++"])
def test_replay_under_task_logits(name: str) -> None:
    """Two classes per task; with train.logits = "task" a replayed label of task 1 must not be masked away."""

    class Classes(Toy):
        def labels(self, task: int) -> tuple[int, ...]:
            return (2 * task, 2 * task + 1)

        def _draw(self, rng: Any, count: int, task: int, only: Any) -> Any:
            return super()._draw(rng, count, task, self.labels(task))

    train = TrainOptions(1, 5, Optimizer(lr=0.1), logits="task")
    assert torch.isfinite(Bench(name, stream=Classes(), train=train).run().params).all()
