"""What follows from the curves, the accuracies after every round rather than at task ends (FedSSI, STAMP).

`curves[t][r][i]` is the accuracy on task i after round r of task t, a fraction in [0, 1], None where not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everfed.metrics.numbers import Entry, Matrix, Row, Unbounded, accuracies, mean

Curves = Sequence[Matrix]


def by_task(evaluations: Sequence[Mapping[str, Any]], tasks: int) -> list[list[list[Entry]]]:
    """`curves[t][r][i]` from a result's `curves`: evaluations {round, task, accuracy} in the order of their rounds."""
    found: list[list[list[Entry]]] = [[] for _ in range(tasks)]
    for entry in evaluations:
        found[entry["task"]].append(entry["accuracy"])
    return found


def task_curve(curves: Curves, t: int) -> list[Entry]:
    """The A_t-curve: for each round of task t (from 0), the macro accuracy over the tasks learned so far."""
    return [mean(row[: t + 1]) for row in _rounds(curves, t)]


def rounds_to_best(curve: Row) -> int | None:
    """CoR: 1-based index of the first round with the best value; unmeasured rounds cannot win."""
    present = [value for value in curve if value is not None]
    return list(curve).index(max(present)) + 1 if present else None


def rounds_to_best_per_task(curves: Curves) -> list[int | None]:
    """CoR of every task's A_t-curve, as in FedSSI's tables per task."""
    return [rounds_to_best(task_curve(curves, t)) for t in range(len(curves))]


def rounds_to_best_sum(curves: Curves) -> int | None:
    """CoR summed over tasks, as in FedSSI's Table 4; None when a task has no measured round."""
    rounds = [cor for cor in rounds_to_best_per_task(curves) if cor is not None]
    return sum(rounds) if rounds and len(rounds) == len(curves) else None


def delta(acc_ours: float, acc_baseline: float, cor_ours: float, cor_baseline: float) -> float:
    """FedSSI's Delta in %: relative gain in final accuracy less relative growth of rounds to best."""
    if acc_baseline <= 0 or cor_baseline <= 0:
        raise ValueError(f"the baseline must have positive accuracy and rounds, got {acc_baseline} and {cor_baseline}")
    return 100 * ((acc_ours - acc_baseline) / acc_baseline - (cor_ours - cor_baseline) / cor_baseline)


def acc_last_rounds(curves: Curves, rounds: int = 10) -> Entry:
    """FedSSI's A(f): macro accuracy averaged over the last `rounds` rounds of the last task.

    None when the last task had fewer rounds or one of them was not measured.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; allowed: 1 or more")
    curve = task_curve(curves, len(curves) - 1)
    return mean(curve[-rounds:]) if len(curve) >= rounds else None


def learning_accuracy_best(curves: Curves) -> Entry:
    """LA_best = (1/T) sum_t max_r acc[r,t]: each task at its best measured round while it was learned."""
    return mean(_best([row[t] for row in _rounds(curves, t)]) for t in range(len(curves)))


def _best(values: Row) -> Entry:
    return max((value for value in values if value is not None), default=None)


def _rounds(curves: Curves, t: int) -> list[list[Entry]]:
    bounded = not isinstance(curves[t], Unbounded)
    return [accuracies(row, t + 1, f"curves[{t}][{r}]", bounded) for r, row in enumerate(curves[t])]
