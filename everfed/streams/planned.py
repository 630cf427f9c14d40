"""Base of all scenarios: the plan of every round, and how samples become network inputs.

Subclasses define the samples: divided from a data set (`incremental.py`), utterances of users (`periods.py`), images of
vehicles (`driving.py`), periods that a user's function yields (`own.py`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from everfed.core.data import Data
from everfed.core.spans import NAMED, spans
from everfed.core.stream import RoundPlan, Stream
from everfed.data import augment as augmentations
from everfed.data import transforms
from everfed.streams import arrivals, attendance, clocks
from everfed.streams.draws import cohort_size, generator
from everfed.streams.options import OptionError, Options, refuse_unused, require_number, require_whole

CACHE_BYTES = 512 * 2**20  # of materialised samples; dropped ones are made again on demand
SPLITS = ("test", "validation")


class PlannedStream(Stream):
    """Tasks one after the other, `rounds_per_task` rounds each, at the same rounds for all clients or by clocks of
    their own. Everything drawn comes from `seed` and a purpose, so every method of a comparison sees the same stream.
    """

    scenario: ClassVar[str]
    unused: ClassVar[tuple[str, ...]] = ()  # options that have no effect in this scenario, and are refused
    task_ids = False
    checked = True

    _mean: tuple[float, ...] = ()
    _std: tuple[float, ...] = ()

    def __init__(self, options: Options, *, seed: int, rounds_per_task: int, scale: float = 1.0) -> None:
        require_whole("seed", seed, least=0)
        require_whole("rounds_per_task", rounds_per_task)
        require_number("scale", scale, above=0.0, to=1.0)
        refuse_unused(options, self.unused, self.scenario)
        self.options, self.seed, self.scale = options, seed, scale
        self.clients, self.tasks, self.boundaries = options.clients, options.episodes, options.boundaries
        self.task_ids = type(self).task_ids and options.boundaries
        self.colour_draws = int(options.augment == "crop-flip-brightness")
        self.capturable = not callable(options.augment)
        self.rounds_per_task, self.rounds = rounds_per_task, rounds_per_task * self.tasks
        if options.drift > rounds_per_task:
            raise OptionError("drift", f"{options.drift} rounds are more than a task has: {rounds_per_task}")
        self.clocks = clocks.make(options.asynchronous, self.clients, self.tasks, rounds_per_task, seed)
        self.attendance = attendance.make(
            options.participation, options.availability, options.deadline, self.clients, self.rounds, seed
        )
        self.arrivals = None
        if options.arrivals is not None:
            self.arrivals = arrivals.make(options.arrivals, self.clients, self.rounds, seed)
        self.stale = self.arrivals is not None
        self.asynchronous = not self.clocks.together
        self.fingerprint = self.clocks.fingerprint + self.attendance.fingerprint
        self.fingerprint += self.arrivals.fingerprint if self.arrivals else ""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """JSON-ready facts for result.json: `outline` and the stream's own."""

    # The plan

    def round(self, index: int) -> RoundPlan:
        """The plan of round `index`. With hidden boundaries `begins` and `ends` are empty. Evaluation is after rounds
        R, 2R, ... of `rounds_per_task` = R, also where clients have clocks of their own."""
        participants, notes = self._attending(index)
        common = self.clocks.common and self.attendance.there is None and not self.options.drift
        plan = (self._common_plan if common else self._own_plan)(index, participants, notes)
        if self.arrivals is None:
            return plan
        arrived = self.arrivals.rounds[index]
        late = {client: index - since for client, since in sorted(arrived.began.items()) if since < index}
        notes = {"seconds_simulated": arrived.seconds, **({"staleness": late} if late else {})}
        began, starts = dict(sorted(arrived.began.items())), tuple(sorted(arrived.starts))
        return replace(plan, participants=tuple(began), notes=notes, began=began, starts=starts,
                       awaited=self.arrivals.awaited[index])  # fmt: skip

    def _attending(self, index: int) -> tuple[tuple[int, ...], Mapping[str, Any]]:
        """(who takes part in round `index`, for its event: who is too late)."""
        if not 0 <= index < self.rounds:
            raise IndexError(f"round {index} is not within 0..{self.rounds - 1}")
        participants, late = self.attendance.chosen(index)
        return participants, {"late": list(late) if len(late) <= NAMED else spans(late)} if late else {}

    def _common_plan(self, index: int, participants: tuple[int, ...], notes: Mapping[str, Any]) -> RoundPlan:
        """All clients are available, and in the same task."""
        task, within = divmod(index, self.rounds_per_task)
        clients = tuple(range(self.clients))
        last = within == self.rounds_per_task - 1
        return RoundPlan(
            task=task,
            participants=participants,
            tasks=dict.fromkeys(clients, task),
            begins=clients if within == 0 and self.boundaries else (),
            ends=clients if last and self.boundaries else (),
            evaluate=last,
            notes=notes,
        )

    def _own_plan(self, index: int, participants: tuple[int, ...], notes: Mapping[str, Any]) -> RoundPlan:
        there, first = self.attendance.present(index), self.clocks.first
        rows = np.zeros_like(there) if self.clocks.common else there
        tasks = (first[:, 1:-1] <= index).sum(axis=1)[rows]
        begun, ending = first[rows, tasks], first[rows, tasks + 1] == index + 1
        starts = ~self.attendance.was_there(there, begun, index)  # a task begins for a client when it first sees it
        server, at_server = self.clocks.server, int((self.clocks.server[1:-1] <= index).sum())
        own = dict(zip(there.tolist(), tasks.tolist(), strict=True))
        return RoundPlan(
            task=index // self.rounds_per_task,
            participants=participants,
            tasks=own,
            begins=tuple(there[starts].tolist()) if self.boundaries else (),
            ends=tuple(there[ending].tolist()) if self.boundaries else (),
            evaluate=(index + 1) % self.rounds_per_task == 0,
            notes=notes,
            server_task=at_server if self.boundaries else None,
            opens=self.boundaries and bool(server[at_server] == index),
            closes=self.boundaries and bool(server[at_server + 1] == index + 1),
            drifting=frozenset(filter(lambda k: self._coming(k, index), own)) if self.options.drift else frozenset(),
        )

    def _place(self, client: int, index: int) -> tuple[int, int, int]:
        """(the client's task in round `index`, rounds of the task before it, rounds that the task lasts)."""
        row = self.clocks.first[0 if self.clocks.common else client]
        task = int((row[1:-1] <= index).sum())
        return task, int(index - row[task]), int(row[task + 1] - row[task])

    def clock_of(self, client: int, index: int) -> tuple[int, int]:
        """(rounds of the client's task before `index`, rounds that the task lasts)."""
        return self._place(client, index)[1:]

    def _coming(self, client: int, index: int) -> float:
        """The share of its samples that a client already sees of its next task: it grows over the last `drift` rounds
        of a task, from 1 / (drift + 1) to drift / (drift + 1)."""
        drift, (task, behind, lasts) = self.options.drift, self._place(client, index)
        return 0.0 if task == self.tasks - 1 else max(0, drift - (lasts - behind) + 1) / (drift + 1)

    def data_in(self, client: int, index: int) -> Data:
        """What a drifting client sees in round `index`: some samples of its task, and some of the next already."""
        task, share = self._place(client, index)[0], self._coming(client, index)
        rng = generator(self.seed, "drift", client, index)
        old, new = self.data(client, task), self.data(client, task + 1)
        some = [
            data.take(np.sort(rng.permutation(len(data))[: round(part * len(data))]))
            for data, part in ((old, 1 - share), (new, share))
        ]
        return Data.union(some)

    def outline(self) -> dict[str, Any]:
        """The entries that `describe` has in every scenario: names, sizes and options."""
        return {
            **{key: plain(value) for key, value in vars(self.options).items() if key not in self.unused},
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


def require_split(split: str, held_out: float) -> None:
    """Raises for a split that there is not. held_out: how much was held out for validation."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of the allowed values: {', '.join(SPLITS)}")
    if split == "validation" and not held_out:
        raise OptionError("validation", "no validation split was held out; set a share that gives at least one sample")


def plain(value: Any) -> Any:
    """The same value in dicts and lists only, as JSON has them."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if callable(value):
        return augmentations.described(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value
