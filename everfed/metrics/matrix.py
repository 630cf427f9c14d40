"""Everything that follows from the accuracy matrix, and from the curves: the accuracies after every round rather than
at task ends (FedSSI, STAMP).

`matrix[t][i]` is the accuracy, a fraction in [0, 1], on the test set of task i after the last round of task t; None
where it was not measured. Rows may be ragged: what is missing on the right counts as not measured. T is the number of
rows, so a metric "at time t" is the metric of `matrix[:t]`. `curves[t][r][i]` is the accuracy on task i after round r
of task t. The papers count tasks from 1 and so do the formulas here; the code counts from 0. A value that needs an
unmeasured entry is None, and so is everything about change when T = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from everfed.metrics.numbers import Entry, Matrix, Row, Unbounded, accuracies, difference, maximum, mean, weighted_mean
from everfed.metrics.scores import PERCENT, SCORES, Score

Curves = Sequence[Matrix]
CHANGES = frozenset(  # metrics of how scores change; a positive one says the same whichever way the score is better
    {
        "forgetting",
        "forgetting_clipped",
        "forgetting_standard",
        "forgetting_full",
        "forgetting_avg_incremental",
        "forgetting_mfcl_code",
        "bwt",
        "fwt",
    }
)
COUNTS = frozenset({"rounds_to_best"})  # metrics in a unit of their own
Result = TypeVar("Result")


def rectangular(matrix: Matrix) -> list[list[Entry]]:
    """The checked matrix, its rows padded with None to one width, which is at least the number of rows."""
    if len(matrix) == 0:
        raise ValueError("the accuracy matrix has no row: no task was evaluated")
    width = max(len(row) for row in matrix)
    if width < len(matrix):
        raise ValueError(f"the accuracy matrix has {len(matrix)} rows (tasks learned) but only {width} columns (tasks)")
    bounded = not isinstance(matrix, Unbounded)
    rows = [accuracies(row, width, f"accuracy_matrix[{t}]", bounded) for t, row in enumerate(matrix)]
    return rows if bounded else Unbounded(rows)  # type: ignore[return-value]


def oriented(matrix: Matrix, score: Score) -> Matrix:
    """The matrix of a score with more being better: as it is for fractions, else with its sign changed where less is
    better. Metrics of change (CHANGES) then mean the same for every score."""
    if score.kind == PERCENT and score.better > 0:
        return matrix
    return Unbounded([[None if v is None else score.better * v for v in row] for row in matrix])


def over_time(metric: Callable[[Matrix], Result], matrix: Matrix) -> list[Result]:
    """The metric after task 1, 2, ..., T: the curves Acc_t and Fgt_t of the papers' figures."""
    rows = rectangular(matrix)
    return [metric(type(rows)(rows[:t])) for t in range(1, len(rows) + 1)]


def acc_t(matrix: Matrix, t: int | None = None) -> Entry:
    """Acc_t = (1/t) sum_{i<=t} a[t,i], macro over tasks; t in 1..T, T by default."""
    return mean(_learned(matrix, t))


def acc_t_micro(matrix: Matrix, n_test: Sequence[int], t: int | None = None) -> Entry:
    """sum_{i<=t} n_i a[t,i] / sum_{i<=t} n_i: accuracy on all test samples of tasks 1..t."""
    row = _learned(matrix, t)
    if len(n_test) < len(row):
        raise ValueError(f"n_test must give the test samples of {len(row)} tasks, got {len(n_test)} numbers")
    return weighted_mean(row, n_test[: len(row)])


def average_incremental_accuracy(matrix: Matrix, n_test: Sequence[int] | None = None) -> Entry:
    """(1/T) sum_t A_t, with A_t micro when `n_test` is given and macro when not."""
    if n_test is None:
        return mean(over_time(acc_t, matrix))
    return mean(acc_t_micro(matrix, n_test, t) for t in range(1, len(matrix) + 1))


def learning_accuracy(matrix: Matrix) -> Entry:
    """LA = (1/T) sum_t a[t,t]: each task right after it was learned."""
    return mean(row[t] for t, row in enumerate(rectangular(matrix)))


def forgetting(matrix: Matrix) -> Entry:
    """FedGP's Fgt_T = 1/(T-1) sum_{i<T} max_{i<=j<T} (a[j,i] - a[T,i]); may be negative.

    The printed maximum also runs over j < i, before task i was learned; those entries are left out, which is what
    the authors' zero padding amounts to. `forgetting_full` keeps them.
    """
    return mean(_drops(matrix, lambda i, last: range(i, last)))


def forgetting_standard(matrix: Matrix) -> Entry:
    """F_std, the usual definition of average forgetting. With FedGP's restriction it is `forgetting` exactly."""
    return forgetting(matrix)


def forgetting_avg_incremental(matrix: Matrix) -> Entry:
    """Mean over the task ends t > 1 of the forgetting until then, as `acc_avg_incremental` is of the accuracy."""
    return mean(over_time(forgetting, matrix)[1:])


def forgetting_clipped(matrix: Matrix) -> Entry:
    """As FedGP's code: the maximum includes the last row, so no task counts less than 0."""
    return mean(_drops(matrix, lambda i, last: range(i, last + 1)))


def forgetting_full(matrix: Matrix) -> Entry:
    """The literal formula of FedGP and STAMP (AF), max over all j < T; needs the entries before a task was learned."""
    return mean(_drops(matrix, lambda i, last: range(last)))


def forgetting_mfcl_code(matrix: Matrix) -> Entry:
    """As MFCL's code: (1/T) sum_i (a[i,i] - a[T,i]), divided by T although only T-1 tasks can be forgotten."""
    rows = rectangular(matrix)
    return mean(difference(rows[i][i], rows[-1][i]) for i in range(len(rows))) if len(rows) > 1 else None


def bwt(matrix: Matrix) -> Entry:
    """Backward transfer 1/(T-1) sum_{i<T} (a[T,i] - a[i,i])."""
    rows = rectangular(matrix)
    return mean(difference(rows[-1][i], rows[i][i]) for i in range(len(rows) - 1))


def fwt(matrix: Matrix, baseline: float | Sequence[float]) -> Entry:
    """Forward transfer 1/(T-1) sum_{i>=2} (a[i-1,i] - b_i).

    baseline: b_i, the accuracy of the randomly initialised model on task i; one number serves all tasks.
    """
    rows = rectangular(matrix)
    b = [baseline] * len(rows) if isinstance(baseline, int | float) else baseline
    if len(b) < len(rows):
        raise ValueError(f"baseline must be one number, or one for each of {len(rows)} tasks; got {len(b)}")
    return mean(difference(rows[i - 1][i], b[i]) for i in range(1, len(rows)))


# of curves -------------------------------------------------------------------------------------------------------
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


# all together ------------------------------------------------------------------------------------------------------
def summary(
    matrix: Matrix,
    n_test: Sequence[int] | None = None,
    baseline: float | Sequence[float] | None = None,
    curves: Curves | None = None,
    score: Score = SCORES["accuracy"],
) -> dict[str, Entry]:
    """Every metric under its name, for result.json; None where it is undefined or its input was not given.

    n_test: test samples of each task. baseline: b_i of `fwt`. curves: accuracies after every round.
    score: what the entries are. Forgetting is above 0 where a task got worse, bwt and fwt where one got better, also
    where less is better; "best" is the lowest there.
    """
    sign = score.better
    if baseline is not None:
        baseline = sign * baseline if isinstance(baseline, int | float) else [sign * one for one in baseline]
    matrix = oriented(matrix, score)
    curves = None if curves is None else [oriented(task, score) for task in curves]
    found = {**_of_matrix(matrix, baseline), **_of_sizes(matrix, n_test), **_of_curves(matrix, curves)}
    unchanged = CHANGES | COUNTS
    return {key: value if value is None or key in unchanged else sign * value for key, value in found.items()}


def _of_matrix(matrix: Matrix, baseline: float | Sequence[float] | None) -> dict[str, Entry]:
    return {
        "acc": acc_t(matrix),
        "acc_avg_incremental": average_incremental_accuracy(matrix),
        "learning_accuracy": learning_accuracy(matrix),
        "forgetting": forgetting(matrix),
        "forgetting_clipped": forgetting_clipped(matrix),
        "forgetting_standard": forgetting_standard(matrix),
        "forgetting_full": forgetting_full(matrix),
        "forgetting_avg_incremental": forgetting_avg_incremental(matrix),
        "forgetting_mfcl_code": forgetting_mfcl_code(matrix),
        "bwt": bwt(matrix),
        "fwt": None if baseline is None else fwt(matrix, baseline),
    }


def _of_sizes(matrix: Matrix, n_test: Sequence[int] | None) -> dict[str, Entry]:
    if n_test is None:
        return {"acc_micro": None, "acc_avg_incremental_micro": None}
    return {
        "acc_micro": acc_t_micro(matrix, n_test),
        "acc_avg_incremental_micro": average_incremental_accuracy(matrix, n_test),
    }


def _of_curves(matrix: Matrix, curves: Curves | None) -> dict[str, Entry]:
    if curves is None:
        return {"learning_accuracy_best": None, "acc_last_rounds": None, "rounds_to_best": None}
    if len(curves) != len(matrix):
        raise ValueError(f"curves must cover the {len(matrix)} tasks of the accuracy matrix, got {len(curves)}")
    return {
        "learning_accuracy_best": learning_accuracy_best(curves),
        "acc_last_rounds": acc_last_rounds(curves),
        "rounds_to_best": rounds_to_best_sum(curves),
    }


def _learned(matrix: Matrix, t: int | None) -> list[Entry]:
    """a[t,1..t]."""
    rows = rectangular(matrix)
    t = len(rows) if t is None else t
    if not 1 <= t <= len(rows):
        raise ValueError(f"t is {t}; allowed: 1 to {len(rows)}, the number of tasks learned")
    return rows[t - 1][:t]


def _drops(matrix: Matrix, past: Callable[[int, int], range]) -> list[Entry]:
    """For each task i < T: the best of its accuracies in the rows `past(i, last)`, less the final one."""
    rows = rectangular(matrix)
    last = len(rows) - 1
    return [difference(maximum(rows[j][i] for j in past(i, last)), rows[last][i]) for i in range(last)]
