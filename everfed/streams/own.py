"""A user's own data, period by period, from a user's function: `dataset = "package.module:make_stream"`.

    def make_stream(client: int) -> Iterable[Period]:
        ...

The function is called with a client's number and gives that client's periods in the order in which they arrive: a list,
or a generator that blocks until the next period is there. When it ends, the client has no further data. A period is a
`Period`, or simply a pair (x, y). Classes may appear at any time, as long as they are below `classes`, the width of the
head.

A run uses the first `tasks` periods of every client, `rounds_per_task` rounds each. Periods are read on demand, and for
a client only its own feed, so a real client builds the same stream from the same recipe. A simulation may call the
function more than once and must get the same periods again: a resumed run, and every worker process, reads them from
the beginning. Each client is scored on its own tests.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from everfed.core.data import Data, DataCache
from everfed.data.source import storage_form, storage_labels
from everfed.data.targets import CLASSES, TOKENS, blank_targets, held_out, storage_targets, strata
from everfed.errors import DataError
from everfed.naming import load_object
from everfed.streams.draws import generator
from everfed.streams.objectives import ByObjective, objective_of
from everfed.streams.options import OptionError, Options, normalisation, require_choice, require_number, require_whole
from everfed.streams.planned import CACHE_BYTES, PlannedStream, require_split

DTYPES = {"uint8": torch.uint8, "float32": torch.float32, "int64": torch.int64}
Array = np.ndarray | Tensor


@dataclass(frozen=True)
class Period:
    """Data of one period. x: (n, ...) images, features or tokens in any of the usual layouts; y: (n,) class numbers
    from 0, or the targets that stream.label_kind names. test: a pair (x, y) for scoring, never for training; None: a
    share of x and y is held out instead."""

    x: Array
    y: Array
    test: tuple[Array, Array] | None = None


MakeStream = Callable[[int], Iterable[Any]]


class Own(ByObjective, PlannedStream):
    """classes: the width of the head, as many classes as may ever appear; or, by `label_kind`, the labels or numbers of
    a sample, or the vocabulary of tokens. test_share: of every period, held out where it has no tests of its own.
    input_shape, dtype: of a sample in storage form, (channels, height, width) and "uint8" for images; by default those
    of the first period (a server without data needs them)."""

    scenario = "own"
    unused: ClassVar[tuple[str, ...]] = (
        "partition",
        "max_train",
        "max_test",
        "image_size",
        "channels",
        "encoder",
        "label",
        "order",
    )
    own_tests = True
    private_data = True

    def __init__(
        self,
        make: MakeStream,
        options: Options,
        *,
        seed: int,
        rounds_per_task: int,
        scale: float = 1.0,
        classes: int | None = None,
        test_share: float = 0.2,
        input_shape: Sequence[int] | None = None,
        dtype: str | None = None,
    ) -> None:
        if not callable(make):
            raise OptionError("scenario", "own takes a function of a client's number; arrays fit the other scenarios")
        super().__init__(options, seed=seed, rounds_per_task=rounds_per_task, scale=scale)
        require_number("test_share", test_share, least=0.0, below=1.0)
        if classes is None:
            raise OptionError("classes", "expected the number of classes that may ever appear: the width of the head")
        require_whole("classes", classes)
        self.make, self.classes, self.test_share = make, classes, test_share
        self.targets = options.label_kind or CLASSES
        self._score_by(objective_of(self.targets, classes))
        self.name = f"{getattr(make, '__name__', 'stream')}-own"
        self._feeds: tuple[int, dict[int, Feed]] = (os.getpid(), {})
        self._cache = DataCache(CACHE_BYTES)
        self._form: Tensor | None = None  # dtype and shape of samples: of the first period, or as given
        self._blank = self._first_form() if input_shape is None else self._given_form(input_shape, dtype)
        self._form = self._blank.x
        self.input_shape = tuple(self._blank.x.shape[1:])
        if options.augment != "none" and len(self.input_shape) != 3:
            raise OptionError("augment", f"{options.augment!r} needs images; these samples are {self.input_shape}")
        self._mean, self._std = normalisation(options.normalise or "none")

    @staticmethod
    def read(dataset: str | Path, data_dir: str | Path | None = None) -> MakeStream:
        """The function of that name."""
        return named_function(str(dataset))

    # The protocol

    def data(self, client: int, task: int) -> Data:
        """The training samples of the client's period `task`; none when its stream is over."""
        if self.options.holds_nothing(client, task):
            return self._blank
        return self._cache.get((client, task), lambda: self._thinned(client, task))

    def test_of(self, client: int, task: int, split: str = "test") -> Data:
        """The client's own tests of a period, or the validation samples held out of its training samples."""
        require_split(split, self.options.validation)
        found = self._feed(client).test(task, split)
        return self._blank if found is None else found

    def labels_of(self, client: int, task: int) -> tuple[int, ...]:
        """The classes that occur in a client's period; all outputs where samples have no class."""
        if self.targets != CLASSES:
            return self.labels(task)
        found: list[int] = torch.cat([self.data(client, task).y, self.test_of(client, task).y]).unique().tolist()
        return tuple(found)

    def task_of(self, client: int, ids: np.ndarray) -> np.ndarray:
        """The periods in which the client got the samples with these ids (n,)."""
        return self._feed(client).periods_of(ids)

    def test(self, task: int, split: str = "test") -> Data:
        """Nothing: tests are the clients' own."""
        return self._blank

    def labels(self, task: int) -> tuple[int, ...]:
        """All classes: which of them will appear is not known."""
        return tuple(range(self.classes))

    def describe(self) -> dict[str, Any]:
        """The settings in full; what will arrive is not known."""
        return {
            **self.outline(),
            "dataset": f"{getattr(self.make, '__module__', '')}:{getattr(self.make, '__name__', 'stream')}",
            "test_share": self.test_share,
            "own_tests": True,
        }

    # How data comes about

    def _feed(self, client: int) -> Feed:
        """The client's feed; a forked process opens its own ones, since both would read from the same open files."""
        if self._feeds[0] != os.getpid():
            self._feeds = (os.getpid(), {})
        feeds = self._feeds[1]
        if client not in feeds:
            shares: dict[str, Any] = {"test_share": self.test_share, "validation": self.options.validation}
            options: dict[str, Any] = {"seed": self.seed, "form": self._form, "targets": self.targets}
            feeds[client] = Feed(self.make, client, self.classes, **shares, **options)
        return feeds[client]

    def _thinned(self, client: int, task: int) -> Data:
        arrived = self._feed(client).period(task)
        if arrived is None:
            return self._blank
        data = arrived.train
        if self.scale == 1.0 or len(data) == 0:
            return data
        rng = generator(self.seed, "thin a period", client, task)
        return data.take(np.sort(rng.permutation(len(data))[: max(1, round(self.scale * len(data)))]))

    def _first_form(self) -> Data:
        """Empty data with the dtype and shape of the first client that has any."""
        for client in range(self.clients):
            arrived = self._feed(client).period(0)
            if arrived is not None:
                return arrived.train.take(np.zeros(0, dtype=np.int64))
        raise OptionError("dataset", f"none of the {self.clients} clients has a period; the stream is empty")

    def _given_form(self, input_shape: Sequence[int], dtype: str | None) -> Data:
        for size in input_shape:
            require_whole("input_shape", size)
        dtype = dtype or ("uint8" if len(input_shape) == 3 else "float32")
        require_choice("dtype", dtype, DTYPES)
        none = torch.zeros((0, *input_shape), dtype=DTYPES[dtype])
        width = input_shape[0] if self.targets == TOKENS else self.classes
        return Data(none, blank_targets(self.targets, width), np.zeros(0, dtype=np.int64))


@dataclass(frozen=True)
class Arrived:
    """A period as clients use it: samples in storage form, with ids that are unique for the client."""

    train: Data
    test: Data
    validation: Data


class Feed:
    """The periods of one client, read one after the other on demand.

    make: the user's function. classes: the width of the head. test_share: of every class of a period without tests of
    its own, held out by `seed`. validation: share of what is left to train on, held out, too. form: an empty tensor
    with the dtype and shape of samples; by default those of the first period. targets: one of
    `everfed.data.targets.KINDS`. Only the newest period's training samples are kept; for an earlier one the function
    is called again.
    """

    def __init__(
        self,
        make: MakeStream,
        client: int,
        classes: int,
        *,
        test_share: float = 0.2,
        validation: float = 0.0,
        seed: int = 0,
        form: Tensor | None = None,
        targets: str = CLASSES,
    ) -> None:
        self.make, self.client, self.classes, self.targets = make, client, classes, targets
        self.test_share, self.validation, self.seed = test_share, validation, seed
        self._form = form
        self.held_out: list[dict[str, Data]] = []  # by period, for good
        self._ends: list[int] = []
        self._newest: Arrived | None = None
        self._restart()

    def _restart(self) -> None:
        given: Any = self.make(self.client)
        if not isinstance(given, Iterable):
            name = getattr(self.make, "__name__", "the function")
            raise DataError(
                f"client {self.client}: {name} gave {type(given).__name__}; expected the client's periods: a list of "
                "pairs (x, y), or a generator that yields them"
            )
        self._periods: Iterator[Any] = iter(given)
        self._read, self._samples, self._over = 0, 0, False

    def period(self, index: int) -> Arrived | None:
        """The period with this number (from 0); waits until it arrives; None when the stream ends before.

        Raises DataError for samples that do not fit: labels beyond the head, another shape, not one label per sample.
        """
        if index < self._read - 1:
            self._restart()
        while self._read <= index and not self._over:
            self._next()
        return None if self._read <= index else self._newest

    def test(self, index: int, split: str = "test") -> Data | None:
        """The period's tests, or its validation samples; None when the stream ends before."""
        if index >= len(self.held_out):
            self.period(index)
        return self.held_out[index][split] if index < len(self.held_out) else None

    def periods_of(self, ids: np.ndarray) -> np.ndarray:
        """The periods in which samples with these ids arrived, (n,)."""
        while len(ids) and not (self._ends and ids.max() < self._ends[-1]) and not self._over:
            self._next()
        return np.searchsorted(np.array(self._ends), ids, side="right")

    def _next(self) -> None:
        try:
            found = next(self._periods)
        except StopIteration:
            self._over = True
            return
        self._newest = self._prepared(found if isinstance(found, Period) else _pair(found, self._where()))
        if self._read == len(self.held_out):
            self.held_out.append({"test": self._newest.test, "validation": self._newest.validation})
            self._ends.append(self._samples)
        self._read += 1

    def _where(self) -> str:
        return f"client {self.client}, period {self._read + 1}"

    def _prepared(self, period: Period) -> Arrived:
        x, y = self._checked(period.x, period.y)
        if period.test is not None:
            x_test, y_test = self._checked(*period.test)
        else:
            x, y, x_test, y_test = self._parted(x, y, self.test_share, "held out of a period")
        x, y, *validation = self._parted(x, y, self.validation, "validation of a period")
        return Arrived(self._numbered(x, y), self._numbered(x_test, y_test), self._numbered(*validation))

    def _parted(self, x: Tensor, y: Tensor, share: float, purpose: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(samples and labels that are kept, those of the share that is held out)."""
        rng = generator(self.seed, purpose, self.client, self._read)
        kept, held = (torch.from_numpy(rows) for rows in held_out(strata(y), share, rng))
        return x[kept], y[kept], x[held], y[held]

    def _numbered(self, x: Tensor, y: Tensor) -> Data:
        first = self._samples
        self._samples += len(y)
        return Data(x, y, np.arange(first, self._samples, dtype=np.int64))

    def _checked(self, x: Array, y: Array) -> tuple[Tensor, Tensor]:
        where = self._where()
        samples, labels = storage_form(x, where), self._labels(y, where)
        if len(samples) != len(labels):
            raise DataError(f"{where}: {len(samples)} samples but {len(labels)} labels")
        self._form = samples[:0] if self._form is None else self._form
        if samples.shape[1:] != self._form.shape[1:] or samples.dtype != self._form.dtype:
            raise DataError(
                f"{where}: samples are {_form(samples)}, those of the stream {_form(self._form)}; all periods of all "
                "clients must have the same dtype and shape, those of stream.input_shape and stream.dtype if given"
            )
        return samples, labels

    def _labels(self, y: Array, where: str) -> Tensor:
        if self.targets == CLASSES:
            labels = storage_labels(y, where)
            _check_classes(labels, self.classes, where)
            return labels
        labels = storage_targets(y, self.targets, where)
        if self.targets == TOKENS:
            _check_classes(labels.clamp_min(0), self.classes, where)
        elif labels.shape[1] != self.classes:
            raise DataError(
                f"{where}: targets have {labels.shape[1]} columns, expected stream.classes = {self.classes}"
            )
        return labels


def _form(samples: Tensor) -> str:
    return f"{str(samples.dtype).removeprefix('torch.')} {tuple(samples.shape[1:])}"


def named_function(name: str) -> MakeStream:
    """The function called `package.module:make_stream`."""
    found = load_object(name, "stream.dataset")
    if not callable(found):
        raise DataError(f"stream.dataset = {name!r} is not a function of a client's number")
    try:
        inspect.signature(found).bind(0)
    except TypeError as problem:
        raise DataError(f"stream.dataset = {name!r} must take a client's number, and nothing else: {problem}") from None
    except ValueError:  # some callables have no signature
        pass
    make: MakeStream = found
    return make


def _check_classes(labels: Tensor, classes: int, where: str) -> None:
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        wrong = int(labels.min()) if int(labels.min()) < 0 else int(labels.max())
        raise DataError(
            f"{where}: class {wrong} does not fit the head, which has classes 0 to {classes - 1}; "
            f"set stream.classes to as many as may ever appear"
        )


def _pair(found: Any, where: str) -> Period:
    if isinstance(found, (tuple, list)) and len(found) == 2:
        return Period(*found)
    raise DataError(f"{where}: expected a Period or a pair (x, y), got {type(found).__name__}")
