"""How good a model is on the test sets of some tasks, and evaluation, the last phase of a round.

Counts of correct answers are taken under every logit rule at once, or what the stream itself measures. Which classes
may answer is a rule: `full` (all outputs), `seen` (classes seen so far), `task` (the classes of the sample's own task,
task-IL). Everything is batched, has static shapes and stays on the device of the logits, so that counts can be added up
there and read once. A label that the rule excludes is wrong, and so is a NaN logit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from everfed.core.context import Place, Setup
from everfed.core.data import Data
from everfed.core.engine import Engine, Replies
from everfed.core.message import Message, Model, State
from everfed.core.metric import TaskSums
from everfed.core.option import RULES, EvalOptions
from everfed.core.phase import EVALUATE, Phase, Sum
from everfed.core.stream import HeldOut, Stream
from everfed.core.trainer import Trainer
from everfed.core.tree import Tree

if TYPE_CHECKING:
    from everfed.core.events import Reporter
    from everfed.core.server import Exchange, RunState

OF_TASK = 1 + RULES.index("task")  # the column of a row of counts
_LOGITS_AT_ONCE = 2**24


@dataclass(frozen=True)
class EvalSpec:
    """What to score: `tasks`, when `seen` tasks have begun (their classes are the seen ones), on which split, and how
    many of the highest logits count as the answer."""

    tasks: tuple[int, ...]
    seen: int
    split: str = "test"
    top_k: int = 1

    def to_tree(self) -> Tree:
        return {"tasks": ",".join(map(str, self.tasks)), "seen": self.seen, "split": self.split, "top_k": self.top_k}

    @staticmethod
    def from_tree(tree: Tree) -> EvalSpec:
        tasks = tuple(int(task) for task in str(tree["tasks"]).split(","))
        return EvalSpec(tasks, int(tree["seen"]), str(tree["split"]), int(tree["top_k"]))


def score_tasks(
    trainer: Trainer,
    held_out: HeldOut,
    model: Model,
    spec: EvalSpec,
    state: State | None = None,
    message: Mapping[str, Tree] | None = None,
    client: int | None = None,
) -> Tensor:
    """(tasks, 4) int64 on the host: samples scored, then correct under `full`, `seen` and `task` logits.

    On a stream that is not scored by accuracy: what its `measure_all` gives, the first sum under every rule, and the
    others as further columns. The sums of the run's metrics come last; a row is float64 then.
    state, message: a client's own, for a personalised forward pass. client: whose tests, where each has its own.
    """
    stream, device, metrics = trainer.stream, trainer.device, held_out.metrics
    tests = (held_out.get(client, task, spec.split, device) for task in spec.tasks)
    if not metrics and stream.score != "accuracy":
        return torch.stack([_measured(trainer, model, data, state, message) for data in tests])
    known = {label for task in range(spec.seen) for label in held_out.labels(client, task)}
    own = [held_out.labels(client, task) for task in spec.tasks]
    whose = [held_out.owners(client, task, spec.split) if metrics else None for task in spec.tasks]
    further = [
        metrics.on_task(task, client, owners, classes, sorted(known))
        for task, owners, classes in zip(spec.tasks, whose, own, strict=True)
    ]
    if stream.score != "accuracy":
        rows = [
            _measured(trainer, model, data, state, message, extra) for data, extra in zip(tests, further, strict=True)
        ]
        return torch.cat([torch.stack(rows).double(), torch.stack([extra.sums for extra in further])], 1)
    # one transfer before and one after: the host queues all tasks without waiting for the device
    seen, *masks = task_masks([known, *own], stream.classes).to(device, non_blocking=True)
    sizes, rows = [], []
    for mask, data, extra in zip(masks, tests, further, strict=True):
        outputs, y = trainer.outputs(model, data.x, state, message), data.y.to(device)
        counts = correct_counts(outputs, y, seen, mask, spec.top_k)
        extra.add(outputs, y)
        sizes.append(len(data))
        rows.append(torch.stack([counts[rule] for rule in RULES]))
    found = torch.cat([torch.tensor(sizes).unsqueeze(1), torch.stack(rows).cpu()], 1)
    return torch.cat([found.double(), torch.stack([extra.sums for extra in further])], 1) if metrics else found


def stacked(rows: Sequence[Sequence[float]]) -> Tensor:
    """Rows of `score_tasks` that were lists meanwhile, as they were: int64 or float64. torch.tensor would make float32
    of the latter."""
    return torch.from_numpy(np.array(rows))


def row_value(stream: Stream, row: Sequence[float], rule: str, score: str | None = None) -> float | None:
    """The score of a row of `score_tasks` under a rule; score: one of the stream's further ones in `also`."""
    sums = [row[0], row[1 + RULES.index(rule)], *row[1 + len(RULES) :]]
    return stream.value(score or stream.score, sums)


def _measured(
    trainer: Trainer,
    model: Model,
    data: Data,
    state: State | None,
    message: Mapping[str, Tree] | None,
    extra: TaskSums | None = None,
) -> Tensor:
    """A row of `score_tasks` by the stream's own measure, a piece of the test set at a time: outputs may be large.
    extra: the sums of metrics, to which the pieces are added."""
    stream = trainer.stream
    piece = max(1, _LOGITS_AT_ONCE // (prod(stream.input_shape) * stream.classes))

    def outputs() -> Iterator[Tensor]:
        for x, y in zip(data.x.split(piece), data.y.split(piece), strict=True):
            found = trainer.outputs(model, x, state, message)
            if extra is not None:
                extra.add(found, y.to(found.device))
            yield found

    total: Tensor = stream.measure_all(outputs(), data.y)
    return torch.cat([total[:1], total[1:2].repeat(len(RULES)), total[2:]])


# the phase ------------------------------------------------------------------------------------------------------------
def scored_on_clients(setup: Setup) -> bool:
    """Do the clients score, because they hold what is scored, or what it is scored on?"""
    return setup.personal or setup.stream.own_tests


class Evaluation:
    """Scores the shared model and records the counts in the run's state."""

    def __init__(
        self,
        setup: Setup,
        engine: Engine,
        exchange: Exchange,
        reporter: Reporter,
        state: RunState,
        options: EvalOptions,
    ) -> None:
        self.setup, self.engine, self.exchange, self.reporter = setup, engine, exchange, reporter
        self.state, self.options = state, options

    def score_initial(self) -> None:
        """The untrained model on every task, for forward transfer; only with the whole matrix (`zero_shot`), and where
        the server holds the tests."""
        if self.options.zero_shot and self.state.initial is None and not self.setup.stream.own_tests:
            tasks = tuple(range(self.setup.stream.tasks))
            spec = EvalSpec(tasks, 0, self.options.split, self.options.top_k)
            self.state.initial = self.engine.evaluate(self.state.model, spec).tolist()

    def run(self, phase: Phase, place: Place) -> None:
        """The tasks seen so far, and at a task's end a row of the matrix."""
        plan, tasks = place.plan, self.setup.stream.tasks
        spec = self._spec(place)
        self.reporter.notify({"event": "scoring", **_place(place), "tasks": len(spec.tasks)})
        counts = self._counts(phase, place, spec).tolist()
        if plan.evaluate:
            self.state.rows[plan.task] = [*counts, *[None] * (tasks - len(spec.tasks))]
        self._record(place, counts)

    def _spec(self, place: Place) -> EvalSpec:
        plan = place.plan
        begun = max(plan.task, *plan.tasks.values()) + 1 if plan.tasks else plan.task + 1
        scored = self.setup.stream.tasks if self.options.zero_shot and plan.evaluate else plan.task + 1
        return EvalSpec(tuple(range(scored)), begun, self.options.split, self.options.top_k)

    def _counts(self, phase: Phase, place: Place, spec: EvalSpec) -> Tensor:
        if not scored_on_clients(self.setup):
            return self.engine.evaluate(self.state.model, spec)
        message: Message = {**self.exchange.model(phase, place), EVALUATE: spec.to_tree()}
        replies = Replies({EVALUATE: {"counts": Sum()}})
        self.exchange.collect(replies, phase, place, message)
        self.reporter.not_scored(place, replies)
        counts: Tensor | None = replies.reduction.result()[EVALUATE]["counts"]
        return torch.zeros((len(spec.tasks), 4), dtype=torch.int64) if counts is None else counts  # all were absent

    def _record(self, place: Place, counts: list[list[float]]) -> None:
        """A point of the curves, and an event, by the rule that the recipe names; one more for the metrics."""
        plan, stream, metrics = place.plan, self.setup.stream, self.setup.metrics
        accuracies = [row_value(stream, metrics.plain(row), self.options.logits) for row in counts]
        self.state.curves.append({**_place(place), "accuracy": accuracies})
        known = [a for a in accuracies[: plan.task + 1] if a is not None]
        self.reporter.notify(
            {
                "event": "evaluation",
                **_place(place),
                "task_end": plan.evaluate,
                "score": stream.score,  # what the numbers under "accuracy" and "acc" are
                "accuracy": accuracies,
                "acc": sum(known) / len(known) if known else None,
            }
        )
        if found := metrics.means(counts[: plan.task + 1]):
            self.reporter.measured(place, EVALUATE, "eval", found)


def _place(place: Place) -> dict[str, int]:
    return {"round": place.round, "task": place.plan.task}


# counting correct answers ---------------------------------------------------------------------------------------------
def class_mask(labels: Iterable[int], classes: int) -> Tensor:
    """(classes,) bool on the host, true at `labels`; move it to the device once, before the loop."""
    chosen = sorted(set(labels))
    if chosen and not 0 <= chosen[0] <= chosen[-1] < classes:
        raise ValueError(f"labels {chosen} do not fit a head with {classes} classes; allowed: 0 to {classes - 1}")
    mask = torch.zeros(classes, dtype=torch.bool)
    mask[chosen] = True
    return mask


def task_masks(labels_by_task: Sequence[Iterable[int]], classes: int) -> Tensor:
    """(tasks, classes) bool; `task_masks(...)[task_ids]` serves a batch that mixes tasks."""
    return torch.stack([class_mask(labels, classes) for labels in labels_by_task])


def label_rank(logits: Tensor, labels: Tensor, allowed: Tensor | None = None) -> Tensor:
    """(...,) int64: how many allowed classes come before the label's. Ties go to the lower class, as in argmax.

    logits: (..., C). labels: (...) int64. allowed: bool, broadcast against the logits; None allows all.
    """
    own = logits.gather(-1, labels.unsqueeze(-1))
    lower = torch.arange(logits.shape[-1], device=logits.device) < labels.unsqueeze(-1)
    # "not <=" instead of ">": a comparison with NaN is false, and a model that diverged must not score.
    before = ~(logits <= own) | ((logits == own) & lower)
    return (before if allowed is None else before & allowed).sum(-1)


def hits(logits: Tensor, labels: Tensor, allowed: Tensor | None = None, k: int = 1) -> Tensor:
    """(...,) bool: is the label among the k highest allowed logits? Shapes as in `label_rank`."""
    if k < 1:
        raise ValueError(f"top-k needs k of 1 or more, got {k}")
    within = label_rank(logits, labels, allowed) < k
    if allowed is None:
        return within
    return within & allowed.expand_as(logits).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def correct_counts(logits: Tensor, labels: Tensor, seen: Tensor, task: Tensor, k: int = 1) -> dict[str, Tensor]:
    """Rule -> 0-d int64 count of correct samples, all three rules from the same logits.

    seen, task: bool masks, (C,) for the whole batch or (..., C) per sample.
    """
    masks = dict(zip(RULES, (None, seen, task), strict=True))
    return {rule: hits(logits, labels, mask, k).sum() for rule, mask in masks.items()}
