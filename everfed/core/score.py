"""How good a model is on the test sets of some tasks: counts of correct answers under every logit rule at once, or what
the stream itself measures."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from everfed.core.data import Data
from everfed.core.held_out import HeldOut
from everfed.core.part import Model, State
from everfed.core.trainer import Trainer
from everfed.core.tree import Tree
from everfed.metrics.language import perplexity
from everfed.metrics.scoring import RULES, class_mask, correct_counts

_LOGITS_AT_ONCE = 2**24


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
    trainer: Trainer,
    held_out: HeldOut,
    model: Model,
    exam: Exam,
    state: State | None = None,
    message: dict[str, Tree] | None = None,
    client: int | None = None,
) -> Tensor:
    """(tasks, 4) int64 on the host: samples scored, then correct under `full`, `seen` and `task` logits.

    A stream may define `measure(outputs, y) -> (2,) float64`, how many things were scored and the sum of their scores
    (tokens and negative log-likelihood, say); then it is these, the sum under every rule. Or, for a score that is no
    sum over samples, `measure_all(outputs, y)` of all samples, outputs in pieces, which gives the same and then the
    sums of the further scores that it names in `also`: these are further columns.
    state, message: a client's own, for a personalised forward pass. client: whose tests, where each has its own.
    """
    stream, device = trainer.stream, trainer.device
    tests = (held_out.get(client, task, exam.split, device) for task in exam.tasks)
    if hasattr(stream, "measure") or hasattr(stream, "measure_all"):
        return torch.stack([_measured(trainer, model, data, state, message) for data in tests])
    known = sorted({label for task in range(exam.seen) for label in held_out.labels(client, task)})
    seen_mask = class_mask(known, stream.classes).to(device)
    rows = []
    for task, data in zip(exam.tasks, tests, strict=True):
        outputs = trainer.outputs(model, data.x, state, message)
        own = class_mask(held_out.labels(client, task), stream.classes).to(device)
        counts = correct_counts(outputs, data.y.to(device), seen_mask, own, exam.top_k)
        rows.append(torch.stack([torch.tensor(len(data), device=device), *(counts[rule] for rule in RULES)]))
    return torch.stack(rows).cpu()


def score_value(score: str, total: float, count: float) -> float | None:
    """The score that `total` over `count` things stands for; None when nothing was scored."""
    if not count:
        return None
    return perplexity(total, count) if score == "perplexity" else total / count


def _measured(
    trainer: Trainer, model: Model, data: Data, state: State | None, message: dict[str, Tree] | None
) -> Tensor:
    """A row of `score_tasks` by the stream's own measure, a piece of the test set at a time: outputs may be large."""
    stream = trainer.stream
    piece = max(1, _LOGITS_AT_ONCE // (prod(stream.input_shape) * stream.classes))
    outputs = (trainer.outputs(model, x, state, message) for x in data.x.split(piece))
    if hasattr(stream, "measure_all"):
        total = stream.measure_all(outputs, data.y)
        return torch.cat([total[:1], total[1:2].repeat(len(RULES)), total[2:]])
    total = torch.zeros(2, dtype=torch.float64)
    for found, y in zip(outputs, data.y.split(piece), strict=True):
        total += stream.measure(found, y.to(trainer.device)).cpu()
    return torch.cat([total, total[1:].repeat(len(RULES) - 1)])
