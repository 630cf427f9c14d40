"""Decoding image files of any size into one array. Pillow is imported only here and only when images are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from everfed.data.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")


def class_folders(root: Path) -> list[str]:
    """The names of the folders below `root`, in order: one per class."""
    return sorted(folder.name for folder in root.iterdir() if folder.is_dir())


def listed(root: Path, classes: Sequence[str], inside: str = "") -> list[tuple[Path, int]]:
    """(file, class id) of every image in root/<class>/<inside>, in a fixed order; a class without a folder has none."""
    folders = [(root / name / inside, label) for label, name in enumerate(classes)]
    return [
        (path, label)
        for folder, label in folders
        if folder.is_dir()
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in SUFFIXES
    ]


def decoded(
    files: Sequence[tuple[Path, int]], shape: tuple[int, int], grey: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, channels, height, width) uint8, resized where they are not of `shape` (width, height), and labels
    (n,); decoded into place one by one."""
    if not files:
        raise DataError("there is no image to read")
    x = np.empty((len(files), 1 if grey else 3, shape[1], shape[0]), np.uint8)
    for slot, (path, _) in zip(x, files, strict=True):
        slot[:] = read_picture(path, shape, grey)
    return x, np.array([label for _, label in files], np.int64)


def read_picture(path: Path, shape: tuple[int, int], grey: bool = False, crop: bool = False) -> np.ndarray:
    """An image (channels, height, width) uint8, resized where it is not of `shape` (width, height). crop: the centre of
    the image, its shorter side resized to 8/7 of that of `shape`, instead of all of it."""
    image = pillow(path)
    with opened(image, path) as picture:
        if picture.mode == "I;16":  # Pillow would cut off at 255
            picture = image.fromarray((np.asarray(picture) // 256).astype(np.uint8))
        picture = picture.convert("L" if grey else "RGB")
        if crop:
            picture = _centre(picture, shape, image)
        if picture.size != shape:
            picture = picture.resize(shape, image.Resampling.BILINEAR)
        return np.atleast_3d(np.asarray(picture)).transpose(2, 0, 1)


def _centre(picture: Any, shape: tuple[int, int], image: Any) -> Any:
    ratio = max(shape[0] / picture.size[0], shape[1] / picture.size[1]) * 8 / 7
    picture = picture.resize(tuple(round(side * ratio) for side in picture.size), image.Resampling.BILINEAR)
    left, top = ((side - wanted) // 2 for side, wanted in zip(picture.size, shape, strict=True))
    return picture.crop((left, top, left + shape[0], top + shape[1]))


@contextmanager
def opened(image: Any, path: Path) -> Iterator[Any]:
    """An open image; errors of opening and decoding become a DataError that names the file. image: Pillow's module."""
    try:
        with image.open(path) as picture:
            yield picture
    except (OSError, SyntaxError) as problem:  # Pillow reports a broken PNG as a SyntaxError
        raise DataError(f"{path}: cannot be read as an image ({problem})") from problem


def pillow(path: Path) -> Any:
    try:
        from PIL import Image
    except ImportError as missing:
        raise DataError(
            f"{path}: reading images needs the package Pillow; install it with: pip install 'everfed[images]'"
        ) from missing
    return Image
