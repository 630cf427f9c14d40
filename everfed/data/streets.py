"""Drawn streets: town and highway, by day and by night, with the exact box of everything that is drawn.

Nothing of a real camera: flat shapes in perspective, with noise. They exist so that the driving experiment runs with no
data at all, and so that a change of scene is as strong as one likes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from everfed.core import random
from everfed.data.detection import from_corners
from everfed.data.scenes import Scene, Scenes, Size
from everfed.errors import DataError

NAME = "streets"
CLASSES = ("vehicle", "bike", "motobike", "traffic_light", "traffic_sign")  # those of the CARLA images
VEHICLE, BIKE, MOTOBIKE, LIGHT, SIGN = range(5)
_ANCHORS = ((0.026, 0.068), (0.067, 0.092), (0.039, 0.17), (0.103, 0.151), (0.176, 0.268))
_TRAIN, _TEST = 400, 100  # scenes of a domain
_LEAST_PIXELS = 3.0  # smaller things are not drawn
Colour = tuple[float, float, float]


@dataclass(frozen=True)
class Streets(Scenes):
    """Four domains; scene i of a domain and part is the same in every run."""

    name: str = NAME
    origin: str = "drawn by everfed"
    class_names: tuple[str, ...] = CLASSES
    home: tuple[str, ...] = ("town-day",)
    away: tuple[str, ...] = ("highway-night",)
    anchors: tuple[tuple[float, float], ...] = _ANCHORS

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(f"{place}-{time}" for place in ("town", "highway") for time in ("day", "night"))

    def part(self, domain: str, part: str, size: Size, most: int | None) -> tuple[list[Scene], dict[str, int]]:
        if domain not in self.domains:
            raise DataError(f"streets: no domain {domain!r}; it has {', '.join(self.domains)}")
        usual = _TRAIN if part == "train" else _TEST
        count = usual if most is None else most
        return [draw(domain, size, random.generator(0, NAME, domain, part, i)) for i in range(count)], {}


def draw(domain: str, size: Size, rng: np.random.Generator) -> Scene:
    """One scene."""
    place, time = domain.split("-")
    canvas = _Canvas(size, rng, night=time == "night")
    canvas.background(highway=place == "highway")
    things = _things(place == "highway", rng)
    for label, lane, distance in sorted(things, key=lambda thing: -thing[2]):  # far ones first: near ones hide them
        canvas.thing(label, lane, distance)
    return Scene(canvas.finished(), canvas.boxes())


def _things(highway: bool, rng: np.random.Generator) -> list[tuple[int, float, float]]:
    """(class, place across the road in lanes, distance): mostly vehicles on a highway, everything in a town."""
    count = rng.integers(2, 7 if highway else 6)
    chances = (0.75, 0.0, 0.1, 0.0, 0.15) if highway else (0.35, 0.17, 0.16, 0.16, 0.16)
    lanes = (-2.1, -0.7, 0.7, 2.1) if highway else (-0.6, 0.6)
    found = []
    for label in rng.choice(len(CLASSES), size=count, p=chances):
        beside = 3.4 if highway else 1.6
        at = rng.choice((-beside, beside)) if label in (LIGHT, SIGN) else rng.choice(lanes) + rng.uniform(-0.15, 0.15)
        found.append((int(label), float(at), float(rng.uniform(0.9, 4.0))))
    return found


class _Canvas:
    """Pixels (h, w, 3) in [0, 1], and which thing is on top at every pixel."""

    def __init__(self, size: Size, rng: np.random.Generator, night: bool) -> None:
        self.height, self.width = size
        self.rng, self.night = rng, night
        self.pixels = np.zeros((*size, 3))
        self.top = np.full(size, -1)  # number of the thing that is seen here
        self.labels: list[int] = []
        self.horizon = self.height * rng.uniform(0.40, 0.46)

    def background(self, highway: bool) -> None:
        """Sky, ground, houses or barriers, the road and its lines."""
        rows, columns = np.mgrid[: self.height, : self.width]
        depth = np.clip((rows - self.horizon) / (self.height - self.horizon), 0.0, 1.0)  # 0 at the horizon
        sky, ground = (
            ((0.05, 0.06, 0.12), (0.05, 0.07, 0.05)) if self.night else ((0.55, 0.72, 0.92), (0.36, 0.47, 0.28))
        )
        if highway:
            ground = (0.10, 0.09, 0.07) if self.night else (0.62, 0.57, 0.42)
        self.pixels[:] = np.where((rows < self.horizon)[..., None], sky, ground)
        if not highway:
            self._houses()
        half = (0.05 + (1.15 if highway else 0.62) * depth) * self.width / 2
        across = columns - self.width / 2
        road = (rows >= self.horizon) & (np.abs(across) < half)
        self.pixels[road] = (
            (0.09, 0.09, 0.10) if self.night else ((0.50, 0.50, 0.52) if highway else (0.33, 0.33, 0.35))
        )
        lines = (-0.5, 0.0, 0.5) if highway else (0.0,)
        dashes = (np.floor(6.0 / (depth + 0.15)) % 2) == 0
        for line in lines:
            on = road & dashes & (np.abs(across - line * half) < 0.02 * half + 0.4)
            self.pixels[on] = (0.75, 0.75, 0.70) if not self.night else (0.32, 0.32, 0.30)

    def _houses(self) -> None:
        for side in (-1, 1):
            edge = self.width * (0.5 + 0.14 * side)
            while 0 < edge < self.width:
                wide = self.width * self.rng.uniform(0.07, 0.16)
                tall = self.height * self.rng.uniform(0.15, 0.38)
                colour = self.rng.uniform(0.08, 0.16, 3) if self.night else self.rng.uniform(0.35, 0.75, 3)
                left, right = sorted((edge, edge + side * wide))
                self._fill(left, self.horizon - tall, right, self.horizon + 2, colour)
                edge += side * wide

    def thing(self, label: int, lane: float, distance: float) -> None:
        """Draw one thing; its box is what is seen of it in the end."""
        scale = 1.0 / distance
        foot = self.horizon + (self.height - self.horizon) * 0.85 * scale
        centre = self.width / 2 + lane * 0.19 * self.width * scale
        unit = 0.30 * self.height * scale  # a metre and a half or so
        self.labels.append(label)
        painters = {VEHICLE: self._car, BIKE: self._rider, MOTOBIKE: self._rider, LIGHT: self._light, SIGN: self._sign}
        painters[label](label, centre, foot, unit)

    def _car(self, label: int, centre: float, foot: float, unit: float) -> None:
        colour = self._paint()
        wide = unit * self.rng.uniform(1.15, 1.5)
        tall = unit * self.rng.uniform(0.85, 1.3)
        left, right = centre - wide / 2, centre + wide / 2
        self._fill(left, foot - 0.62 * tall, right, foot - 0.08 * tall, colour, own=True)
        self._fill(
            left + 0.12 * wide, foot - tall, right - 0.12 * wide, foot - 0.6 * tall, 0.55 * np.array(colour), own=True
        )
        for wheel in (left, right - 0.18 * wide):
            self._fill(wheel, foot - 0.16 * tall, wheel + 0.18 * wide, foot, (0.03, 0.03, 0.03), own=True)
        lamp = (1.0, 0.15, 0.1) if self.night else (0.7, 0.1, 0.1)
        for at in (left + 0.03 * wide, right - 0.17 * wide):
            self._fill(at, foot - 0.45 * tall, at + 0.14 * wide, foot - 0.32 * tall, lamp, own=True)

    def _rider(self, label: int, centre: float, foot: float, unit: float) -> None:
        wide, heavy = unit * (0.42 if label == BIKE else 0.6), label == MOTOBIKE
        self._fill(centre - wide * 0.16, foot - 1.25 * unit, centre + wide * 0.16, foot - unit, self._skin(), own=True)
        self._fill(centre - wide * 0.36, foot - unit, centre + wide * 0.36, foot - 0.45 * unit, self._paint(), own=True)
        body = wide * (0.5 if heavy else 0.14)
        dark = (0.06, 0.06, 0.08)
        self._fill(centre - body, foot - 0.5 * unit, centre + body, foot, dark, own=True)
        if heavy:
            lamp = 0.2 * unit
            self._fill(centre - lamp, foot - 0.42 * unit, centre + lamp, foot - 0.25 * unit, (0.95, 0.9, 0.6), own=True)

    def _light(self, label: int, centre: float, foot: float, unit: float) -> None:
        self._fill(centre - 0.03 * unit, foot - 1.9 * unit, centre + 0.03 * unit, foot, (0.15, 0.15, 0.15))
        top = foot - 2.6 * unit
        self._fill(centre - 0.17 * unit, top, centre + 0.17 * unit, top + 0.75 * unit, (0.04, 0.04, 0.04), own=True)
        on = self.rng.integers(3)
        for lamp, colour in enumerate(((1.0, 0.1, 0.1), (1.0, 0.8, 0.1), (0.1, 0.95, 0.3))):
            lit = np.array(colour) * (1.0 if lamp == on else 0.2)
            at = top + (0.06 + 0.23 * lamp) * unit
            self._fill(centre - 0.09 * unit, at, centre + 0.09 * unit, at + 0.17 * unit, lit, own=True)

    def _sign(self, label: int, centre: float, foot: float, unit: float) -> None:
        self._fill(centre - 0.03 * unit, foot - 1.5 * unit, centre + 0.03 * unit, foot, (0.35, 0.35, 0.35))
        half, top = 0.26 * unit, foot - 2.0 * unit
        shown = 0.45 if self.night else 1.0
        self._fill(
            centre - half, top, centre + half, top + 2 * half, (0.85 * shown, 0.1 * shown, 0.1 * shown), own=True
        )
        inner = 0.6 * half
        white = (0.95 * shown,) * 3
        self._fill(centre - inner, top + half - inner, centre + inner, top + half + inner, white, own=True)

    def _paint(self) -> np.ndarray:
        return self.rng.uniform(0.05, 0.25, 3) if self.night else self.rng.uniform(0.1, 0.95, 3)

    def _skin(self) -> np.ndarray:
        return self.rng.uniform(0.45, 0.8) * np.array((1.0, 0.8, 0.65)) * (0.35 if self.night else 1.0)

    def _fill(
        self, left: float, top: float, right: float, bottom: float, colour: Colour | np.ndarray, own: bool = False
    ) -> None:
        """A rectangle of whole pixels; own: it belongs to the thing that is being drawn."""
        rows = slice(max(0, round(top)), max(0, round(bottom)))
        columns = slice(max(0, round(left)), max(0, round(right)))
        self.pixels[rows, columns] = colour
        self.top[rows, columns] = len(self.labels) - 1 if own else -1

    def boxes(self) -> np.ndarray:
        """(n, 5) rows: the box around every pixel that is seen of a thing, where enough is seen."""
        labels, corner = [], []
        for number, label in enumerate(self.labels):
            rows, columns = np.nonzero(self.top == number)
            if not len(rows):
                continue
            edges = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
            if min(edges[2] - edges[0], edges[3] - edges[1]) >= _LEAST_PIXELS:
                labels.append(label)
                corner.append(edges)
        shares = np.array(corner, dtype=np.float64).reshape(-1, 4) / (self.width, self.height, self.width, self.height)
        return from_corners(np.array(labels, dtype=np.float64), np.clip(shares, 0.0, 1.0))

    def finished(self) -> np.ndarray:
        """(3, h, w) uint8 with the noise of a camera."""
        noisy = self.pixels + self.rng.normal(0.0, 0.03, self.pixels.shape)
        return np.rint(255 * np.clip(noisy, 0.0, 1.0)).astype(np.uint8).transpose(2, 0, 1)
