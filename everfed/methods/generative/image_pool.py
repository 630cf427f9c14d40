"""A pool of synthetic images: storage as bytes, drawing, augmentation, and the map to network inputs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from everfed.core.stream import Stream, StreamView

LEVELS = 255.0  # of an 8-bit pixel


def to_bytes(images: Tensor) -> Tensor:
    """Images with values in [0, 1] as uint8."""
    return (images * LEVELS).round().clamp(0, LEVELS).to(torch.uint8)


def cycled(size: int, steps: int, batch: int, rng: np.random.Generator) -> np.ndarray:
    """(steps, batch) positions in a pool of `size` images; each is used once before any is used again."""
    passes = -(-steps * batch // size)
    order = np.concatenate([rng.permutation(size) for _ in range(passes)])
    return order[: steps * batch].reshape(steps, batch)


def draw_geometry(stream: StreamView, rng: np.random.Generator, count: int) -> np.ndarray | None:
    """Draws of the stream's augmentation of `count` images that leave their colours as they are, as the released code
    of TARGET and LANDER has it for synthetic images."""
    draws = stream.draw_augmentation(rng, count)
    if draws is not None and stream.colour_draws:
        draws[:, -stream.colour_draws :] = 0
    return None if draws is None else np.asarray(draws)


class Augmentation:
    """The stream's own augmentation without its changes of colour, drawn ahead for `steps` steps of `batch` images."""

    def __init__(self, stream: StreamView, steps: int, batch: int, device: torch.device) -> None:
        self.stream, self.count = stream, steps * batch
        probe = draw_geometry(stream, np.random.default_rng(0), 1)
        shape = None if probe is None else (steps, batch, *probe.shape[1:])
        self.table = None if shape is None else torch.zeros(shape, dtype=torch.int64, device=device)

    def draw(self, rng: np.random.Generator) -> None:
        if self.table is not None:
            draws = draw_geometry(self.stream, rng, self.count)
            assert draws is not None
            self.table.copy_(torch.from_numpy(draws.astype(np.int64)).view(self.table.shape))

    def __call__(self, pixels: Tensor, step: Tensor) -> Tensor:
        """Images in storage form, or floats of the same range, as augmented in `step` (1,)."""
        if self.table is None:
            return pixels
        return self.stream.augment(pixels, self.table.index_select(0, step)[0])


def affine(stream: Stream | StreamView, shape: tuple[int, ...], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(offset, scale), each (1, *shape): the network input of an image x in [0, 1] is offset + scale x."""
    black, white = (
        stream.inputs(torch.full((1, *shape), level, dtype=torch.uint8, device=device)) for level in (0, 255)
    )
    return black, white - black
