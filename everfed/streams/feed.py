"""A user's own data, period by period, from a user's function: `package.module:make_stream`.

    def make_stream(client: int) -> Iterable[Period]:
        ...

The function is called with a client's number and gives that client's periods in the order in which they arrive: a list,
or a generator that blocks until the next period is there. When it ends, the client has no further data. A period is a
`Period`, or simply a pair (x, y). Classes may appear at any time, as long as they are below `classes`, the width of the
head.

The same function serves a simulation (`scenario = "own"`, where it is called for every client) and a real client, which
calls it for itself alone; both read it through `Feed`. A simulation may call it more than once and must get the same
periods again: a resumed run, and every worker process, reads them from the beginning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.data import Data
from everfed.data.errors import DataError
from everfed.data.source import storage_form, storage_labels
from everfed.data.split import held_out
from everfed.data.targets import CLASSES, storage_targets, strata
from everfed.naming import load_object
from everfed.streams.draws import generator

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


@dataclass(frozen=True)
class Arrived:
    """A period as clients use it: samples in storage form, with ids that are unique for the client."""

    train: Data
    test: Data


class Feed:
    """The periods of one client, read one after the other on demand.

    make: the user's function, or its name `package.module:make_stream`. classes: the width of the head. test_share: of
    every class of a period without tests of its own, held out by `seed`. Only the newest period's training samples are
    kept; an earlier one is read by calling the function again, unless `once` (a real client's stream cannot be read
    twice). form: an empty tensor with the dtype and shape of samples; by default those of the first period.
    targets: one of `everfed.data.targets.KINDS`.
    """

    def __init__(
        self,
        make: MakeStream | str,
        client: int,
        classes: int,
        *,
        test_share: float = 0.2,
        seed: int = 0,
        once: bool = False,
        form: Tensor | None = None,
        targets: str = CLASSES,
    ) -> None:
        self.make = named_function(make) if isinstance(make, str) else make
        self.client, self.classes, self.test_share, self.seed, self.once = client, classes, test_share, seed, once
        self.tests: list[Data] = []
        self._ends: list[int] = []  # how many samples had arrived after each period
        self._form, self.targets = form, targets
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

    @property
    def arrived(self) -> int:
        """How many periods were read so far."""
        return self._read

    def period(self, index: int) -> Arrived | None:
        """The period with this number (from 0); waits until it arrives; None when the stream ends before.

        Raises DataError for samples that do not fit: labels beyond the head, another shape, not one label per sample.
        """
        if index < self._read - 1:
            if self.once:
                raise DataError(f"client {self.client}: period {index} is gone; {self._read} were read, each once")
            self._restart()
        while self._read <= index and not self._over:
            self._next()
        return None if self._read <= index else self._newest

    def test(self, index: int) -> Data | None:
        """The period's tests, which are kept; None when the stream ends before."""
        if index >= len(self.tests):
            self.period(index)
        return self.tests[index] if index < len(self.tests) else None

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
        if self._read == len(self.tests):
            self.tests.append(self._newest.test)
            self._ends.append(self._samples)
        self._read += 1

    def _where(self) -> str:
        return f"client {self.client}, period {self._read}"

    def _prepared(self, period: Period) -> Arrived:
        x, y = self._checked(period.x, period.y)
        if period.test is not None:
            return Arrived(self._numbered(x, y), self._numbered(*self._checked(*period.test)))
        rng = generator(self.seed, "held out of a period", self.client, self._read)
        kept, held = (torch.from_numpy(rows) for rows in held_out(strata(y), self.test_share, rng))
        return Arrived(self._numbered(x[kept], y[kept]), self._numbered(x[held], y[held]))

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
        if labels.shape[1] != self.classes:
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
