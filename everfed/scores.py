"""What a run is scored by and how its metrics read, in one table: heading, unit, which way is better.

Commands, reports, the dashboard and trackers all print from it; a new score is a line here.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

_LARGEST_EXPONENT = math.log(sys.float_info.max)
PERCENT, PLAIN = "percent", "plain"  # a fraction shown times 100, or a number as it is


@dataclass(frozen=True)
class Score:
    """title: of an axis. short, word: at the beginning and inside of a heading. better: 1 where more is, -1 where less
    is. main: the metric that runs are ranked by. lost: the metric that says what was forgotten."""

    title: str
    short: str
    word: str
    kind: str = PERCENT
    better: int = 1
    main: str = "acc"
    lost: str = "forgetting"

    @property
    def unit(self) -> str:
        return "%" if self.kind == PERCENT else ""

    def text(self, value: float, digits: int = 2) -> str:
        """With its unit: "45.35 %", or "12.34"."""
        return f"{100 * value:.{digits}f} %" if self.kind == PERCENT else f"{value:.{digits}f}"


SCORES = {
    "accuracy": Score("Accuracy", "Acc", "acc"),
    "map": Score("mAP", "mAP", "mAP"),
    "perplexity": Score("Perplexity", "Perplexity", "perplexity", PLAIN, -1, "perplexity", "forgetting_factor"),
}


def score_of(name: str) -> Score:
    """The score that a stream names; one that is not in the table is a plain number of which more is better."""
    return SCORES.get(name) or Score(name, name, name, PLAIN)


@dataclass(frozen=True)
class Metric:
    """heading: "{short}" and "{word}" stand for the score's own. better: 1 more, -1 less, 0 neither."""

    heading: str
    kind: str = PERCENT
    better: int = 1

    def named(self, score: Score) -> str:
        """The heading on a stream with that score."""
        return self.heading.format(short=score.short, word=score.word)


# The metrics of result.json that tables show, in this order.
METRICS = {
    "acc": Metric("{short}"),
    "acc_task": Metric("{short} task-IL"),
    "perplexity": Metric("Perplexity", PLAIN, -1),
    "forgetting": Metric("Forgetting", PERCENT, -1),
    "forgetting_factor": Metric("Forgetting factor", PLAIN, -1),
    "bwt": Metric("BWT"),
    "learning_accuracy": Metric("Learning {word}"),
    "acc_avg_incremental": Metric("Avg incr {word}"),
    "acc_last_rounds": Metric("Last rounds {word}"),
    "rounds_to_best": Metric("Rounds to best", PLAIN, -1),
}


def perplexity(nll: float, tokens: float) -> float:
    """exp(nll / tokens) from the negative log-likelihood summed over `tokens` scored tokens.

    inf where that exceeds the floats, and for NaN: a model that diverged predicts nothing.
    """
    if tokens <= 0:
        raise ValueError(f"perplexity needs at least one scored token, got {tokens}")
    mean_nll = nll / tokens
    return math.exp(mean_nll) if mean_nll < _LARGEST_EXPONENT else math.inf
