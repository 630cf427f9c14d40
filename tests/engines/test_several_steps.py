"""Short steps of equal shapes are replayed several at a time; on the CPU, with the graphs of tests/support/cuda.py."""

from __future__ import annotations

import pytest
import torch

from everfed.core.context import TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.engines import captured_steps
from tests.support.cuda import Device
from tests.support.toy import Bench, Norm, Toy


def trained(case: Bench, monkeypatch: pytest.MonkeyPatch, milliseconds: float) -> tuple[torch.Tensor, list[int]]:
    """The shared model, and how often each graph was replayed (once to measure it), the most frequent first."""
    device = Device(monkeypatch, milliseconds)
    params, _ = device.run_in_one_slot(case, largest=23)
    return params, sorted(device.replays.values(), reverse=True)


def bench(method: str, epochs: int = 2) -> Bench:
    """Two clients with minibatches of 4, 4, 4, 4, 4 and 3 samples, `epochs` times a round, two tasks of two rounds."""
    stream = Toy(clients=2, samples=23, rounds_per_task=2, augmented=True)
    return Bench(method, stream=stream, train=TrainOptions(epochs, 4, Optimizer(lr=0.1)), module=Norm)


@pytest.fixture(autouse=True)
def three_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_steps, "SEVERAL", 3)
    monkeypatch.setattr(captured_steps, "OFTEN", 4)


def test_several_steps_at_once_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = bench("fedgp+der")
    model, _ = trained(case, monkeypatch, milliseconds=0.1)
    assert torch.equal(model, case.run().params)


def test_they_are_captured_when_a_step_is_short_and_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 times five full minibatches, and one that is smaller. After 4 single steps three go at once: the first five
    are four single ones and one more, the next fifteen times five are three and two."""
    _, replays = trained(bench("fedavg"), monkeypatch, milliseconds=0.1)
    assert replays == [1 + 5 + 15 * 2, 1 + 16, 15]


def test_long_steps_are_captured_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _, replays = trained(bench("fedavg"), monkeypatch, milliseconds=5.0)
    assert replays == [1 + 16 * 5, 1 + 16]


def test_the_step_that_is_timed_is_the_one_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last minibatch of a client that fills its tables to the end: there is no row for a step after it."""
    monkeypatch.setattr(captured_steps, "_room", lambda needed, before: max(int(needed), before))
    case = bench("fedavg", epochs=1)
    model, _ = trained(case, monkeypatch, milliseconds=0.1)
    assert torch.equal(model, case.run().params)
