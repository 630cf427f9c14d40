"""Transforms of whole batches, on the batch's device. Images are (n, channels, height, width)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from everfed.kernels import load_kernels

kernels = load_kernels("everfed.kernels.images")

PAD = 4
BRIGHTNESS = 63 / 255  # the largest change of brightness, as TARGET, LANDER and GLFC have it
FINE = 2**16  # steps of a drawn brightness in 1
# Weights of red, green and blue in a grey level, in thousandths (ITU-R 601, as Pillow has them).
LUMA = (299, 587, 114)
# Images resized at once, so that float copies of a large set never exist as a whole.
CHUNK = 4096


def rotate(x: Tensor, degrees: float) -> Tensor:
    """Counter-clockwise about the centre, nearest pixel, zeros where nothing is: equal to Pillow's, pixel by pixel."""
    height, width = x.shape[-2:]
    source, inside = _rotation(height, width, degrees)
    pixels = x.flatten(-2).index_select(-1, torch.from_numpy(source).to(x.device))
    pixels.masked_fill_(torch.from_numpy(~inside).to(x.device), 0)
    return pixels.reshape(x.shape)


def _rotation(height: int, width: int, degrees: float) -> tuple[np.ndarray, np.ndarray]:
    """(source, inside): for every output pixel the flat input pixel it shows, and whether there is one.

    Pillow works in 16.16 fixed point; so does this, since a rounding decides which pixel is nearest.
    """
    angle = -math.radians(degrees % 360.0)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    centre_x, centre_y = width / 2, height / 2
    start_x = -cos * centre_x - sin * centre_y + centre_x + cos * 0.5 + sin * 0.5
    start_y = sin * centre_x - cos * centre_y + centre_y - sin * 0.5 + cos * 0.5
    row, column = np.mgrid[:height, :width]
    at_x = (_fixed(start_x) + _fixed(sin) * row + _fixed(cos) * column) >> 16
    at_y = (_fixed(start_y) + _fixed(cos) * row + _fixed(-sin) * column) >> 16
    inside = (at_x >= 0) & (at_x < width) & (at_y >= 0) & (at_y < height)
    return np.where(inside, at_y * width + at_x, 0).reshape(-1), inside.reshape(-1)


def _fixed(value: float) -> int:
    return math.floor(value * 65536.0 + 0.5)


def permute_pixels(x: Tensor, permutation: np.ndarray) -> Tensor:
    """Pixel i of the result is pixel permutation[i], alike in every channel; the last axis of what is no image."""
    index = torch.from_numpy(np.ascontiguousarray(permutation, dtype=np.int64)).to(x.device)
    flat = x.flatten(-2) if x.dim() == 4 else x
    return flat.index_select(-1, index).reshape(x.shape)


def crop_and_flip(x: Tensor, draws: Tensor) -> Tensor:
    """Zero-pad by 4, cut the original size at (dy, dx), then mirror left-right where flip is 1.

    draws: (n, 3) integers (dy, dx, flip), dy and dx in 0..8, on x's device. Static shapes, no host synchronisation.
    """
    if kernels is not None and kernels.fits(x) and draws.stride(1) == 1:
        cut: Tensor = kernels.crop_and_flip(x, draws, PAD)
        return cut
    n, channels, height, width = x.shape
    dy, dx, flip = draws.to(torch.int64).unsqueeze(-1).unbind(1)  # each (n, 1)
    row = dy + torch.arange(height, device=x.device)
    column = torch.arange(width, device=x.device)
    column = dx + torch.where(flip == 1, width - 1 - column, column)
    padded = F.pad(x, (PAD, PAD, PAD, PAD))
    index = row.unsqueeze(2) * (width + 2 * PAD) + column.unsqueeze(1)  # (n, height, width)
    index = index.reshape(n, 1, -1).expand(n, channels, -1)
    return padded.flatten(2).gather(2, index).reshape(x.shape)


def draw_crop_and_flip(rng: np.random.Generator, count: int) -> np.ndarray:
    """(count, 3) draws for `crop_and_flip`, uniform over all positions and both sides."""
    return rng.integers(0, (2 * PAD + 1, 2 * PAD + 1, 2), size=(count, 3))


def brighten(x: Tensor, draws: Tensor) -> Tensor:
    """Multiply images with 1 + draws / FINE, draws (n,); cut to 0..255 and, in whole numbers, rounded down as Pillow
    does. A draw of 0 leaves an image as it is."""
    factor = 1.0 + draws.to(torch.float32).reshape(-1, 1, 1, 1) / FINE
    return (x.to(torch.float32) * factor).clamp(0, 255).to(x.dtype)


def draw_brightness(rng: np.random.Generator, count: int) -> np.ndarray:
    """(count, 1) draws for `brighten`, uniform over 1 - BRIGHTNESS to 1 + BRIGHTNESS."""
    reach = math.floor(BRIGHTNESS * FINE)
    return rng.integers(-reach, reach, size=(count, 1), endpoint=True)


def scale(x: Tensor, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Tensor:
    """uint8 -> float32 in [0, 1], then (x - mean) / std per channel when given; floats are only normalised.

    Constants enter as scalars: a tensor made here would be a copy from the host, which graph capture forbids.
    """
    if kernels is not None and kernels.fits(x) and len(mean) in (0, x.shape[1]) and len(mean) <= kernels.MOST:
        scaled: Tensor = kernels.scale(x, mean, std)
        return scaled
    out = x.to(torch.float32).div_(255.0) if x.dtype == torch.uint8 else x.to(torch.float32, copy=bool(mean))
    if len(set(mean)) == len(set(std)) == 1:
        return out.sub_(mean[0]).div_(std[0])
    for c, (m, s) in enumerate(zip(mean, std, strict=True)):
        out[:, c].sub_(m).div_(s)
    return out


def unscale(x: Tensor, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Tensor:
    """The inverse of `scale`, as uint8 images; values outside the range are clipped."""
    per_channel = [torch.tensor(v or default).to(x).reshape(-1, 1, 1) for v, default in ((mean, (0.0,)), (std, (1.0,)))]
    return (x * per_channel[1] + per_channel[0]).mul(255.0).round().clamp(0, 255).to(torch.uint8)


def to_format(x: Tensor, channels: int, size: int) -> Tensor:
    """uint8 images as (n, channels, size, size): grey repeated to colour, colour weighed to grey, bilinear resize."""
    chunks = [_resized(_with_channels(part, channels), size) for part in x.split(CHUNK)]
    return torch.cat(chunks)


def _with_channels(x: Tensor, channels: int) -> Tensor:
    if x.shape[1] == channels:
        return x
    if x.shape[1] == 1:
        return x.expand(-1, channels, -1, -1)
    if (x.shape[1], channels) == (3, 1):
        weights = torch.tensor(LUMA, dtype=torch.int32, device=x.device).reshape(1, 3, 1, 1)
        return ((x.to(torch.int32) * weights).sum(1, keepdim=True) + 500).div(1000, rounding_mode="floor").to(x.dtype)
    raise ValueError(f"images with {x.shape[1]} channels cannot be given {channels}; allowed: 1 to any, 3 to 1")


def _resized(x: Tensor, size: int) -> Tensor:
    if tuple(x.shape[-2:]) == (size, size):
        return x.contiguous()
    resized = F.interpolate(x.to(torch.float32), size=(size, size), mode="bilinear", antialias=True)
    return resized.round_().clamp_(0, 255).to(x.dtype)
