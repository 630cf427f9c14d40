"""Decoding image files of any size into one array. Pillow is imported only here and only when images are read."""

from __future__ import annotations

from collections.abc import Sequence
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


def decoded(files: Sequence[tuple[Path, int]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Colour images (n, 3, size, size) uint8, resized where they are not of that size, and labels (n,)."""
    if not files:
        raise DataError("there is no image to read")
    image = pillow(files[0][0])
    x = np.empty((len(files), 3, size, size), np.uint8)
    for slot, (path, _) in zip(x, files, strict=True):
        try:
            with image.open(path) as picture:
                colour = picture.convert("RGB")
                if colour.size != (size, size):
                    colour = colour.resize((size, size), image.Resampling.BILINEAR)
                slot[:] = np.asarray(colour).transpose(2, 0, 1)
        except (OSError, SyntaxError) as problem:  # Pillow reports a broken PNG as a SyntaxError
            raise DataError(f"{path}: cannot be read as an image ({problem})") from problem
    return x, np.array([label for _, label in files], np.int64)


def open_resized(path: Path, size: tuple[int, int]) -> np.ndarray:
    """A colour image (3, height, width) uint8, resized where it is not of that size."""
    image = pillow(path)
    try:
        with image.open(path) as picture:
            colour = picture.convert("RGB")
            if colour.size != size[::-1]:
                colour = colour.resize(size[::-1], image.Resampling.BILINEAR)
            return np.asarray(colour).transpose(2, 0, 1)
    except (OSError, SyntaxError) as problem:
        raise DataError(f"{path}: cannot be read as an image ({problem})") from problem


def pillow(path: Path) -> Any:
    try:
        from PIL import Image
    except ImportError as missing:
        raise DataError(
            f"{path}: reading images needs the package Pillow; install it with: pip install 'everfed[images]'"
        ) from missing
    return Image
