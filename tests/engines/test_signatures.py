"""A captured step serves task after task: what its graph is keyed by does not grow with the tasks."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from everfed.core.context import TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.core.trainer import Fitted, Job, Trainer
from everfed.engines.captured_steps import signature
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import Bench

TASKS, ROUNDS = 4, 2


@pytest.mark.parametrize(
    "method", ["fedavg", "lwf", "fedlwf2t", "mfcl", "target", "lander", "fedcil", "glfc", "af-fcl", "fedssi"]
)
def test_no_new_kind_of_step_appears_after_the_second_task(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: dict[int, set[Hashable]] = {task: set() for task in range(TASKS)}
    steps = Trainer._steps

    def noted(self: Trainer, job: Job) -> Fitted:
        kinds[job.context.round // ROUNDS].add(signature(job))
        return steps(self, job)

    monkeypatch.setattr(Trainer, "_steps", noted)
    stream = ClassToy(clients=2, tasks=TASKS, classes=2 * TASKS, rounds_per_task=ROUNDS)
    Bench(method, stream=stream, train=TrainOptions(1, 5, Optimizer(lr=0.1))).run()
    assert kinds[2] | kinds[3] <= kinds[0] | kinds[1]
    assert len(kinds[0] | kinds[1]) <= 5
