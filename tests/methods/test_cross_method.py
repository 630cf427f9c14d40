"""What holds for every method: baselines_replay.md section 12."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from everfed.core import tree
from everfed.core.context import TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.method import Personal, overrides
from everfed.methods import registry as methods
from everfed.methods.replay.er import Replay
from everfed.methods.replay.memory import NAME
from tests.support.presets import each_preset
from tests.support.toy import Bench, Norm, Outcome, Toy, comparable, small_memory
from tests.support.wire import crossed

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

AUGMENTED = Toy(augmented=True)
FAMILY = ["ideal", *dict.fromkeys(name for name, _ in ZERO)]


@pytest.mark.parametrize(("name", "options"), ZERO, ids=lambda value: str(value))
def test_strength_zero_is_fedavg_bit_for_bit(name: str, options: dict[str, dict[str, Any]]) -> None:
    """On a network with dropout and BatchNorm and a stream that augments: separate random streams for everything."""
    zero = Bench(name, options, stream=AUGMENTED, module=Norm).run()
    assert tree.equal(fedavg(Norm).state.model, zero.state.model)
    assert fedavg(Norm).state.rows == zero.state.rows


@cache
def fedavg(module: type[Norm] | None) -> Outcome:
    """What others are compared with, made once."""
    return Bench(stream=Toy() if module is None else AUGMENTED, module=module).run()


@pytest.mark.parametrize("name", FAMILY)
def test_strength_above_zero_is_not(name: str) -> None:
    assert not torch.equal(Bench(name).run().params, fedavg(None).params)


SMALL: dict[str, Any] = {"clients": 2, "rounds_per_task": 1}
STREAMS = {
    # one class, one sample, an empty task, a batch and one sample: a client for each
    "all at once": Toy(
        clients=4, rounds_per_task=1, samples=6, only={0: (2,)}, sizes={(1, 0): 1, (1, 1): 1, (2, 0): 0, (3, 1): 0}
    ),
    "one client in one round": Toy(clients=1, tasks=1, rounds_per_task=1),
}
ONE_BY_ONE = {
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
    check_run(name, stream)


@pytest.mark.slow
@pytest.mark.parametrize("stream", ONE_BY_ONE.values(), ids=ONE_BY_ONE)
@pytest.mark.parametrize("name", each_preset())
def test_every_method_runs_on_every_kind_of_small_stream(name: str, stream: Toy) -> None:
    check_run(name, stream)


def check_run(name: str, stream: Toy) -> None:
    """Who has data trains, the model moves, every task is scored on all of its tests, and everything that is kept is
    finite and survives the wire."""
    options = small_memory(name)
    if "lander" in options:  # its "best" model of a single round is the one that the round started from
        options["lander"] = {**options["lander"], "model": "last"}
    bench = Bench(name, options, stream=stream, train=TrainOptions(1, 5, Optimizer(lr=0.1)))
    outcome = bench.run()
    assert outcome.state.round == stream.rounds
    training = [event for event in outcome.events if event.get("phase") == "train"]
    assert [event["round"] for event in training] == list(range(stream.rounds))
    if trains_on_what_it_is_given(name):
        with_data = [sum(len(stream.data(c, task)) > 0 for c in range(stream.clients)) for task in range(stream.tasks)]
        assert [event["trained"] for event in training] == with_data
    shared = outcome.params.numel()  # none where only statistics of the features travel
    assert not shared or not torch.equal(outcome.params, bench.model()["params"])
    check_scores(outcome, stream, stream.clients if bench.setup().personal else 1)
    personal = [part for part in bench.build_method().parts if isinstance(part, Personal)]
    if not any(overrides(part, "state_for_task") for part in personal):  # then the network is the same
        assert all(seen <= own for row in outcome.state.rows.values() for _, _, seen, own in filter(None, row))
    for kept in (comparable(outcome.state), *outcome.clients.values()):
        assert all(torch.isfinite(value).all() for value in tensors(kept))
        assert tree.equal(crossed(kept), kept)


def check_scores(outcome: Outcome, stream: Toy, models: int) -> None:
    """Each of `models` models is scored on all tests. Where fewer classes compete at least as many answers are right;
    the reported accuracies are these counts."""
    assert sorted(outcome.state.rows) == list(range(stream.tasks))
    for task, row in outcome.state.rows.items():
        assert row[task + 1 :] == [None] * (stream.tasks - 1 - task)
        for scored, full, seen, own in row[: task + 1]:
            assert scored == models * len(stream.test(0)) and 0 <= full <= seen <= scored and own <= scored
    last = [counts[1] / counts[0] for counts in outcome.state.rows[stream.tasks - 1]]
    [event] = [event for event in outcome.events if event["event"] == "evaluation"][-1:]
    assert event["accuracy"] == pytest.approx(last) and event["acc"] == pytest.approx(sum(last) / len(last))


def tensors(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors of a tree."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors(inner)
    elif isinstance(value, Tensor) and value.is_floating_point():
        yield value


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
    parts = methods.build(name).parts
    unions = [part for part in parts if isinstance(part, Replay) and part.mode == "union"]
    return not unions and not {"ideal", "ridge", "ranpac", "fedran"} & {part.name for part in parts}


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
