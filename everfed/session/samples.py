"""A labelled sheet of what a run's generator makes. Drawn when it is asked for, by nobody else: see PRIVACY."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from everfed.core.context import Place
from everfed.core.handle import Server
from everfed.engines.eager import new_trainer
from everfed.errors import UserError
from everfed.session import Run
from everfed.store.checkpoint import newest
from everfed.store.run import RunFolder

if TYPE_CHECKING:
    from PIL.Image import Image

PRIVACY = (
    "These images invert the aggregated model (glfc's: the gradients of single clients) and may resemble what clients "
    "hold, the more so when few clients hold a class or rounds are tiny. Treat them, and the generator, as sensitive."
)
TRIES = 4  # images made for every one that is shown, so that rare classes are found
BATCH = 250
GAP, MARGIN, LETTER, LINE = 2, 4, 7, 14  # pixels


@runtime_checkable
class HasGenerator(Protocol):
    """A part with a generator on the server."""

    @property
    def name(self) -> str: ...

    def sample(self, server: Server, count: int) -> tuple[Tensor, Tensor]:
        """`count` of its images, as network inputs, and their labels (count,). Raises ValueError while there is no
        generator yet."""


class SamplesError(UserError):
    """A run whose generator cannot be shown."""


@dataclass(frozen=True)
class Sheet:
    """rows: {label: (n, channels, side, side) uint8}, at most `width` images each."""

    rows: dict[int, Tensor]
    names: Sequence[str]
    width: int


def sample(folder: RunFolder, run: Run, per_class: int) -> Sheet:
    """Images by label from the newest checkpoint of a run, the same on every machine."""
    part = _generative(run)
    state = newest(folder.checkpoint)
    if state is None:
        raise SamplesError(f"{folder.path} has no checkpoint yet, so no generator to draw from")
    setup = run.setup
    index = min(state.round, setup.stream.rounds - 1)
    trainer = new_trainer(setup, run.build_module)
    images, labels = [], []
    classes = sorted({label for task in range(setup.stream.tasks) for label in setup.stream.labels(task)})
    for number in range(-(-TRIES * per_class * len(classes) // BATCH)):
        context = setup.server("samples", Place(index, setup.stream.round(index), number), trainer)
        try:
            made, found = part.sample(Server(part.name, state.server, context, read_only=True), BATCH)
        except ValueError as error:
            raise SamplesError(f"{folder.path}: {error}") from error
        images.append(_pixels(setup.stream, made))
        labels.append(found)
    return _sorted(torch.cat(images).cpu(), torch.cat(labels).cpu(), _names(setup.stream), per_class)


def _generative(run: Run) -> HasGenerator:
    for part in run.method.parts:
        if isinstance(part, HasGenerator):
            return part
    raise SamplesError(f"method {run.method.name!r} has no generator of images, so there is nothing to sample from")


def _pixels(stream: Any, inputs: Tensor) -> Tensor:
    if not hasattr(stream, "pixels"):
        raise SamplesError(f"stream {stream.name!r} does not say what its network inputs look like (no `pixels`)")
    pixels: Tensor = stream.pixels(inputs)
    return pixels


def _names(stream: Any) -> Sequence[str]:
    source = getattr(stream, "source", None)
    return tuple(map(str, range(stream.classes))) if source is None else tuple(source.class_names)


def _sorted(images: Tensor, labels: Tensor, names: Sequence[str], width: int) -> Sheet:
    found = sorted(set(labels.tolist()))
    return Sheet({label: images[labels == label][:width] for label in found}, names, width)


# drawing -----------------------------------------------------------------------------------------------------------


def draw(sheet: Sheet, path: Path) -> Path:
    """One row per class, its number and name on the left. Raises SamplesError without Pillow."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise SamplesError("a sheet of images needs Pillow: pip install 'everfed[images]'") from error
    side = next(iter(sheet.rows.values())).shape[-1]
    factor = max(1, 64 // side)
    cell = side * factor + GAP
    texts = {label: f"{label} {sheet.names[label]}".strip() for label in sheet.rows}
    left = 2 * MARGIN + LETTER * max(map(len, texts.values()))
    canvas = Image.new("RGB", (left + cell * sheet.width + MARGIN, cell * len(sheet.rows) + 2 * MARGIN), "white")
    pen = ImageDraw.Draw(canvas)
    for row, (label, images) in enumerate(sheet.rows.items()):
        top = MARGIN + row * cell
        pen.text((MARGIN, top + (cell - LINE) // 2), texts[label], fill="black")
        for column, image in enumerate(images):
            canvas.paste(_tile(image, factor), (left + column * cell, top))
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.save(path)
    return path


def _tile(image: Tensor, factor: int) -> Image:
    from PIL import Image

    pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
    tile = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
    return tile.resize((tile.width * factor, tile.height * factor), Image.Resampling.NEAREST)
