"""Base of the scenarios that divide a data set among tasks and clients."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from everfed.core.data import Data, DataCache
from everfed.core.stream import digest_of
from everfed.data import transforms
from everfed.data.augment import described
from everfed.data.errors import PartitionError
from everfed.data.lazy import MAPPED_BYTES, Samples
from everfed.data.partition import partition, who_got_what
from everfed.data.source import Source
from everfed.data.targets import CLASSES
from everfed.streams.draws import generator
from everfed.streams.objectives import ByObjective, objective_of
from everfed.streams.options import (
    USUAL_NORMALISATION,
    OptionError,
    Options,
    normalisation,
)
from everfed.streams.planned import CACHE_BYTES, SPLITS, PlannedStream, require_index
from everfed.streams.rows import choose_rows


@dataclass(frozen=True)
class Division:
    """The positions of all clients' samples, one client after the other: client k holds order[ends[k]:ends[k + 1]]."""

    order: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, parts: list[np.ndarray]) -> Division:
        """The same parts, without one array object per client."""
        return cls(np.concatenate(parts), np.cumsum([0, *map(len, parts)]))

    def __getitem__(self, client: int) -> np.ndarray:
        return self.order[self.ends[client] : self.ends[client + 1]]


class IncrementalStream(ByObjective, PlannedStream):
    """A data set, divided among tasks and clients.

    A scenario defines the classes of a task (`classes_of`), its samples (`view`), the division among clients that it
    uses (`division_of`) and its entries in `describe` (`facts`). any_targets: does it work for samples with several
    labels, or with numbers, too?
    """

    any_targets: ClassVar[bool] = False

    def __init__(
        self, source: Source, options: Options, *, seed: int, rounds_per_task: int, scale: float = 1.0
    ) -> None:
        super().__init__(options, seed=seed, rounds_per_task=rounds_per_task, scale=scale)
        self._use(_formatted(source, options))
        # all divisions are drawn here, so that one that cannot be drawn is refused before training
        self._divisions = {d: self._divide(d) for d in {self.division_of(t) for t in range(options.tasks)}}
        self._check_tests()
        self._cache = DataCache(MAPPED_BYTES if isinstance(source.x_train, Samples) else CACHE_BYTES)

    def _use(self, source: Source) -> None:
        """Set the attributes that depend on the source; raises OptionError for options that do not fit it."""
        options = self.options
        _check_augment(options.augment, source)
        self.source, self.classes, self.input_shape = source, source.classes, tuple(source.x_train.shape[1:])
        self.class_names = source.class_names
        self.name = f"{source.name}-{self.scenario}"
        if self._chain is not None:
            self.colour_draws = self._chain.colour_draws
        self.normalise = options.normalise or _usual_normalisation(source)
        self._mean, self._std = _constants(self.normalise, source)
        self._rows = choose_rows(source, self.seed, self.scale, options.validation, options.max_train, options.max_test)
        # groups decide which task and client has a sample; they are the classes where every sample has one
        self._y_train, self._y_test = source.strata("train"), source.strata("test")
        self._score_by(objective_of(source.targets, source.classes, source.y_train))

    # What a scenario decides

    @abstractmethod
    def classes_of(self, task: int) -> tuple[int, ...]:
        """The classes of `task`, ascending."""

    @abstractmethod
    def view(self, x: Tensor, task: int) -> Tensor:
        """Samples of the source as `task` shows them; same shape and dtype."""

    @abstractmethod
    def division_of(self, task: int) -> int:
        """The number of the division that `task` uses; that task's classes are what is divided."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the scenario adds to `describe`."""

    # The protocol

    def data(self, client: int, task: int) -> Data:
        """What `client` sees in `task`; ids are task * (size of the source) + position in the source. A recurring task
        has the same samples."""
        require_index("client", client, self.clients)
        require_index("task", task, self.tasks)
        kind = self.options.kind_of(task)
        rows = self._divisions[self.division_of(kind)][client]
        if self.options.holds_nothing(client, kind):
            rows = rows[:0]
        return self._cache.get((client, kind), lambda: self._materialise("train", rows, kind))

    def task_of(self, client: int, ids: np.ndarray) -> np.ndarray:
        """The tasks in which the client saw the samples with these ids (n,), for reports on buffers."""
        return ids // len(self.source.x_train)

    def test(self, task: int, split: str = "test") -> Data:
        """The test samples of `task`, or the validation samples held out of the training data."""
        require_index("task", task, self.tasks)
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is not one of the allowed values: {', '.join(SPLITS)}")
        if split == "validation" and not len(self._rows.validation):
            raise OptionError(
                "validation", "no validation split was held out; set a share that gives at least one sample"
            )
        kind = self.options.kind_of(task)
        return self._cache.get((split, kind), lambda: self._held_out(kind, split))

    def labels(self, task: int) -> tuple[int, ...]:
        """The classes of `task`, ascending."""
        require_index("task", task, self.tasks)
        return self.classes_of(self.options.kind_of(task))

    def identity(self) -> str:
        source = self.source
        x = (part.probe() if isinstance(part, Samples) else part for part in (source.x_train, source.x_test))
        tensors = (*x, source.y_train, source.y_test)
        # without label_kind: the type of the targets has it, and streams of earlier versions keep their identity
        options = {key: value for key, value in vars(self.options).items() if key != "label_kind"}
        return digest_of(json.dumps([self.scenario, _plain(options)], sort_keys=True), *tensors)

    def describe(self) -> dict[str, Any]:
        """The settings in full, the sizes, and the classes of every client in every division."""
        return {
            **self.outline(),
            "dataset": self.source.name,
            "origin": self.source.origin,
            "samples": {part: len(rows) for part, rows in vars(self._rows).items()},
            "test_labels": self.source.test_labels,
            "targets": self.source.targets,
            **_plain(vars(self.options)),
            "normalise": _plain(self.normalise),
            "encoder": self.source.encoder or None,
            **self.facts(),
            "who_got_what": [self._report(d) for d in sorted(self._divisions)],
        }

    # How data comes about

    def _check_tests(self) -> None:
        for task in range(self.options.tasks):
            if not len(self._pool(self._rows.test, self._y_test, task)):
                raise OptionError(
                    "tasks", f"task {task + 1} of {self.options.tasks} has no test sample to be scored on"
                )

    def _pool(self, rows: np.ndarray, y: np.ndarray, task: int) -> np.ndarray:
        """The rows whose class belongs to `task`; all of them where samples have no single class."""
        if self.source.targets != CLASSES:
            return rows
        return rows[np.isin(y[rows], self.classes_of(task))]

    def _divide(self, division: int) -> Division:
        pool = self._pool(self._rows.train, self._y_train, division)
        kind, rng = self.options.partition["kind"], generator(self.seed, "partition", division)
        chosen = {k: v for k, v in self.options.partition.items() if k != "kind"}
        try:
            parts = partition(kind, self._y_train[pool], self.clients, rng, **chosen)
        except PartitionError as problem:
            raise OptionError(
                "partition", f"{kind!r} in task {division + 1} of {self.options.tasks}: {problem}"
            ) from problem
        return Division.of([pool[part] for part in parts])

    def _held_out(self, task: int, split: str) -> Data:
        if split == "validation":
            return self._materialise("train", self._pool(self._rows.validation, self._y_train, task), task)
        return self._materialise("test", self._pool(self._rows.test, self._y_test, task), task)

    def _materialise(self, part: str, rows: np.ndarray, task: int) -> Data:
        """The samples of the source's part ("train" or "test") at `rows`, as the task shows them."""
        source = self.source
        x, y = (source.x_train, source.y_train) if part == "train" else (source.x_test, source.y_test)
        labels, ids = y[torch.from_numpy(rows).to(y.device)].to(x.device), rows + task * len(x)
        if isinstance(x, Samples):
            seen = f"{self.scenario} {self.seed} {self.facts()} task {task}"
            return Data(x.mapped(rows, lambda some: self.view(some, task), seen), labels, ids)
        return Data(self.view(x[torch.from_numpy(rows).to(x.device)], task), labels, ids)

    def _report(self, division: int) -> dict[str, Any]:
        pool = self._pool(self._rows.train, self._y_train, division)
        held = self._divisions[division]
        # positions within the pool, which was divided
        parts = np.split(np.searchsorted(pool, held.order), held.ends[1:-1])
        return who_got_what(self._y_train[pool], parts)


def _formatted(source: Source, options: Options) -> Source:
    """The source with its images in the format of the options."""
    if options.image_size is None and options.channels is None:
        return source
    if source.x_train.dtype != torch.uint8:
        raise OptionError("image_size", f"image_size and channels need uint8 images, not {source.x_train.dtype}")
    channels = options.channels or source.x_train.shape[1]
    size = options.image_size or source.x_train.shape[2]
    try:
        x_train, x_test = (_with_format(x, channels, size) for x in (source.x_train, source.x_test))
    except ValueError as problem:
        raise OptionError("channels", str(problem)) from problem
    fields = {**vars(source), "x_train": x_train, "x_test": x_test}
    return Source(**fields)


def _with_format(x: Tensor | Samples, channels: int, size: int) -> Any:
    return x.formatted(channels, size) if isinstance(x, Samples) else transforms.to_format(x, channels, size)


def _usual_normalisation(source: Source) -> str:
    """The default normalisation of the set; floats are used as they are."""
    return USUAL_NORMALISATION.get(source.name, "none") if source.x_train.dtype == torch.uint8 else "none"


def _constants(normalise: str | Mapping[str, Any], source: Source) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std); raises OptionError where they do not fit the channels."""
    mean, std = normalisation(normalise)
    if mean and source.x_train.dtype == torch.int64:
        raise OptionError("normalise", "tokens cannot be normalised; allowed: none")
    if len(mean) > 1 and len(mean) != source.x_train.shape[1]:
        raise OptionError("normalise", f"{len(mean)} entries for samples with {source.x_train.shape[1]} channels")
    return mean, std


def _check_augment(augment: Any, source: Source) -> None:
    if augment != "none" and source.x_train.dim() != 4:
        raise OptionError("augment", f"{augment!r} needs images; these samples are {tuple(source.x_train.shape[1:])}")


def _plain(value: Any) -> Any:
    """The same value in dicts and lists only, as JSON has them."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if callable(value):
        return described(value)
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
