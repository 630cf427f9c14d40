"""How good a model is on the test sets of some tasks: counts of correct answers under every logit rule at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from everfed.core.data import Data
from everfed.core.fit import Trainer
from everfed.core.part import Model, State
from everfed.core.stream import Stream
from everfed.core.tree import Tree
from everfed.metrics.scoring import RULES, class_mask, correct_counts


@dataclass(frozen=True)
class Exam:
    """What to score: `tasks`, when `seen` tasks have begun (their classes are the seen ones), on which split, and how
    many of the highest logits count as the answer."""

    tasks: tuple[int, ...]
    seen: int
    split: str = "test"
    top_k: int = 1

    def to_tree(self) -> Tree:
        return {"tasks": ",".join(map(str, self.tasks)), "seen": self.seen, "split": self.split, "top_k": self.top_k}

    @staticmethod
    def from_tree(tree: Tree) -> Exam:
        tasks = tuple(int(task) for task in str(tree["tasks"]).split(","))
        return Exam(tasks, int(tree["seen"]), str(tree["split"]), int(tree["top_k"]))


def has_own_tests(stream: Stream) -> bool:
    """Has every client tests of its own? Such a stream tells them by `test_of(client, task, split)` and
    `labels_of(client, task)`, and every model is scored on the clients."""
    return bool(getattr(stream, "own_tests", False))


def score_tasks(
    trainer: Trainer,
    model: Model,
    exam: Exam,
    state: State | None = None,
    message: dict[str, Tree] | None = None,
    client: int | None = None,
) -> Tensor:
    """(tasks, 4) int64 on the host: samples scored, then correct under `full`, `seen` and `task` logits.

    state, message: a client's own, for a personalised forward pass. client: whose tests, where each has its own.
    """
    stream = trainer.stream
    labels, test = _tests(stream, client)
    known = sorted({label for task in range(exam.seen) for label in labels(task)})
    seen_mask = class_mask(known, stream.classes).to(trainer.device)
    rows = []
    for task in exam.tasks:
        data = test(task, exam.split)
        outputs = trainer.outputs(model, data.x, state, message)
        own = class_mask(labels(task), stream.classes).to(trainer.device)
        counts = correct_counts(outputs, data.y.to(trainer.device), seen_mask, own, exam.top_k)
        rows.append(torch.stack([torch.tensor(len(data), device=trainer.device), *(counts[rule] for rule in RULES)]))
    return torch.stack(rows).cpu()


def _tests(stream: Any, client: int | None) -> tuple[Callable[[int], tuple[int, ...]], Callable[[int, str], Data]]:
    """(labels, test) by task: the client's own, where the stream has them."""
    if client is None or not has_own_tests(stream):
        return stream.labels, stream.test
    return partial(stream.labels_of, client), partial(stream.test_of, client)
