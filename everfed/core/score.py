"""How good a model is on the test sets of some tasks: counts of correct answers under every logit rule at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from everfed.core.fit import Trainer
from everfed.core.part import Model, State
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


def score_tasks(
    trainer: Trainer, model: Model, exam: Exam, state: State | None = None, message: dict[str, Tree] | None = None
) -> Tensor:
    """(tasks, 4) int64 on the host: samples scored, then correct under `full`, `seen` and `task` logits.

    state, message: a client's own, for a personalised forward pass.
    """
    stream = trainer.stream
    known = sorted({label for task in range(exam.seen) for label in stream.labels(task)})
    seen_mask = class_mask(known, stream.classes).to(trainer.device)
    rows = []
    for task in exam.tasks:
        data = stream.test(task, exam.split)
        outputs = trainer.outputs(model, data.x, state, message)
        own = class_mask(stream.labels(task), stream.classes).to(trainer.device)
        counts = correct_counts(outputs, data.y.to(trainer.device), seen_mask, own, exam.top_k)
        rows.append(torch.stack([torch.tensor(len(data), device=trainer.device), *(counts[rule] for rule in RULES)]))
    return torch.stack(rows).cpu()
