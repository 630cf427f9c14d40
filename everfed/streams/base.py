"""What the incremental scenarios share: the round schedule, who takes part, who holds what, and the data itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from everfed.core.cache import DataCache
from everfed.core.data import Data
from everfed.core.stream import RoundPlan
from everfed.data import transforms
from everfed.data.errors import PartitionError
from everfed.data.partition import partition, who_got_what
from everfed.data.source import Source
from everfed.streams.calendar import Calendar
from everfed.streams.draws import cohort_size, generator
from everfed.streams.options import (
    USUAL_NORMALISATION,
    OptionError,
    Options,
    normalisation,
    require_number,
    require_whole,
)
from everfed.streams.rows import choose_rows

# Materialised samples kept at most; what is dropped is made again when it is asked for.
CACHE_BYTES = 512 * 2**20
SPLITS = ("test", "validation")


@dataclass(frozen=True)
class Division:
    """Positions of all clients, one after the other: client k holds order[ends[k]:ends[k + 1]]."""

    order: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, parts: list[np.ndarray]) -> Division:
        """The same parts, without one array object per client."""
        return cls(np.concatenate(parts), np.cumsum([0, *map(len, parts)]))

    def __getitem__(self, client: int) -> np.ndarray:
        return self.order[self.ends[client] : self.ends[client + 1]]


class IncrementalStream:
    """Tasks one after the other, `rounds_per_task` rounds each, at the same rounds for all clients or by clocks of
    their own.

    Everything drawn comes from `seed` and a purpose, so every method of a comparison sees the same stream. A scenario
    says which classes a task has (`classes_of`), how its samples look (`view`), and which division among clients it
    uses (`division_of`).
    """

    scenario: ClassVar[str]
    about: ClassVar[str]
    score = "accuracy"
    task_ids = False

    def __init__(
        self, source: Source, options: Options, *, seed: int, rounds_per_task: int, scale: float = 1.0
    ) -> None:
        require_whole("seed", seed, least=0)
        require_whole("rounds_per_task", rounds_per_task)
        require_number("scale", scale, above=0.0, to=1.0)
        self.scale = scale
        self._set_out(options, seed, rounds_per_task)
        self._use(_formatted(source, options))
        # All divisions are drawn here, so that one that cannot be drawn is refused before any training.
        self._divisions = {d: self._divide(d) for d in {self.division_of(t) for t in range(options.tasks)}}
        self._check_tests()
        self._cache = DataCache(CACHE_BYTES)

    def _set_out(self, options: Options, seed: int, rounds_per_task: int) -> None:
        """Who is where when."""
        self.options, self.seed = options, seed
        self.clients, self.tasks, self.boundaries = options.clients, options.episodes, options.boundaries
        self.task_ids = type(self).task_ids and options.boundaries
        self.rounds_per_task, self.rounds = rounds_per_task, rounds_per_task * self.tasks
        self.calendar = Calendar(options, self.tasks, rounds_per_task, seed)
        self.asynchronous, self.fingerprint = self.calendar.asynchronous, self.calendar.fingerprint

    def _use(self, source: Source) -> None:
        """Take what is needed of the source, and refuse options that do not fit it."""
        options = self.options
        _check_augment(options.augment, source)
        self.source, self.classes, self.input_shape = source, source.classes, tuple(source.x_train.shape[1:])
        self.class_names = source.class_names
        self.name = f"{source.name}-{self.scenario}"
        self.normalise = options.normalise or _usual_normalisation(source)
        self._mean, self._std = _constants(self.normalise, source)
        self._rows = choose_rows(source, self.seed, self.scale, options.validation, options.max_train, options.max_test)
        self._y_train, self._y_test = source.y_train.numpy(force=True), source.y_test.numpy(force=True)

    # What a scenario decides

    def classes_of(self, task: int) -> tuple[int, ...]:
        """The classes of `task`, ascending."""
        raise NotImplementedError

    def view(self, x: Tensor, task: int) -> Tensor:
        """Samples of the source as `task` shows them; same shape and dtype."""
        raise NotImplementedError

    def division_of(self, task: int) -> int:
        """The number of the division that `task` uses; that task's classes are what is divided."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What the scenario adds to `describe`."""
        raise NotImplementedError

    # The protocol

    def round(self, index: int) -> RoundPlan:
        """The plan of round `index`. With hidden boundaries nobody is said to begin or end."""
        return self.calendar.plan(index)

    def clock_of(self, client: int, index: int) -> tuple[int, int]:
        """(rounds of the client's task behind it, rounds that it lasts)."""
        return self.calendar.within(client, index)

    def data(self, client: int, task: int) -> Data:
        """What `client` sees in `task`; ids are task * (size of the source) + position in the source. A task that comes
        again brings the same samples."""
        _require_index("client", client, self.clients)
        _require_index("task", task, self.tasks)
        kind = self.options.kind_of(task)
        rows = self._divisions[self.division_of(kind)][client]
        if self.options.holds_nothing(client, kind):
            rows = rows[:0]
        x, y = self.source.x_train, self._y_train
        return self._cache.get((client, kind), lambda: self._materialise(x, y, rows, kind))

    def task_of(self, client: int, ids: np.ndarray) -> np.ndarray:
        """The tasks in which the client saw the samples with these ids (n,), for what a simulation tells of buffers."""
        return ids // len(self.source.x_train)

    def data_in(self, client: int, index: int) -> Data:
        """What a drifting client sees in round `index`: some samples of its task, and some of the next already."""
        task, share = self.calendar.task_of(client, index), self.calendar.coming(client, index)
        rng = generator(self.seed, "drift", client, index)
        old, new = self.data(client, task), self.data(client, task + 1)
        some = [
            data.take(np.sort(rng.permutation(len(data))[: round(part * len(data))]))
            for data, part in ((old, 1 - share), (new, share))
        ]
        return Data.union(some)

    def test(self, task: int, split: str = "test") -> Data:
        """The test samples of `task`, or the validation samples held out of the training data."""
        _require_index("task", task, self.tasks)
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
        _require_index("task", task, self.tasks)
        return self.classes_of(self.options.kind_of(task))

    def inputs(self, x: Tensor) -> Tensor:
        """uint8 images scaled to [0, 1] and normalised; float features normalised; tokens as they are."""
        if x.dtype == torch.int64:
            return x
        return transforms.scale(x, self._mean, self._std)

    def pixels(self, inputs: Tensor) -> Tensor:
        """Network inputs as uint8 images: the inverse of `inputs`, for looking at what a generator makes."""
        return transforms.unscale(inputs, self._mean, self._std)

    def draw_augmentation(self, rng: np.random.Generator, count: int) -> np.ndarray | None:
        """(count, 3) draws for "crop-flip", None for "none"."""
        return transforms.draw_crop_and_flip(rng, count) if self.options.augment == "crop-flip" else None

    def augment(self, x: Tensor, draws: Tensor) -> Tensor:
        """Crop and mirror as drawn; the images themselves when nothing is augmented."""
        return transforms.crop_and_flip(x, draws) if self.options.augment == "crop-flip" else x

    def outline(self) -> dict[str, Any]:
        """What every scenario says in `describe`."""
        return {
            "name": self.name,
            "scenario": self.scenario,
            "classes": self.classes,
            "input_shape": list(self.input_shape),
            "seed": self.seed,
            "scale": self.scale,
            "rounds": self.rounds,
            "rounds_per_task": self.rounds_per_task,
            "clients_per_round": cohort_size(self.clients, self.options.participation),
            "task_ids": self.task_ids,
        }

    def describe(self) -> dict[str, Any]:
        """The settings in full, the sizes, and who got what in every division."""
        return {
            **self.outline(),
            "dataset": self.source.name,
            "origin": self.source.origin,
            "samples": {part: len(rows) for part, rows in vars(self._rows).items()},
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
        """The rows whose class belongs to `task`."""
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
        x, y, rows = self.source.x_test, self._y_test, self._rows.test
        if split == "validation":
            x, y, rows = self.source.x_train, self._y_train, self._rows.validation
        return self._materialise(x, y, self._pool(rows, y, task), task)

    def _materialise(self, x: Tensor, y: np.ndarray, rows: np.ndarray, task: int) -> Data:
        samples = x[torch.from_numpy(rows).to(x.device)]
        labels = torch.from_numpy(y[rows]).to(x.device)
        return Data(self.view(samples, task), labels, rows + task * len(x))

    def _report(self, division: int) -> dict[str, Any]:
        pool = self._pool(self._rows.train, self._y_train, division)
        held = self._divisions[division]
        # Positions within the pool, since that is what was divided.
        parts = np.split(np.searchsorted(pool, held.order), held.ends[1:-1])
        return who_got_what(self._y_train[pool], parts)


def _formatted(source: Source, options: Options) -> Source:
    """The source with its images brought to the format asked for."""
    if options.image_size is None and options.channels is None:
        return source
    if source.x_train.dtype != torch.uint8:
        raise OptionError("image_size", f"image_size and channels need uint8 images, not {source.x_train.dtype}")
    channels = options.channels or source.x_train.shape[1]
    size = options.image_size or source.x_train.shape[2]
    try:
        x_train, x_test = (transforms.to_format(x, channels, size) for x in (source.x_train, source.x_test))
    except ValueError as problem:
        raise OptionError("channels", str(problem)) from problem
    fields = {**vars(source), "x_train": x_train, "x_test": x_test}
    return Source(**fields)


def _usual_normalisation(source: Source) -> str:
    """What the set is normalised by when the recipe does not say; floats are taken to be ready for use."""
    return USUAL_NORMALISATION.get(source.name, "none") if source.x_train.dtype == torch.uint8 else "none"


def _constants(normalise: str | Mapping[str, Any], source: Source) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std), refused where they do not fit the channels."""
    mean, std = normalisation(normalise)
    if mean and source.x_train.dtype == torch.int64:
        raise OptionError("normalise", "tokens cannot be normalised; allowed: none")
    if len(mean) > 1 and len(mean) != source.x_train.shape[1]:
        raise OptionError("normalise", f"{len(mean)} entries for samples with {source.x_train.shape[1]} channels")
    return mean, std


def _check_augment(augment: str, source: Source) -> None:
    if augment != "none" and source.x_train.dim() != 4:
        raise OptionError("augment", f"{augment!r} needs images; these samples are {tuple(source.x_train.shape[1:])}")


def _require_index(what: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise IndexError(f"{what} {index} is not within 0..{count - 1}")


def _plain(value: Any) -> Any:
    """The same value in dicts and lists only, as JSON has them."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
