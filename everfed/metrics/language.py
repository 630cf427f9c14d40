"""Perplexity and what coordinated replay selection derives from it (RCP, forgetting factor).

`matrix[t][i]` is the perplexity of the model after period t on the test set of period i, and `tokens[i]` the number of
scored tokens of that test set. Lower is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from everfed.metrics.numbers import Entry, weighted_mean
from everfed.metrics.scores import perplexity

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


def summary(matrix: Perplexities, tokens: Sequence[float], ppl_no_replay: float | None = None) -> dict[str, Entry]:
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
