"""Streams for the tests of rehearsal-free methods: new classes in every task, past data that is gone, quadratics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from everfed.method import Client, Data, Optimizer, RoundPlan, TrainOptions
from tests.support.toy import Bench, Given, Linear, Toy, mean_square


@dataclass(frozen=True)
class ClassToy(Toy):
    """Class-incremental: task t brings classes 2t and 2t + 1."""

    clients: int = 2
    tasks: int = 2
    classes: int = 4

    def labels(self, task: int) -> tuple[int, ...]:
        return (2 * task, 2 * task + 1)

    def data(self, client: int, task: int) -> Data:
        count = self.sizes.get((client, task), self.samples)
        return self._draw(np.random.default_rng([client, task]), count, task, self.labels(task))

    def test(self, task: int, split: str = "test") -> Data:
        return self._draw(np.random.default_rng([1000, task]), 40, task, self.labels(task))


@dataclass(frozen=True)
class PoolToy(ClassToy):
    """Every client has classes of its own: client u has 4u + 2t and 4u + 2t + 1 in task t."""

    classes: int = 8

    def labels(self, task: int) -> tuple[int, ...]:
        return tuple(sorted(label for client in range(self.clients) for label in self.labels_of(client, task)))

    def labels_of(self, client: int, task: int) -> tuple[int, ...]:
        return (4 * client + 2 * task, 4 * client + 2 * task + 1)

    def data(self, client: int, task: int) -> Data:
        count = self.sizes.get((client, task), self.samples)
        return self._draw(np.random.default_rng([client, task]), count, task, self.labels_of(client, task))


class PastIsGone(RuntimeError):
    """Data of a task that is over was asked for."""


@dataclass(frozen=True)
class Forgetful(Toy):
    """Raises PastIsGone for the data of an earlier task than the current one."""

    now: list[int] = field(default_factory=lambda: [0])

    def round(self, index: int) -> RoundPlan:
        plan = super().round(index)
        self.now[0] = max(self.now[0], plan.task)
        return plan

    def data(self, client: int, task: int) -> Data:
        if task < self.now[0]:
            raise PastIsGone(f"task {task} is over, task {self.now[0]} has begun")
        return super().data(client, task)


def one_parameter(targets: Mapping[int, float], rounds_per_task: int = 1) -> Given:
    """One client and L(v) = 0.5 (v - target)^2 in every task: a linear unit on the input 1."""
    table = {(0, t): (torch.ones(1, 1), torch.tensor([target])) for t, target in targets.items()}
    return Given(
        clients=1, tasks=len(targets), rounds_per_task=rounds_per_task, classes=1, table=table, objective=mean_square
    )


def quadratic(lr: float, epochs: int, targets: Mapping[int, float] | None = None) -> Bench:
    """A bench on `one_parameter`, whose weight is 0 at first."""
    stream = one_parameter(targets or {0: 1.0, 1: 1.0})
    return Bench("fedavg", stream=stream, module=Linear, train=TrainOptions(epochs, 1, Optimizer(lr=lr)))


def point(bench: Bench, value: float, **own: Tensor) -> Client:
    """FedSSI's client at the end of the first task, at a model with that parameter; `own` is its state."""
    model, last = {**bench.model(), "params": torch.tensor([value])}, bench.stream.rounds_per_task - 1
    return bench.client("fedssi", {"fedssi": own}, model=model, round_index=last, phase="consolidate")
