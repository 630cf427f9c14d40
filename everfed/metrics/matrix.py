"""Everything that follows from the accuracy matrix, and from the curves: the accuracies after every round rather than
at task ends (FedSSI, STAMP).

`matrix[t][i]` is the accuracy, a fraction in [0, 1], on the test set of task i after the last round of task t; None
where it was not measured. Rows may be ragged: what is missing on the right counts as not measured. T is the number of
rows, so a metric "at time t" is the metric of `matrix[:t]`. `curves[t][r][i]` is the accuracy on task i after round r
of task t. The papers count tasks from 1 and so do the formulas here; the code counts from 0. A value that needs an
unmeasured entry is None, and so is everything about change when T = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from everfed.metrics.scores import PERCENT, SCORES, Score, perplexity

Entry = float | None
Row = Sequence[Entry]
Matrix = Sequence[Row]


class Unbounded(list[Row]):
    """A matrix of a score that is no fraction: its entries may be any number."""


def measured(values: Iterable[Entry]) -> list[float] | None:
    """All values, or None when one of them is missing or there are none."""
    found = list(values)
    present = [value for value in found if value is not None]
    return present if present and len(present) == len(found) else None


def mean(values: Iterable[Entry]) -> Entry:
    """Arithmetic mean; None when a value is missing. `fsum` rounds once, so the order of the values cannot matter."""
    present = measured(values)
    return None if present is None else math.fsum(present) / len(present)


def weighted_mean(values: Sequence[Entry], weights: Sequence[float]) -> Entry:
    """sum w_i v_i / sum w_i; None when a value is missing or no weight is positive."""
    if len(values) != len(weights):
        raise ValueError(f"one weight per value is needed, got {len(weights)} weights for {len(values)} values")
    if not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(f"weights must be finite and not negative, got {list(weights)}")
    present, total = measured(values), math.fsum(weights)
    if present is None or total == 0:
        return None
    return math.fsum(w * v for w, v in zip(weights, present, strict=True)) / total


def maximum(values: Iterable[Entry]) -> Entry:
    """The largest value; None when one is missing."""
    present = measured(values)
    return None if present is None else max(present)


def difference(a: Entry, b: Entry) -> Entry:
    """a - b; None when either is missing, or both are infinite."""
    found = None if a is None or b is None else a - b
    return None if found is None or math.isnan(found) else found


def accuracies(row: Row, width: int, name: str, bounded: bool = True) -> list[Entry]:
    """The row, checked to hold fractions (bounded) or None, and padded with None to at least `width` entries."""
    for i, value in enumerate(row):
        if bounded and value is not None and not 0 <= value <= 1:
            raise ValueError(f"{name}[{i}] is {value}; allowed: an accuracy in [0, 1], or None where not measured")
    return [*row, *[None] * (width - len(row))]


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


# of perplexities -----------------------------------------------------------------------------------------------------
# `matrix[t][i]` is the perplexity of the model after period t on the test set of period i, `tokens[i]` the number of
# scored tokens of that test set. Lower is better.
Perplexities = Sequence[Sequence[float]]


def all_period_perplexity(perplexities: Sequence[float], tokens: Sequence[float]) -> float:
    """Perplexity on the union of the period test sets, from each one's perplexity and token count."""
    mean_nll = weighted_mean([math.log(_positive(value)) for value in perplexities], tokens)
    if mean_nll is None:
        raise ValueError(f"perplexity needs at least one scored token, got {list(tokens)}")
    return perplexity(mean_nll, 1)


def rcp(ppl: float, ppl_no_replay: float, denominator: float | None = None) -> float:
    """Relative change in perplexity (PPL_method - PPL_{N=0}) / PPL_{N=0}, same test set; negative is better.

    denominator: for values by period, the all-period perplexity of the no-replay model.
    """
    scale = ppl_no_replay if denominator is None else denominator
    return (_positive(ppl) - _finite(ppl_no_replay)) / _finite(scale)


def forgetting_factor(history: Sequence[float], latest: float) -> Entry:
    """PPL_T(X) - min_{t<T} PPL_t(X): above 0, a past model was better. None when no past model was of any use."""
    best = min(map(_positive, history), default=math.inf)
    return _positive(latest) - best if best < math.inf else None


def forgetting_factor_relative(history: Sequence[float], latest: float, ppl_no_replay: float) -> Entry:
    """The forgetting factor as a share of the no-replay model's perplexity, on RCP's scale."""
    raw = forgetting_factor(history, latest)
    return None if raw is None else raw / _finite(ppl_no_replay)


def language_summary(
    matrix: Perplexities, tokens: Sequence[float], ppl_no_replay: float | None = None
) -> dict[str, Entry]:
    """The all-period metrics for result.json; `ppl_no_replay` is the final all-period perplexity of the N = 0 run."""
    if len(matrix) == 0:
        raise ValueError("the perplexity matrix has no row: no period was evaluated")
    *history, latest = [all_period_perplexity(row, tokens) for row in matrix]
    own: dict[str, Entry] = {"perplexity": latest, "forgetting_factor": forgetting_factor(history, latest)}
    if ppl_no_replay is None:
        return {**own, "forgetting_factor_relative": None, "rcp": None}
    relative = forgetting_factor_relative(history, latest, ppl_no_replay)
    return {**own, "forgetting_factor_relative": relative, "rcp": rcp(latest, ppl_no_replay)}


def _positive(ppl: float) -> float:
    if not ppl > 0:
        raise ValueError(f"a perplexity must be positive, got {ppl}")
    return ppl


def _finite(ppl: float) -> float:
    if not 0 < ppl < math.inf:
        raise ValueError(f"the no-replay perplexity must be positive and finite, got {ppl}")
    return ppl
