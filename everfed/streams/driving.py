"""Driving: every client is a vehicle with an object detector; some vehicles move to another place during the run.

FedGP's Figure 4: two vehicles, 70 rounds, one of them enters the highway at round 60, without any signal to the method.
There are two test sets: of the places where all begin (task 1) and of those that some move to (task 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.data import Data
from everfed.core.stream import RoundPlan
from everfed.data.detection import YoloLoss, padded, pictures, precision
from everfed.data.scenes import PARTS, Scene, Scenes, load_scenes, pixels
from everfed.data.targets import held_out
from everfed.errors import DataError
from everfed.streams.draws import generator
from everfed.streams.options import OptionError, Options, require_whole
from everfed.streams.planned import PlannedStream, require_split

HOME, AWAY = 0, 1


class Driving(PlannedStream):
    """`tasks` is 2: home and away. The drive has tasks * rounds_per_task rounds; at round `moves_at`, counted from 0,
    the clients in `moving` leave home for away. A run made smaller by its scale moves earlier in proportion.

    home, away: names of domains; by default those of the data set. size: height and width of images, multiples of the
    detector's stride. max_boxes: of an image; the largest are kept. anchors: (width, height) of the detector's anchor
    boxes. `max_train` and `max_test` count images of every domain.
    """

    scenario = "driving"
    unused = (
        *("partition", "normalise", "image_size", "channels", "encoder", "label", "label_kind"),
        *("augment",),  # a mirrored image would need mirrored boxes
        *("asynchronous", "without", "order", "drift"),
    )
    score = "map"
    also = ("map_50_95",)
    has_pictures = True

    read = staticmethod(load_scenes)

    def __init__(
        self,
        source: Scenes,
        options: Options,
        *,
        seed: int,
        rounds_per_task: int,
        scale: float = 1.0,
        moves_at: int = 60,
        moving: Sequence[int] = (1,),
        home: Sequence[str] | None = None,
        away: Sequence[str] | None = None,
        size: Sequence[int] = (192, 320),
        max_boxes: int = 32,
        anchors: Sequence[Sequence[float]] | None = None,
    ) -> None:
        _check(source, options, moves_at=moves_at, max_boxes=max_boxes)
        super().__init__(options, seed=seed, rounds_per_task=rounds_per_task, scale=scale)
        self.scenes = source
        self.moves_at = max(1, round(scale * moves_at))
        if self.moves_at >= self.rounds:
            raise OptionError("moves_at", f"{moves_at} is too late for a drive of {self.rounds} rounds")
        self.moving = _clients("moving", moving, self.clients)
        self.asynchronous = len(self.moving) < self.clients
        self.size = _size(size)
        self.home, self.away = (_domains(key, given, source) for key, given in (("home", home), ("away", away)))
        self.max_boxes = max_boxes
        self.anchors = _anchors(source.anchors if anchors is None else anchors)
        self.classes, self.input_shape = len(source.class_names), (3, *self.size)
        self.name = f"{source.name}-driving"
        self._loss = YoloLoss(self.anchors, self.classes)
        self._left_out: dict[str, int] = {}
        home_data = self._read(self.home, first=0)
        self._data = [home_data, self._read(self.away, first=1 + int(home_data["train"].ids.max()))]
        self._shares = [self._divided(HOME, range(self.clients)), self._divided(AWAY, self.moving)]

    # The protocol

    def task_of(self, client: int, ids: np.ndarray) -> np.ndarray:
        """Home or away: the images of home were counted first."""
        return np.where(ids > self._data[HOME]["train"].ids.max(), AWAY, HOME)

    def round(self, index: int) -> RoundPlan:
        """All clients begin at home; those in `moving` are away from round `moves_at` on."""
        participants, notes = self._attending(index)
        there = self.attendance.present(index).tolist()
        moves, last = index == self.moves_at, index == self.rounds - 1
        begins = there if index == 0 else [one for one in there if moves and one in self.moving]
        leaving = [one for one in there if index == self.moves_at - 1 and one in self.moving]
        return RoundPlan(
            task=AWAY if index >= self.moves_at else HOME,
            participants=participants,
            tasks={client: self._scene_of(client, index) for client in there},
            begins=tuple(begins) if self.boundaries else (),
            ends=tuple(there if last else leaving) if self.boundaries else (),
            evaluate=last or index == self.moves_at - 1,
            notes=notes,
        )

    def _scene_of(self, client: int, index: int) -> int:
        return AWAY if index >= self.moves_at and client in self.moving else HOME

    def clock_of(self, client: int, index: int) -> tuple[int, int]:
        """(rounds of the client at this place before `index`, rounds that it stays)."""
        if self._scene_of(client, index) == AWAY:
            return index - self.moves_at, self.rounds - self.moves_at
        return index, self.moves_at if client in self.moving else self.rounds

    def data(self, client: int, task: int) -> Data:
        """What `client` sees at home or away; clients that do not move have no samples away. Ids are unique."""
        return self._data[task]["train"].take(self._shares[task].get(client, np.zeros(0, dtype=np.int64)))

    def test(self, task: int, split: str = "test") -> Data:
        """The test images of home or away, or the validation ones held out of the training images."""
        require_split(split, self.options.validation)
        return self._data[task][split]

    def labels(self, task: int) -> tuple[int, ...]:
        """All classes."""
        return tuple(range(self.classes))

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """YOLO's loss on boxes y (n, boxes, 5)."""
        return self._loss(outputs, y)

    def measure_all(self, outputs: Iterable[Tensor], y: Tensor) -> Tensor:
        """(3,) float64: images, images times mAP@0.5, images times mAP@[.5:.95]; no images where none has a box."""
        found = precision(outputs, y, self.anchors)
        if found.map_50 is None or found.map is None:
            return torch.zeros(3, dtype=torch.float64)
        return len(y) * torch.tensor([1.0, found.map_50, found.map], dtype=torch.float64)

    def pictures(self, outputs: Tensor, data: Data) -> list[np.ndarray]:
        """Images with the detected and the true boxes."""
        return pictures(data.x, data.y, outputs, self.anchors)

    def describe(self) -> dict[str, Any]:
        """The settings in full, and how many images every client has."""
        return {
            **self.outline(),
            "dataset": self.scenes.name,
            "origin": self.scenes.origin,
            "class_names": list(self.scenes.class_names),
            "home": list(self.home),
            "away": list(self.away),
            "moving": list(self.moving),
            "moves_at": self.moves_at,
            "size": list(self.size),
            "max_boxes": self.max_boxes,
            "anchors": self.anchors.tolist(),
            "left_out": dict(self._left_out),
            "samples": {
                "train": [[len(shares.get(client, ())) for client in range(self.clients)] for shares in self._shares],
                "test": [len(data["test"]) for data in self._data],
            },
        }

    # How data comes about

    def _read(self, domains: tuple[str, ...], first: int) -> dict[str, Data]:
        """The parts of some domains; ids count from `first`."""
        parts: dict[str, list[Scene]] = {}
        for part, most in zip(PARTS, (self.options.max_train, self.options.max_test), strict=True):
            parts[part] = []
            for domain in domains:
                scenes, left_out = self.scenes.part(domain, part, self.size, most)
                self._left_out |= left_out  # the same account for every domain of a set
                parts[part] += scenes[: max(1, math.ceil(self.scale * len(scenes)))]
            if not parts[part]:
                raise DataError(f"{self.scenes.name}: no {part} image in {', '.join(domains)}")
        found = {part: self._packed(scenes, first) for part, scenes in parts.items()}
        return self._validated(found) if self.options.validation else found

    def _validated(self, found: dict[str, Data]) -> dict[str, Data]:
        whole = found["train"]
        rng = generator(self.seed, "validation")
        kept, held = held_out(np.zeros(len(whole), dtype=np.int64), self.options.validation, rng)
        if not len(held) or not len(kept):
            raise OptionError("validation", f"{self.options.validation:g} of {len(whole)} images leaves a part empty")
        return {**found, "train": whole.take(kept), "validation": whole.take(held)}

    def _packed(self, scenes: list[Scene], first: int) -> Data:
        rows = []
        for scene in scenes:
            kept, beyond = padded(scene.boxes, self.max_boxes)
            rows.append(kept)
            if beyond:
                self._left_out["beyond max_boxes"] = self._left_out.get("beyond max_boxes", 0) + beyond
        x = torch.from_numpy(pixels(scenes, self.size))
        return Data(x, torch.from_numpy(np.stack(rows)), first + np.arange(len(scenes)))

    def _divided(self, task: int, clients: Iterable[int]) -> dict[int, np.ndarray]:
        """Equal shares of the images, drawn at random."""
        holders = list(clients)
        order = generator(self.seed, "partition", task).permutation(len(self._data[task]["train"]))
        return {client: np.sort(own) for client, own in zip(holders, np.array_split(order, len(holders)), strict=True)}


def _check(source: Scenes, options: Options, **whole: int) -> None:
    if not hasattr(source, "class_names") or not hasattr(source, "part"):
        raise OptionError("scenario", "driving takes images with boxes; arrays fit the other scenarios")
    if options.tasks != 2:
        raise OptionError("tasks", f"driving has 2, home and away; got {options.tasks}")
    for key, value in whole.items():
        require_whole(key, value)


def _clients(key: str, given: Any, clients: int) -> tuple[int, ...]:
    sound = isinstance(given, (list, tuple)) and all(isinstance(one, int) and 0 <= one < clients for one in given)
    if not sound or not given or len(set(given)) < len(given):
        raise OptionError(key, f"expected different clients within 0..{clients - 1}, such as [1]; got {given!r}")
    return tuple(sorted(given))


def _size(given: Any) -> tuple[int, int]:
    if not isinstance(given, (list, tuple)) or len(given) != 2:
        raise OptionError("size", f"expected height and width, such as [192, 320]; got {given!r}")
    for side in given:
        require_whole("size", side, least=16)
    return given[0], given[1]


def _domains(key: str, given: Sequence[str] | None, source: Scenes) -> tuple[str, ...]:
    chosen, named = getattr(source, key) if given is None else given, ", ".join(source.domains)
    if not chosen:
        raise OptionError(key, f"expected one or more domains of {source.name}: {named}")
    if not isinstance(chosen, (list, tuple)) or not set(chosen) <= set(source.domains):
        raise OptionError(key, f"expected a list of domains of {source.name}: {named}; got {given!r}")
    return tuple(chosen)


def _anchors(given: Sequence[Sequence[float]]) -> Tensor:
    try:
        shapes = torch.tensor([[float(one) for one in shape] for shape in given])
    except (TypeError, ValueError) as problem:
        raise OptionError("anchors", f"expected pairs of width and height; got {given!r}") from problem
    if shapes.dim() != 2 or shapes.shape[1] != 2 or not bool(((shapes > 0) & (shapes <= 1)).all()):
        raise OptionError(
            "anchors", f"expected pairs of width and height, shares of the image in (0, 1]; got {given!r}"
        )
    return shapes
