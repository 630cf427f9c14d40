"""Base of all scenarios: the plan of every round, and how samples become network inputs.

Subclasses define the samples: divided from a data set (`incremental.py`), utterances of users (`periods.py`), images of
vehicles (`driving.py`), periods that a user's function yields (`own.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from everfed.core.data import Data
from everfed.core.stream import RoundPlan, Stream
from everfed.data import augment as augmentations
from everfed.data import transforms
from everfed.streams.calendar import Calendar
from everfed.streams.draws import cohort_size, generator
from everfed.streams.options import Options, require_number, require_whole

CACHE_BYTES = 512 * 2**20  # of materialised samples; dropped ones are made again on demand
SPLITS = ("test", "validation")


class PlannedStream(Stream):
    """Tasks one after the other, `rounds_per_task` rounds each, at the same rounds for all clients or by clocks of
    their own. Everything drawn comes from `seed` and a purpose, so every method of a comparison sees the same stream.
    """

    scenario: ClassVar[str]
    about: ClassVar[str]
    task_ids = False
    checked = True

    _mean: tuple[float, ...] = ()
    _std: tuple[float, ...] = ()

    def __init__(self, options: Options, *, seed: int, rounds_per_task: int, scale: float = 1.0) -> None:
        require_whole("seed", seed, least=0)
        require_whole("rounds_per_task", rounds_per_task)
        require_number("scale", scale, above=0.0, to=1.0)
        self.options, self.seed, self.scale = options, seed, scale
        self.clients, self.tasks, self.boundaries = options.clients, options.episodes, options.boundaries
        self.task_ids = type(self).task_ids and options.boundaries
        self.colour_draws = int(options.augment == "crop-flip-brightness")
        self.capturable = not callable(options.augment)
        self.rounds_per_task, self.rounds = rounds_per_task, rounds_per_task * self.tasks
        self.calendar = Calendar(options, self.tasks, rounds_per_task, seed)
        self.asynchronous, self.fingerprint = self.calendar.asynchronous, self.calendar.fingerprint

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """JSON-ready facts for result.json: `outline` and the stream's own."""

    # The plan

    def round(self, index: int) -> RoundPlan:
        """The plan of round `index`. With hidden boundaries `begins` and `ends` are empty."""
        return self.calendar.plan(index)

    def clock_of(self, client: int, index: int) -> tuple[int, int]:
        """(rounds of the client's task before `index`, rounds that the task lasts)."""
        return self.calendar.within(client, index)

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

    def outline(self) -> dict[str, Any]:
        """The entries that `describe` has in every scenario."""
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

    # From samples to network inputs

    def inputs(self, x: Tensor) -> Tensor:
        """uint8 images scaled to [0, 1] and normalised; float features normalised; tokens as they are."""
        if x.dtype == torch.int64:
            return x
        return transforms.scale(x, self._mean, self._std)

    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """(mean, std) of `inputs`; None where a subclass has its own."""
        return (self._mean, self._std) if type(self).inputs is PlannedStream.inputs else None

    def pixels(self, inputs: Tensor) -> Tensor:
        """Network inputs as uint8 images: the inverse of `inputs`, to show generated images."""
        return transforms.unscale(inputs, self._mean, self._std)

    def draw_augmentation(self, rng: np.random.Generator, count: int) -> np.ndarray | None:
        """(count, 3) draws for "crop-flip", one more for the brightness, None for "none"."""
        if self.options.augment == "none":
            return None
        if (chain := self._chain) is not None:
            return chain.draw(rng, count)
        draws = transforms.draw_crop_and_flip(rng, count)
        return np.hstack([draws, transforms.draw_brightness(rng, count)]) if self.colour_draws else draws

    @cached_property
    def _chain(self) -> augmentations.Chain | augmentations.PerSample | None:
        """The augmentations of a list, or a transform; None where one is named."""
        augment = self.options.augment
        if isinstance(augment, str):
            return None
        if callable(augment):
            return augmentations.PerSample(augment)
        return augmentations.Chain(augmentations.parse(augment), self.input_shape)

    def augment(self, x: Tensor, draws: Tensor) -> Tensor:
        """Crop, mirror and brighten as drawn; the images themselves when nothing is augmented."""
        if self.options.augment == "none":
            return x
        if (chain := self._chain) is not None:
            return chain.apply(x, draws)
        x = transforms.crop_and_flip(x, draws[:, :3])
        return transforms.brighten(x, draws[:, 3]) if self.colour_draws else x


def require_index(what: str, index: int, count: int) -> int:
    """The index, which must be one of `count`."""
    if not 0 <= index < count:
        raise IndexError(f"{what} {index} is not within 0..{count - 1}")
    return index
