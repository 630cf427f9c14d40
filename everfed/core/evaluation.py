"""Evaluation, the last phase of a round: which tasks are scored, where, and how the counts are recorded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from everfed.core.context import Moment, Setup
from everfed.core.engine import Engine, Replies
from everfed.core.events import Reporter
from everfed.core.message import Message
from everfed.core.phase import EVALUATE, Phase
from everfed.core.phase_runner import Exchange
from everfed.core.reduce import Sum
from everfed.core.run_state import RunState
from everfed.core.scoring import EvalSpec, row_value


@dataclass(frozen=True)
class EvalOptions:
    """logits: the rule that result.json reports; every: also score the tasks seen so far every so many rounds (0: only
    at task ends); zero_shot: fill the matrix above its diagonal too; split: "test" or "validation"; top_k: how many
    highest logits count as the answer."""

    logits: str = "full"
    every: int = 0
    zero_shot: bool = False
    split: str = "test"
    top_k: int = 1


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

    def run(self, phase: Phase, moment: Moment) -> None:
        """The tasks seen so far, and at a task's end a row of the matrix."""
        plan, tasks = moment.plan, self.setup.stream.tasks
        spec = self._spec(moment)
        self.reporter.notify({"event": "scoring", **_place(moment), "tasks": len(spec.tasks)})
        counts = self._counts(phase, moment, spec).tolist()
        if plan.evaluate:
            self.state.rows[plan.task] = [*counts, *[None] * (tasks - len(spec.tasks))]
        self._record(moment, counts)

    def _spec(self, moment: Moment) -> EvalSpec:
        plan = moment.plan
        begun = max(plan.task, *plan.tasks.values()) + 1 if plan.tasks else plan.task + 1
        scored = self.setup.stream.tasks if self.options.zero_shot and plan.evaluate else plan.task + 1
        return EvalSpec(tuple(range(scored)), begun, self.options.split, self.options.top_k)

    def _counts(self, phase: Phase, moment: Moment, spec: EvalSpec) -> Tensor:
        if not scored_on_clients(self.setup):
            return self.engine.evaluate(self.state.model, spec)
        message: Message = {**self.exchange.model(phase, moment), EVALUATE: spec.to_tree()}
        replies = Replies({EVALUATE: {"counts": Sum()}})
        self.exchange.collect(replies, phase, moment, message)
        self.reporter.not_scored(moment, replies)
        counts: Tensor | None = replies.reduction.result()[EVALUATE]["counts"]
        return torch.zeros((len(spec.tasks), 4), dtype=torch.int64) if counts is None else counts  # all were absent

    def _record(self, moment: Moment, counts: list[list[float]]) -> None:
        """A point of the curves, and an event, by the rule that the recipe names."""
        plan, stream = moment.plan, self.setup.stream
        accuracies = [row_value(stream, row, self.options.logits) for row in counts]
        self.state.curves.append({**_place(moment), "accuracy": accuracies})
        known = [a for a in accuracies[: plan.task + 1] if a is not None]
        self.reporter.notify(
            {
                "event": "evaluation",
                **_place(moment),
                "task_end": plan.evaluate,
                "score": stream.score,  # what the numbers under "accuracy" and "acc" are
                "accuracy": accuracies,
                "acc": sum(known) / len(known) if known else None,
            }
        )


def _place(moment: Moment) -> dict[str, int]:
    return {"round": moment.round, "task": moment.plan.task}
