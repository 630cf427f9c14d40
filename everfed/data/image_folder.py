"""A folder of images: root/train/<class>/*.png|jpg and root/test/<class>/*.png|jpg."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from everfed.data.errors import DataError
from everfed.data.formats import Arrays

SUFFIXES = (".png", ".jpg", ".jpeg")


def is_image_folder(root: Path) -> bool:
    """Whether `root` has the train and test folders of an image folder."""
    return (root / "train").is_dir() and (root / "test").is_dir()


def read_image_folder(root: Path) -> Arrays:
    """Every image of `root`, classes in the order of their folders' names; grey only when all of them are."""
    if not is_image_folder(root):
        raise DataError(f"{root}: an image folder needs train/<class>/ and test/<class>/ below it")
    classes = sorted(folder.name for folder in (root / "train").iterdir() if folder.is_dir())
    files = {part: _listed(root / part, classes) for part in ("train", "test")}
    if not files["train"] or not files["test"]:
        raise DataError(f"{root}: train and test each need images ({', '.join(SUFFIXES)}) in class folders")
    image = _pillow(root)
    size, grey = _common_format(image, [path for part in files.values() for path, _ in part])
    (x, y), (x_test, y_test) = (_decoded(image, files[part], size, grey) for part in ("train", "test"))
    return Arrays(x, y, x_test, y_test, tuple(classes))


def _listed(folder: Path, classes: list[str]) -> list[tuple[Path, int]]:
    """(file, class id) of every image, in a fixed order."""
    unknown = sorted(f.name for f in folder.iterdir() if f.is_dir() and f.name not in classes)
    if unknown:
        raise DataError(f"{folder / unknown[0]}: this class has no folder under train")
    return [
        (path, label)
        for label, name in enumerate(classes)
        if (folder / name).is_dir()
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in SUFFIXES
    ]


def _pillow(root: Path) -> Any:
    try:
        from PIL import Image
    except ImportError as missing:
        raise DataError(
            f"{root}: reading images needs the package Pillow; install it with: pip install 'everfed[images]'"
        ) from missing
    return Image


def _common_format(image: Any, paths: list[Path]) -> tuple[tuple[int, int], bool]:
    """((width, height), all grey): only headers are read."""
    size, grey = None, True
    for path in paths:
        with _opened(image, path) as picture:
            if size is not None and picture.size != size:
                raise DataError(
                    f"{path}: {picture.size[0]}x{picture.size[1]} pixels where others have {size[0]}x{size[1]}; "
                    "all images of a set must have one size"
                )
            size, grey = picture.size, grey and picture.mode in ("1", "L")
    assert size is not None
    return size, grey


def _decoded(
    image: Any, files: list[tuple[Path, int]], size: tuple[int, int], grey: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, channels, height, width) uint8 and labels, decoded into place one by one."""
    x = np.empty((len(files), 1 if grey else 3, size[1], size[0]), np.uint8)
    for slot, (path, _) in zip(x, files, strict=True):
        with _opened(image, path) as picture:
            slot[:] = np.atleast_3d(np.asarray(picture.convert("L" if grey else "RGB"))).transpose(2, 0, 1)
    return x, np.array([label for _, label in files], np.int64)


@contextmanager
def _opened(image: Any, path: Path) -> Iterator[Any]:
    """An open image; errors of opening and decoding become a DataError that names the file."""
    try:
        with image.open(path) as picture:
            yield picture
    except (OSError, SyntaxError) as problem:  # Pillow reports a broken PNG as a SyntaxError
        raise DataError(f"{path}: cannot be read as an image ({problem})") from problem
