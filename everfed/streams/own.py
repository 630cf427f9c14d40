"""A user's own stream: `dataset = "package.module:make_stream"`, periods of data as they arrive (see `feed.py`).

A run uses the first `tasks` periods of every client, `rounds_per_task` rounds each; a client whose stream ends before
has no data from then on. Periods are read on demand, and for a client only its own feed, so a real client builds the
same stream from the same recipe. Each client is scored on its own tests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.data import Data, DataCache
from everfed.data.targets import CLASSES, blank_targets
from everfed.streams.draws import generator
from everfed.streams.feed import Arrived, Feed, MakeStream, named_function
from everfed.streams.objectives import ByObjective, objective_of
from everfed.streams.options import (
    OptionError,
    Options,
    normalisation,
    refuse_unused,
    require_choice,
    require_number,
    require_whole,
)
from everfed.streams.planned import CACHE_BYTES, PlannedStream

_MEANINGLESS = (
    "partition", "validation", "max_train", "max_test", "image_size", "channels", "encoder", "label", "order",
)  # fmt: skip
DTYPES = {"uint8": torch.uint8, "float32": torch.float32, "int64": torch.int64}


class Own(ByObjective, PlannedStream):
    """classes: the width of the head, as many classes as may ever appear, or the labels or numbers of a sample where
    `label_kind` is "multi-label" or "regression". test_share: of every period, held out where it has no tests of its
    own. input_shape, dtype: of a sample in storage form, (channels, height, width) and "uint8" for images; by default
    those of the first period (a server without data needs them)."""

    scenario = "own"
    about = "periods that a function of your own yields for every client; scored on each client's own tests"
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
        refuse_unused(options, _MEANINGLESS, "a stream of your own")
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
        """The client's own tests of a period."""
        if split != "test":
            raise OptionError("validation", "periods as they arrive have a test split only")
        found = self._feed(client).test(task)
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
        given = {f.name: getattr(self.options, f.name) for f in fields(Options) if f.name not in _MEANINGLESS}
        return {
            **self.outline(),
            "dataset": f"{getattr(self.make, '__module__', '')}:{getattr(self.make, '__name__', 'stream')}",
            **given,
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
            options: dict[str, Any] = {"test_share": self.test_share, "seed": self.seed, "form": self._form}
            feeds[client] = Feed(self.make, client, self.classes, **options, targets=self.targets)
        return feeds[client]

    def _thinned(self, client: int, task: int) -> Data:
        arrived: Arrived | None = self._feed(client).period(task)
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
        return Data(none, blank_targets(self.targets, self.classes), np.zeros(0, dtype=np.int64))
