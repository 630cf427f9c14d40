"""Loss and scores of a data set's targets: single classes, several labels a sample, regression, tokens.

Every score follows from sums over samples, so that the sums of batches and clients can be added up. `sums` gives them
for a batch, as (1 + k,) float64 with the number of samples first; `value` gives a score of the added sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from everfed.core.stream import cross_entropy
from everfed.data.targets import MULTI_LABEL, REGRESSION, TOKENS
from everfed.data.tokens import token_counts, token_loss
from everfed.metrics.scores import score_value


class Objective(Protocol):
    """score, also: names in `everfed.metrics.scores`."""

    @property
    def score(self) -> str: ...

    @property
    def also(self) -> tuple[str, ...]: ...

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor: ...

    def sums(self, outputs: Tensor, y: Tensor) -> Tensor: ...

    def value(self, score: str, sums: Sequence[float]) -> float | None: ...


def objective_of(targets: str, width: int, y: Tensor | None = None) -> Objective:
    """Of targets of one of the kinds in `everfed.data.targets`. width: outputs of the network. y: some of the targets,
    where there are any yet."""
    if targets == TOKENS:
        return NextToken()
    if targets == MULTI_LABEL:
        return MultiLabel(width)
    if targets == REGRESSION:
        return Regression((0.0,) * width if y is None else tuple(y.double().mean(0).tolist()))
    return SingleLabel()


class ByObjective:
    """Loss and scores of a stream, by an objective. It stands before the stream among the bases."""

    objective: Objective
    score: str
    also: tuple[str, ...]

    def _score_by(self, objective: Objective) -> None:
        self.objective, self.score, self.also = objective, objective.score, objective.also

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of classes or tokens, binary cross-entropy of several labels, mean squared error."""
        return self.objective.loss(outputs, y)

    def measure(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The sums that scores are made of."""
        return self.objective.sums(outputs, y)

    def value(self, score: str, sums: Sequence[float]) -> float | None:
        """The score that sums stand for; None where nothing was scored."""
        return self.objective.value(score, sums)


@dataclass(frozen=True)
class SingleLabel:
    """Cross-entropy, and correct answers, which `everfed.core.evaluate` counts under every logit rule."""

    score = "accuracy"
    also = ()

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(outputs, y)

    def sums(self, outputs: Tensor, y: Tensor) -> Tensor:
        correct = (outputs.argmax(-1) == y).sum()
        return torch.stack([correct.new_tensor(len(y)), correct]).double()

    def value(self, score: str, sums: Sequence[float]) -> float | None:
        return score_value(score, sums[1], sums[0])


@dataclass(frozen=True)
class NextToken:
    """Mean cross-entropy over the tokens to be predicted; perplexity. outputs (n, length, vocabulary), y (n, length):
    at every place the token that comes next."""

    score = "perplexity"
    also = ()

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return token_loss(outputs, y)

    def sums(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Scored tokens, and the sum of their negative log-likelihoods."""
        return token_counts(outputs, y)

    def value(self, score: str, sums: Sequence[float]) -> float | None:
        return score_value(score, sums[1], sums[0]) if sums[0] else None


@dataclass(frozen=True)
class MultiLabel:
    """Binary cross-entropy of every label; F1 at probability 0.5, macro (mean over labels) and micro (all labels
    together), from true positives, false positives and false negatives of every label. A NaN logit predicts nothing.
    """

    labels: int

    score = "f1"
    also = ("f1_micro",)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """outputs (n, labels) logits, y (n, labels) 0 or 1."""
        _check(outputs, y)
        return functional.binary_cross_entropy_with_logits(outputs, y.to(outputs.dtype))

    def sums(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Samples; then true positives, false positives and false negatives, each by label."""
        predicted, true = outputs > 0, y > 0
        counts = ((predicted & true).sum(0), (predicted & ~true).sum(0), (~predicted & true).sum(0))
        return torch.cat([outputs.new_tensor([len(y)]).double(), torch.cat(counts).double()])

    def value(self, score: str, sums: Sequence[float]) -> float | None:
        """As scikit-learn's `f1_score`: 0 for a label that neither occurs nor is predicted."""
        if not sums[0]:
            return None
        right, false, missed = (sums[1 + k * self.labels : 1 + (k + 1) * self.labels] for k in range(3))
        if score == "f1_micro":
            return _f1(sum(right), sum(false), sum(missed))
        return math.fsum(map(_f1, right, false, missed)) / self.labels


@dataclass(frozen=True)
class Regression:
    """Mean squared error over samples and targets; the coefficient of determination R^2, mean over targets.

    centre: (targets,) numbers near the targets' means. Squares are summed about them, which changes no score: far from
    0 they would leave no digits for the variance.
    """

    centre: tuple[float, ...]

    score = "mse"
    also = ("r2",)

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """outputs and y (n, targets)."""
        _check(outputs, y)
        return functional.mse_loss(outputs, y.to(outputs.dtype))

    def sums(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Samples; then squared errors, targets less `centre`, and squares of these, each by target."""
        off = y.double() - torch.tensor(self.centre, dtype=torch.float64, device=y.device)
        errors = (outputs.double() - y.double()).square().sum(0)
        return torch.cat([errors.new_tensor([len(y)]), errors, off.sum(0), off.square().sum(0)])

    def value(self, score: str, sums: Sequence[float]) -> float | None:
        """mse: infinite for a model that diverged. r2: as scikit-learn's `r2_score`; None where a target is constant,
        or the model diverged."""
        count, width = sums[0], len(self.centre)
        if not count:
            return None
        errors, firsts, squares = (sums[1 + k * width : 1 + (k + 1) * width] for k in range(3))
        if score == "mse":
            mean = sum(errors) / (count * width)
            return mean if math.isfinite(mean) else math.inf
        spread = [square - first**2 / count for first, square in zip(firsts, squares, strict=True)]
        if any(one <= 1e-12 * square for one, square in zip(spread, squares, strict=True)):
            return None
        mean = sum(1 - error / one for error, one in zip(errors, spread, strict=True)) / width
        return mean if math.isfinite(mean) else None


def _f1(right: float, false: float, missed: float) -> float:
    found = 2 * right + false + missed
    return 2 * right / found if found else 0.0


def _check(outputs: Tensor, y: Tensor) -> None:
    """Raises ValueError for shapes that torch would broadcast against each other."""
    if outputs.shape != y.shape:
        raise ValueError(
            f"outputs of shape {tuple(outputs.shape)} for targets of shape {tuple(y.shape)}; must be alike"
        )
