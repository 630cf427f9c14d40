"""Augmentations of image batches on the batch's device. What is drawn is drawn ahead, as whole numbers on the host, and
applied in whole numbers, so that every engine and device gives the same pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from everfed.core.option import HasOptions, option
from everfed.data.transforms import FINE, LUMA
from everfed.naming import with_options

SPREAD = math.log(10 / 3)  # the longer side of an erased rectangle is at most 10 / 3 of the shorter one


@dataclass(frozen=True)
class Crop(HasOptions):
    """Pad with zeros by `padding` pixels and cut the original size anywhere."""

    padding: int = option(4, at_least=1)
    columns = 2
    colours = False

    def draw(self, rng: np.random.Generator, count: int, shape: Sequence[int]) -> np.ndarray:
        return rng.integers(0, 2 * self.padding + 1, size=(count, 2))

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        padded = F.pad(x, [self.padding] * 4)
        rows = draws[:, :1] + torch.arange(height, device=x.device)
        columns = draws[:, 1:] + torch.arange(width, device=x.device)
        return _pixels(padded, rows.unsqueeze(2) * (width + 2 * self.padding) + columns.unsqueeze(1), x.shape)


@dataclass(frozen=True)
class Flip(HasOptions):
    """Mirror left-right with probability p."""

    p: float = option(0.5, at_least=0, at_most=1)
    columns = 1
    colours = False

    def draw(self, rng: np.random.Generator, count: int, shape: Sequence[int]) -> np.ndarray:
        return (rng.random((count, 1)) < self.p).astype(np.int64)

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        return torch.where(draws.reshape(-1, 1, 1, 1) == 1, x.flip(-1), x)


@dataclass(frozen=True)
class Rotation(HasOptions):
    """Rotate about the centre by up to `degrees` either way, nearest pixel, zeros where nothing is."""

    degrees: float = option(15.0, above=0, at_most=180)
    columns = 2
    colours = False

    def draw(self, rng: np.random.Generator, count: int, shape: Sequence[int]) -> np.ndarray:
        angles = np.radians(rng.uniform(-self.degrees, self.degrees, count))
        return np.rint(np.stack([np.cos(angles), np.sin(angles)], 1) * FINE).astype(np.int64)

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        cos, sin = (draws[:, i].reshape(-1, 1, 1) for i in (0, 1))
        # twice the distance from the centre, so that it is whole
        dy = (2 * torch.arange(height, device=x.device) - (height - 1)).reshape(1, -1, 1)
        dx = (2 * torch.arange(width, device=x.device) - (width - 1)).reshape(1, 1, -1)
        row = (cos * dy + sin * dx + FINE * height).div(2 * FINE, rounding_mode="floor")
        column = (cos * dx - sin * dy + FINE * width).div(2 * FINE, rounding_mode="floor")
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        found = _pixels(x, torch.where(inside, row * width + column, 0), x.shape)
        return found * inside.unsqueeze(1)


@dataclass(frozen=True)
class ColourJitter(HasOptions):
    """Multiply brightness, contrast and saturation, in this order, by factors within 1 +- the given numbers."""

    brightness: float = option(0.0, at_least=0, at_most=1)
    contrast: float = option(0.0, at_least=0, at_most=1)
    saturation: float = option(0.0, at_least=0, at_most=1)
    columns = 3
    colours = True

    def draw(self, rng: np.random.Generator, count: int, shape: Sequence[int]) -> np.ndarray:
        reach = np.array([math.floor(r * FINE) for r in (self.brightness, self.contrast, self.saturation)])
        return rng.integers(-reach, reach, size=(count, 3), endpoint=True)

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        brightness, contrast, saturation = (draws[:, i].reshape(-1, 1, 1, 1) for i in range(3))
        found = x if x.is_floating_point() else x.to(torch.int64)
        found = _mixed(found, torch.zeros_like(found), brightness)
        grey = _grey(found)
        pixels = grey.shape[-1] * grey.shape[-2]
        mean = grey.mean((1, 2, 3), keepdim=True) if grey.is_floating_point() else _rounded(grey.sum((1, 2, 3)), pixels)
        found = _mixed(found, mean, contrast)
        return _mixed(found, _grey(found), saturation).to(x.dtype)


@dataclass(frozen=True)
class Erasing(HasOptions):
    """Set a random rectangle to zero with probability p; it covers a share of the image between the two in `area`."""

    p: float = option(0.5, at_least=0, at_most=1)
    area: Sequence[float] = option((0.02, 0.33))
    columns = 4
    colours = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (len(self.area) == 2 and 0 < self.area[0] <= self.area[1] <= 1):
            raise ValueError(f"area must be two shares above 0 and at most 1, the smaller first; got {self.area}")

    def draw(self, rng: np.random.Generator, count: int, shape: Sequence[int]) -> np.ndarray:
        size = np.array(shape[-2:])
        covered = rng.uniform(self.area[0], self.area[1], count) * size.prod()
        ratio = np.exp(rng.uniform(-SPREAD, SPREAD, count))
        sides = np.stack([np.sqrt(covered * ratio), np.sqrt(covered / ratio)], 1)
        sides = np.clip(np.rint(sides), 1, size).astype(np.int64)
        corners = np.floor(rng.random((count, 2)) * (size - sides + 1)).astype(np.int64)
        return np.hstack([corners, sides * (rng.random((count, 1)) < self.p)])

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        top, left, tall, wide = (draws[:, i : i + 1] for i in range(4))
        row, column = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
        rows, columns = (row >= top) & (row < top + tall), (column >= left) & (column < left + wide)
        return x.masked_fill((rows.unsqueeze(2) & columns.unsqueeze(1)).unsqueeze(1), 0)


Augmentation = Crop | Flip | Rotation | ColourJitter | Erasing
KINDS: dict[str, type[Augmentation]] = {
    "crop": Crop,
    "flip": Flip,
    "rotation": Rotation,
    "colour-jitter": ColourJitter,
    "erasing": Erasing,
}


def parse(tables: Sequence[Any]) -> tuple[Augmentation, ...]:
    """The augmentations of a list of tables {kind, and its options}. Raises ValueError."""
    return tuple(_parse(table) for table in tables)


def _parse(table: Any) -> Augmentation:
    if not isinstance(table, Mapping) or table.get("kind") not in KINDS:
        raise ValueError(f"an entry is a table with kind, one of {', '.join(KINDS)}; got {table!r}")
    kind, options = table["kind"], {key: value for key, value in table.items() if key != "kind"}
    for key, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float | list | tuple):
            raise ValueError(f"{kind}.{key} must be a number; got {value!r}")
    return with_options(KINDS[kind], options, kind)


class Chain:
    """Augmentations one after the other. Columns of draws that change colours come last, whatever the order."""

    def __init__(self, members: Sequence[Augmentation], shape: Sequence[int]) -> None:
        self.members, self.shape = tuple(members), tuple(shape)
        ordered = sorted(self.members, key=lambda member: member.colours)
        ends = np.cumsum([0, *(member.columns for member in ordered)])
        self._places = {id(m): slice(int(a), int(b)) for m, a, b in zip(ordered, ends, ends[1:], strict=False)}
        self._ordered = ordered
        self.colour_draws = sum(member.columns for member in self.members if member.colours)

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """(count, columns) whole numbers."""
        return np.hstack([member.draw(rng, count, self.shape) for member in self._ordered])

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        for member in self.members:
            x = member.apply(x, draws[:, self._places[id(member)]])
        return x


class PerSample:
    """A transform of torchvision's v2, or any function of an image that draws from torch's global generator, sample by
    sample: it is seeded with what was drawn ahead."""

    colour_draws = 0

    def __init__(self, transform: Callable[[Tensor], Tensor]) -> None:
        self.transform = transform

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.integers(0, 2**62, size=(count, 1))

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        made = []
        with torch.random.fork_rng([x.device] if x.is_cuda else []):
            for image, seed in zip(x, draws[:, 0].tolist(), strict=True):
                torch.manual_seed(seed)
                made.append(self.transform(image))
        found = torch.stack(made)
        if found.shape != x.shape or found.dtype != x.dtype:
            raise ValueError(
                f"stream.augment: a transform keeps form and type, {x.dtype} {tuple(x.shape[1:])}; this one gives "
                f"{found.dtype} {tuple(found.shape[1:])}"
            )
        return found


def described(transform: Any) -> str:
    """The same text in every process: what a transform says of itself, else its name."""
    text = repr(transform)
    if " at 0x" not in text:
        return text
    named = transform if hasattr(transform, "__qualname__") else type(transform)
    return f"{named.__module__}.{named.__qualname__}"


def _pixels(x: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """The pixels at flat positions (n, height, width), alike in every channel."""
    flat = index.flatten(1).unsqueeze(1).expand(-1, x.shape[1], -1)
    return x.flatten(2).gather(2, flat).reshape(shape)


def _mixed(x: Tensor, base: Tensor, draws: Tensor) -> Tensor:
    """base + (x - base) (1 + draws / FINE), cut to 0..255."""
    if x.is_floating_point():
        return (base + (x - base) * (1.0 + draws / FINE)).clamp(0, 255)
    return (base + ((x - base) * (FINE + draws) + FINE // 2).div(FINE, rounding_mode="floor")).clamp(0, 255)


def _grey(x: Tensor) -> Tensor:
    """(n, 1, height, width) grey levels; images without three channels are grey already."""
    if x.shape[1] != 3:
        return x[:, :1]
    red, green, blue = x[:, :1], x[:, 1:2], x[:, 2:]
    total = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
    return total / 1000 if x.is_floating_point() else (total + 500).div(1000, rounding_mode="floor")


def _rounded(total: Tensor, count: int) -> Tensor:
    return (total + count // 2).div(count, rounding_mode="floor").reshape(-1, 1, 1, 1)
