"""Short steps of equal shapes are replayed several at a time; on the CPU, where a graph is replaced by its body."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from everfed import Optimizer, TrainOptions
from everfed.core.context import Setup
from everfed.engines import captured
from everfed.engines.captured import CapturedTrainer
from everfed.engines.capturing import Capturing
from everfed.engines.eager import Eager
from everfed.store.clients import ClientStore
from tests.support.toy import Bench, Norm, Toy


class Body:
    """Stands for a CUDA graph, and counts its replays."""

    def __init__(self, body: Callable[[], None], trainer: CapturedTrainer, replays: Counter[Any]) -> None:
        self.body, self.module, self.replays = body, trainer.replica.module, replays

    def replay(self) -> None:
        self.module.train()
        self.body()
        self.replays[self] += 1


def trained(case: Bench, monkeypatch: pytest.MonkeyPatch, milliseconds: float) -> tuple[torch.Tensor, list[int]]:
    """The shared model, and how often each captured graph was replayed, the most frequent first."""
    replays: Counter[Any] = Counter()

    def capture(trainer: CapturedTrainer, body: Callable[[], None], prepare: Callable[[], None], tuned: bool) -> Body:
        prepare()
        body()
        return Body(body, trainer, replays)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(CapturedTrainer, "capture", capture)
    monkeypatch.setattr(captured, "_milliseconds", lambda graph: milliseconds)

    def engine(setup: Setup, store: ClientStore) -> Eager:
        made = Eager(setup, store, case.build_module)
        made.trainer = CapturedTrainer(
            setup.stream,
            setup.facts.layout,
            case.build_module,
            "cpu",
            "fp32",
            setup.method.owner("forward"),
            capturing=Capturing(),
            on_eager=lambda part: None,
        )
        return made

    return case.run(engine).params, sorted(replays.values(), reverse=True)


def bench(method: str) -> Bench:
    """Two clients with minibatches of 4, 4, 4, 4, 4 and 3 samples, twice a round, two tasks of two rounds."""
    stream = Toy(clients=2, samples=23, rounds_per_task=2, augmented=True)
    return Bench(method, stream=stream, train=TrainOptions(2, 4, Optimizer(lr=0.1)), module=Norm)


@pytest.fixture(autouse=True)
def three_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "SEVERAL", 3)
    monkeypatch.setattr(captured, "OFTEN", 4)


def test_several_steps_at_once_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = bench("fedgp+der")
    model, _ = trained(case, monkeypatch, milliseconds=0.1)
    assert torch.equal(model, case.run().params)


def test_they_are_captured_when_a_step_is_short_and_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 times five full minibatches, and one that is smaller. After 4 single steps three go at once: the first five
    are four single ones and one more, the next fifteen times five are three and two."""
    _, replays = trained(bench("fedavg"), monkeypatch, milliseconds=0.1)
    assert replays == [5 + 15 * 2, 16, 15]


def test_long_steps_are_captured_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _, replays = trained(bench("fedavg"), monkeypatch, milliseconds=5.0)
    assert replays == [16 * 5, 16]
