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
from everfed.data.lazy import MAPPED_BYTES, Samples
from everfed.data.partition import partition, who_got_what
from everfed.data.source import Source
from everfed.data.targets import CLASSES, held_out, stratified
from everfed.errors import PartitionError
from everfed.streams.draws import generator
from everfed.streams.objectives import ByObjective, objective_of
from everfed.streams.options import USUAL_NORMALISATION, OptionError, Options, normalisation
from everfed.streams.planned import CACHE_BYTES, PlannedStream, plain, require_index, require_split

LEAST_TESTS = 20  # of a class, at any scale


@dataclass(frozen=True)
class Rows:
    """Ascending positions: train and validation in the source's training part, test in its test part."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def choose_rows(source: Source, options: Options, seed: int, scale: float) -> Rows:
    """The samples that a stream may use: a share of them at scales below 1, with a validation part held out, which
    never comes from the test part."""
    y_train, y_test = source.strata("train"), source.strata("test")
    pool = _thinned(y_train, scale, options.max_train, generator(seed, "thin train"))
    least = min(1.0, LEAST_TESTS * source.classes / len(y_test))  # a handful of tests would score 0 or 100 %
    test = _thinned(y_test, max(scale, least), options.max_test, generator(seed, "thin test"))
    kept, held = held_out(y_train[pool], options.validation, generator(seed, "validation"))
    return Rows(pool[kept], pool[held], test)


def _thinned(labels: np.ndarray, scale: float, cap: int | None, rng: np.random.Generator) -> np.ndarray:
    """Positions of `scale` of the samples, `cap` at most, every class in proportion."""
    count = max(1, round(scale * len(labels)))
    count = count if cap is None else min(count, cap)
    return np.arange(len(labels)) if count == len(labels) else stratified(labels, count, rng)


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
        self.class_names, self.warnings = source.class_names, source.warnings
        self.name = f"{source.name}-{self.scenario}"
        if self._chain is not None:
            self.colour_draws = self._chain.colour_draws
        self.normalise = options.normalise or _usual_normalisation(source)
        self._mean, self._std = _constants(self.normalise, source)
        self._rows = self._choose_rows()
        # groups decide which task and client has a sample; they are the classes where every sample has one
        self._y_train, self._y_test = source.strata("train"), source.strata("test")
        self._score_by(objective_of(source.targets, source.classes, source.y_train))

    # What a scenario decides

    def classes_of(self, task: int) -> tuple[int, ...]:
        """The classes of `task`, ascending; by default all."""
        return tuple(range(self.source.classes))

    def view(self, x: Tensor, task: int) -> Tensor:
        """Samples of the source as `task` shows them, of the same shape and dtype; by default as they are."""
        return x

    def division_of(self, task: int) -> int:
        """The number of the division that `task` uses, by default its own; that task's classes are divided."""
        return task

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
        require_split(split, len(self._rows.validation))
        kind = self.options.kind_of(task)
        return self._cache.get((split, kind), lambda: self._held_out(kind, split))

    def owners(self, task: int, split: str = "test") -> np.ndarray | None:
        """Whose the samples of `test` are: by the column that divides the training samples, where one does."""
        partition = self.options.partition
        column = partition["column"] if partition["kind"] == "column" else None
        if column is None:
            return None
        train, test = self.source.columns[column]
        kind, values = self.options.kind_of(task), np.unique(train)
        if split == "validation":
            held = train[self._pool(self._rows.validation, self._y_train, kind)]
        else:
            held = test[self._pool(self._rows.test, self._y_test, kind)]
        place = np.minimum(np.searchsorted(values, held), len(values) - 1)
        return np.where(values[place] == held, place, -1)

    def labels(self, task: int) -> tuple[int, ...]:
        """The classes of `task`, ascending."""
        require_index("task", task, self.tasks)
        return self.classes_of(self.options.kind_of(task))

    def identity(self) -> str:
        source = self.source
        x = (part.probe() if isinstance(part, Samples) else part for part in (source.x_train, source.x_test))
        tensors = (*x, source.y_train, source.y_test, *map(_codes, source.columns.values()))
        # without label_kind: the type of the targets has it, and streams of earlier versions keep their identity
        options = {
            key: value
            for key, value in vars(self.options).items()
            if key != "label_kind" and (key, value) != ("arrivals", None)
        }
        return digest_of(json.dumps([self.scenario, plain(options)], sort_keys=True), *tensors)

    def describe(self) -> dict[str, Any]:
        """The settings in full, the sizes, and the classes of every client in every division."""
        return {
            **self.outline(),
            "dataset": self.source.name,
            "origin": self.source.origin,
            "samples": {part: len(rows) for part, rows in vars(self._rows).items()},
            "test_labels": self.source.test_labels,
            "targets": self.source.targets,
            "normalise": plain(self.normalise),
            "encoder": self.source.encoder or None,
            **self.facts(),
            "who_got_what": [self._report(d) for d in sorted(self._divisions)],
        }

    # How data comes about

    def _choose_rows(self) -> Rows:
        """The samples of the source that are used."""
        return choose_rows(self.source, self.options, self.seed, self.scale)

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
        columns = {key: train for key, (train, _) in self.source.columns.items()}
        try:
            parts = partition(kind, self._y_train[pool], self.clients, rng, rows=pool, columns=columns, **chosen)
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


def _codes(parts: tuple[np.ndarray, np.ndarray]) -> Tensor:
    """The content of a column as bytes."""
    return torch.from_numpy(
        np.frombuffer("\0".join(map(str, np.concatenate(parts).tolist())).encode(), np.uint8).copy()
    )


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
