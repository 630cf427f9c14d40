"""What a run is scored by and how its metrics read, in one table: heading, unit, which way is better.

Commands, reports, the dashboard and trackers all print from it; a new score is a line here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LARGEST_EXPONENT = math.log(sys.float_info.max)
PERCENT, PLAIN = "percent", "plain"  # a fraction shown times 100, or a number as it is
SCORE, SAME = "score", None  # the kind and the better direction of whatever the run is scored by


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
        return f"{100 * value:z.{digits}f} %" if self.kind == PERCENT else plain_text(value, digits)


SCORES = {
    "accuracy": Score("Accuracy", "Acc", "acc"),
    "map": Score("mAP", "mAP", "mAP"),
    "perplexity": Score("Perplexity", "Perplexity", "perplexity", PLAIN, -1, "perplexity", "forgetting_factor"),
    "f1": Score("F1 (macro)", "F1", "F1"),
    "f1_micro": Score("F1 (micro)", "F1 micro", "F1 micro"),
    "mse": Score("Mean squared error", "MSE", "MSE", PLAIN, -1),
    "r2": Score("R²", "R²", "R²", PLAIN),
}


def score_of(name: str) -> Score:
    """The score that a stream names; one that is not in the table is a plain number of which more is better."""
    return SCORES.get(name) or Score(name, name, name, PLAIN)


@dataclass(frozen=True)
class ShownMetric:
    """heading: "{short}" and "{word}" stand for the score's own. kind: SCORE, that of the score. better: 1 more, -1
    less, 0 neither; SAME, as the score."""

    heading: str
    kind: str = SCORE
    better: int | None = SAME

    def named(self, score: Score) -> str:
        """The heading on a stream with that score."""
        return self.heading.format(short=score.short, word=score.word)

    def kind_of(self, score: Score) -> str:
        """PERCENT or PLAIN on a stream with that score."""
        return score.kind if self.kind == SCORE else self.kind

    def better_of(self, score: Score) -> int:
        """Which way is better on a stream with that score."""
        return score.better if self.better is SAME else self.better


_BRACES = str.maketrans({"{": "{{", "}": "}}"})  # a heading is a format

# The metrics of result.json that tables show, in this order.
METRICS = {
    "acc": ShownMetric("{short}"),
    "acc_task": ShownMetric("{short} task-IL"),
    "perplexity": ShownMetric("Perplexity", PLAIN, -1),
    "forgetting": ShownMetric("Forgetting", SCORE, -1),
    "forgetting_factor": ShownMetric("Forgetting factor", PLAIN, -1),
    "bwt": ShownMetric("BWT", SCORE, 1),
    "learning_accuracy": ShownMetric("Learning {word}"),
    "acc_avg_incremental": ShownMetric("Avg incr {word}"),
    "acc_last_rounds": ShownMetric("Last rounds {word}"),
    "rounds_to_best": ShownMetric("Rounds to best", PLAIN, -1),
}


def own_metrics(measured: Mapping[str, Any]) -> dict[str, ShownMetric]:
    """How the metrics of eval.metrics whose values are numbers are shown. measured: of result.json."""
    kinds = {name: PERCENT if one["percent"] else PLAIN for name, one in measured.items() if "mean" in one}
    return {name: ShownMetric(name.translate(_BRACES), kind, measured[name]["better"]) for name, kind in kinds.items()}


def plain_text(value: float, digits: int = 2) -> str:
    """A number as it is; below 1 with three significant digits, since errors may be small."""
    return f"{value:.{digits}f}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"


def score_value(score: str, total: float, count: float) -> float | None:
    """The score that `total` over `count` things stands for; None when nothing was scored."""
    if not count:
        return None
    return perplexity(total, count) if score == "perplexity" else total / count


def perplexity(nll: float, tokens: float) -> float:
    """exp(nll / tokens) from the negative log-likelihood summed over `tokens` scored tokens.

    inf where that exceeds the floats, and for NaN: a model that diverged predicts nothing.
    """
    if tokens <= 0:
        raise ValueError(f"perplexity needs at least one scored token, got {tokens}")
    mean_nll = nll / tokens
    return math.exp(mean_nll) if mean_nll < _LARGEST_EXPONENT else math.inf
