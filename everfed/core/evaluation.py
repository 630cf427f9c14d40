"""Evaluation, the last phase of a round: which tasks are scored, where, and what becomes of the counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from everfed.core.engine import Engine
from everfed.core.exchange import Exchange
from everfed.core.held_out import has_own_tests
from everfed.core.intake import Intake
from everfed.core.message import Message
from everfed.core.phase import EVALUATE, Phase
from everfed.core.reduce import Sum
from everfed.core.run_state import RunState
from everfed.core.score import Exam, score_value
from everfed.core.telling import Teller
from everfed.core.world import Moment, World
from everfed.metrics.scoring import RULES


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


def scored_on_clients(world: World) -> bool:
    """Do the clients score, because they hold what is scored, or what it is scored on?"""
    return world.personal or has_own_tests(world.stream)


class Evaluation:
    """Scores the model as it is, and keeps the counts in the run's state."""

    def __init__(
        self, world: World, engine: Engine, exchange: Exchange, teller: Teller, state: RunState, options: EvalOptions
    ) -> None:
        self.world, self.engine, self.exchange, self.teller = world, engine, exchange, teller
        self.state, self.options = state, options

    def run(self, phase: Phase, moment: Moment) -> None:
        """The tasks seen so far, and at a task's end a row of the matrix."""
        plan, tasks = moment.plan, self.world.stream.tasks
        exam = self._exam(moment)
        counts = self._counts(phase, moment, exam).tolist()
        if plan.evaluate:
            self.state.rows[plan.task] = [*counts, *[None] * (tasks - len(exam.tasks))]
        self._tell(moment, counts)

    def _exam(self, moment: Moment) -> Exam:
        plan = moment.plan
        begun = max(plan.task, *plan.tasks.values()) + 1 if plan.tasks else plan.task + 1
        scored = self.world.stream.tasks if self.options.zero_shot and plan.evaluate else plan.task + 1
        return Exam(tuple(range(scored)), begun, self.options.split, self.options.top_k)

    def _counts(self, phase: Phase, moment: Moment, exam: Exam) -> Tensor:
        if not scored_on_clients(self.world):
            return self.engine.evaluate(self.state.model, exam)
        message: Message = {**self.exchange.model(), EVALUATE: exam.to_tree()}
        intake = Intake({EVALUATE: {"counts": Sum()}})
        self.exchange.take_in(intake, phase, moment, message)
        self.teller.not_scored(moment, intake)
        counts: Tensor | None = intake.reduction.result()[EVALUATE]["counts"]
        return torch.zeros((len(exam.tasks), 4), dtype=torch.int64) if counts is None else counts  # nobody was there

    def _tell(self, moment: Moment, counts: list[list[float]]) -> None:
        """A point of the curves, and an event, by the rule that the recipe names."""
        plan, score = moment.plan, self.world.stream.score
        column = 1 + RULES.index(self.options.logits)
        accuracies = [score_value(score, row[column], row[0]) for row in counts]
        place = {"round": moment.round, "task": plan.task}
        self.state.curves.append({**place, "accuracy": accuracies})
        known = [a for a in accuracies[: plan.task + 1] if a is not None]
        self.teller.notify(
            {
                "event": "evaluation",
                **place,
                "task_end": plan.evaluate,
                "score": score,  # what the numbers under "accuracy" and "acc" are
                "accuracy": accuracies,
                "acc": sum(known) / len(known) if known else None,
            }
        )
