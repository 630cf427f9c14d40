"""Metrics beside the score: what else is measured on held-out data, by everfed or by a class of a user's own.

A metric turns samples and outputs into sums. Sums are added up over batches, over clients where these score, and over
tasks for the whole; `value` makes a number, a list or a table of them. So a metric needs no line for engines, workers
or real clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from everfed.errors import SettingError, place_of

if TYPE_CHECKING:
    from everfed.core.context import Facts


@dataclass(frozen=True)
class Scored:
    """Held-out samples of one task as a model answered them: all of them, or some.

    outputs: (n, ...) of the network. y: (n, ...) labels or targets, on the same device. task: from 0. client: who
    scores, on tests of its own or with weights of its own; None where the server scores the shared model. owners: (n,)
    whose the samples are, by client, -1 for nobody's; None where the stream does not know. classes: of the task. seen:
    of all tasks that have begun, ascending.
    """

    outputs: Tensor
    y: Tensor
    task: int
    client: int | None
    owners: Tensor | None
    classes: tuple[int, ...]
    seen: tuple[int, ...]
    facts: Facts


class Metric:
    """Base of all metrics. `name` is the key in result.json and the heading in tables. percent: a fraction that is
    shown times 100. better: 1 where more is, -1 where less is, 0 where neither is."""

    name: ClassVar[str] = ""
    percent: ClassVar[bool] = False
    better: ClassVar[int] = 1
    by_client: ClassVar[bool] = False  # needs clients that score, or a stream that knows whose the tests are

    def measure(self, scored: Scored) -> Tensor:
        """(k,) sums over these samples, k the same for all; on any device."""
        raise NotImplementedError(f"metric {self.name!r} defines no measure")

    def value(self, sums: list[float]) -> Any:
        """What added sums stand for: a number, a list or a table of numbers; None where nothing was scored. By default
        the mean, where there are two sums: the total and how many samples it is of."""
        total, count = sums
        return total / count if count else None


class ByClass(Metric):
    """The accuracy on every class, a list by class; None for a class without a sample."""

    name = "per-class"
    percent = True

    def measure(self, scored: Scored) -> Tensor:
        """Right answers by class, then samples by class."""
        right = scored.y[scored.outputs.argmax(1) == scored.y]
        return torch.cat([torch.bincount(y, minlength=scored.facts.classes) for y in (right, scored.y)])

    def value(self, sums: list[float]) -> list[float | None]:
        half = len(sums) // 2
        return [right / count if count else None for right, count in zip(sums[:half], sums[half:], strict=True)]


class Confusion(Metric):
    """The confusion matrix: row y, column p has how many samples of class y were taken for class p."""

    name = "confusion"
    better = 0

    def measure(self, scored: Scored) -> Tensor:
        """The matrix, row after row."""
        classes = scored.facts.classes
        return torch.bincount(scored.y * classes + scored.outputs.argmax(1), minlength=classes**2)

    def value(self, sums: list[float]) -> list[list[int]]:
        classes = round(len(sums) ** 0.5)
        return [[int(count) for count in sums[row * classes :][:classes]] for row in range(classes)]


class ByClient(Metric):
    """The accuracy of every client, a list by client; None for a client that scored nothing."""

    name = "per-client"
    percent = True
    by_client = True

    def measure(self, scored: Scored) -> Tensor:
        """Right answers by client, then samples by client."""
        assert scored.owners is not None  # the run would have been refused
        right = scored.outputs.argmax(1) == scored.y
        owners = [scored.owners[(scored.owners >= 0) & some] for some in (right, torch.ones_like(right))]
        return torch.cat([torch.bincount(own, minlength=scored.facts.clients) for own in owners])

    value = ByClass.value


class OfClients(ByClient):
    """Base of numbers that are made of all clients' accuracies."""

    def value(self, sums: list[float]) -> float | None:  # type: ignore[override]
        found = [accuracy for accuracy in ByClass.value(self, sums) if accuracy is not None]  # type: ignore[arg-type]
        return self.of(np.array(found)) if found else None

    def of(self, accuracies: np.ndarray) -> float:
        raise NotImplementedError


class WorstClient(OfClients):
    """The lowest accuracy of a client."""

    name = "worst-client"

    def of(self, accuracies: np.ndarray) -> float:
        return float(accuracies.min())


class TenthPercentile(OfClients):
    """The accuracy below which a tenth of the clients are."""

    name = "client-p10"

    def of(self, accuracies: np.ndarray) -> float:
        return float(np.quantile(accuracies, 0.1))


class ClientSpread(OfClients):
    """The standard deviation of accuracies over clients."""

    name = "client-spread"
    better = -1

    def of(self, accuracies: np.ndarray) -> float:
        return float(accuracies.std())


@dataclass(frozen=True)
class NewcomerGap(ByClient):
    """The mean accuracy of some clients, those that joined late, minus that of the others."""

    clients: tuple[int, ...] = ()

    name = "newcomer-gap"

    def value(self, sums: list[float]) -> float | None:  # type: ignore[override]
        found = {client: one for client, one in enumerate(ByClass.value(self, sums)) if one is not None}  # type: ignore[arg-type]
        new = [one for client, one in found.items() if client in self.clients]
        old = [one for client, one in found.items() if client not in self.clients]
        return sum(new) / len(new) - sum(old) / len(old) if new and old else None


_KINDS = (ByClass, ByClient, Confusion, WorstClient, TenthPercentile, ClientSpread, NewcomerGap)
METRICS: dict[str, type[Metric]] = {kind.name: kind for kind in _KINDS}


class Metrics:
    """The metrics of a run. Their sums stand at the end of a row of counts, one metric after the other."""

    def __init__(self, metrics: Sequence[Metric] = (), facts: Facts | None = None, sizes: Sequence[int] = ()) -> None:
        self.metrics, self.facts, self.sizes = tuple(metrics), facts, tuple(sizes)

    def __bool__(self) -> bool:
        return bool(self.metrics)

    @property
    def size(self) -> int:
        """How many sums there are of all metrics together."""
        return sum(self.sizes)

    @staticmethod
    def tried(metrics: Sequence[Metric], facts: Facts) -> Metrics:
        """With the number of sums of each, from two samples of zeros. Raises SettingError for a metric that fails on
        them, before any training."""
        y = facts.blank.y
        outputs, labels = torch.zeros(2, *facts.outputs), torch.zeros(2, *y.shape[1:], dtype=y.dtype)
        classes = tuple(range(facts.classes))
        scored = Scored(outputs, labels, 0, 0, torch.zeros(2, dtype=torch.int64), classes, classes, facts)
        sums = [_measured(metric, scored) for metric in metrics]
        for metric, found in zip(metrics, sums, strict=True):
            try:
                value = metric.value(found.tolist())
            except Exception as error:
                raise _failure(metric, f"cannot make a value of {len(found)} sums", error) from error
            if not isinstance(value, int | float | list | tuple | NoneType):
                raise SettingError(
                    f"eval.metrics: {metric.name!r} ({type(metric).__name__}): value() must give a number, a list or "
                    f"table of numbers, or None; got {type(value).__name__}"
                )
        return Metrics(metrics, facts, [len(found) for found in sums])

    def on_task(
        self, task: int, client: int | None, owners: np.ndarray | None, classes: Sequence[int], seen: Sequence[int]
    ) -> TaskSums:
        """The sums of a task, 0 at first. owners: of all its samples."""
        return TaskSums(self, task, client, owners, tuple(classes), tuple(seen))

    def plain(self, row: Sequence[float]) -> list[float]:
        """A row of counts without the sums of metrics."""
        return list(row[: len(row) - self.size])

    def values(self, row: Sequence[float]) -> dict[str, Any]:
        """{name: value} of a row of counts, or of several that were added up."""
        ends = [sum(self.sizes[: index + 1]) - self.size for index in range(len(self.sizes))]
        parts = [row[len(row) + end - size : len(row) + end] for end, size in zip(ends, self.sizes, strict=True)]
        return {metric.name: metric.value(list(part)) for metric, part in zip(self.metrics, parts, strict=True)}

    def means(self, rows: Sequence[Sequence[float]]) -> dict[str, float]:
        """The means over tasks, as of the score, of those metrics whose values are numbers."""
        found: dict[str, list[float]] = {}
        for row in rows if self.metrics else ():
            for name, value in self.values(row).items():
                if isinstance(value, int | float):
                    found.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in found.items()}


class TaskSums:
    """What the metrics measure on one task, added up over pieces of its samples."""

    def __init__(
        self,
        metrics: Metrics,
        task: int,
        client: int | None,
        owners: np.ndarray | None,
        classes: tuple[int, ...],
        seen: tuple[int, ...],
    ) -> None:
        self.sums = torch.zeros(metrics.size, dtype=torch.float64)
        self._metrics, self._task, self._client, self._classes = metrics, task, client, (classes, seen)
        self._owners, self._count = owners, 0

    def add(self, outputs: Tensor, y: Tensor) -> None:
        """The sums over the next samples."""
        if not self._metrics:
            return
        assert self._metrics.facts is not None
        first, self._count = self._count, self._count + len(y)
        owners = None if self._owners is None else torch.from_numpy(self._owners[first : self._count]).to(y.device)
        scored = Scored(outputs, y, self._task, self._client, owners, *self._classes, self._metrics.facts)
        found = [_measured(metric, scored) for metric in self._metrics.metrics]
        for metric, sums, size in zip(self._metrics.metrics, found, self._metrics.sizes, strict=True):
            if len(sums) != size:
                raise SettingError(
                    f"eval.metrics: {metric.name!r} gave {len(sums)} sums for task {scored.task + 1}, not {size}: "
                    "they are added up, so there must be as many every time"
                )
        self.sums += torch.cat(found)


def _measured(metric: Metric, scored: Scored) -> Tensor:
    """(k,) float64 on the host. Raises SettingError that names the metric and the line."""
    try:
        found = metric.measure(scored)
    except Exception as error:
        what = f"fails on outputs {tuple(scored.outputs.shape)} and labels {tuple(scored.y.shape)}"
        raise _failure(metric, what, error) from error
    try:
        return torch.as_tensor(found).detach().to("cpu", torch.float64).reshape(-1)
    except Exception:
        raise SettingError(
            f"eval.metrics: {metric.name!r} ({type(metric).__name__}): measure() must give a tensor of sums; got "
            f"{type(found).__name__}"
        ) from None


def _failure(metric: Metric, what: str, error: Exception) -> SettingError:
    reason = f"{type(error).__name__}: {error} ({place_of(error)})"
    return SettingError(f"eval.metrics: {metric.name!r} ({type(metric).__name__}) {what}: {reason}")
