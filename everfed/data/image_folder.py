"""A folder of images: root/<class>/*, or root/train/<class>/* and root/test/<class>/*."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from everfed.data.errors import DataError
from everfed.data.formats import Arrays, split_arrays
from everfed.data.pictures import class_folders, listed, pillow

Files = list[tuple[Path, int]]  # (file, class id)
_NEEDS = "an image folder has root/<class>/*, or root/train/<class>/* and root/test/<class>/*"


def has_parts(root: Path) -> bool:
    """Are there a train and a test folder?"""
    return (root / "train").is_dir() and (root / "test").is_dir()


def is_image_folder(root: Path) -> bool:
    """Whether `root` has train and test folders, or folders with images in them."""
    return has_parts(root) or any(listed(root, [name]) for name in class_folders(root))


def read_image_folder(root: Path, size: int | None = None) -> Arrays:
    """Every image of `root`, classes in the order of their folders' names; grey only when all of them are. Without
    train and test folders a fixed fifth of every class is for testing. size: resize all to so many pixels a side;
    without it all must have one size."""
    parts = has_parts(root)
    classes = class_folders(root / "train" if parts else root)
    files = [_listed(root / part, classes) for part in ("train", "test")] if parts else [listed(root, classes)]
    if not all(files):
        raise DataError(f"{root}: there are no images in class folders; {_NEEDS}")
    image = pillow(root)
    shape, grey = _common_format(image, [path for part in files for path, _ in part], size)
    arrays = [_decoded(image, part, shape, grey) for part in files]
    if parts:
        return Arrays(*arrays[0], *arrays[1], tuple(classes))
    return split_arrays(*arrays[0], classes)


def _listed(folder: Path, classes: list[str]) -> Files:
    unknown = sorted(set(class_folders(folder)) - set(classes))
    if unknown:
        raise DataError(f"{folder / unknown[0]}: this class has no folder under train")
    return listed(folder, classes)


def _common_format(image: Any, paths: list[Path], size: int | None) -> tuple[tuple[int, int], bool]:
    """((width, height), all grey): only headers are read."""
    shape, grey = (size, size) if size else None, True
    for path in paths:
        with _opened(image, path) as picture:
            if shape is not None and picture.size != shape and size is None:
                raise DataError(
                    f"{path}: {picture.size[0]}x{picture.size[1]} pixels where others have {shape[0]}x{shape[1]}; set "
                    "stream.image_size, such as 32, to bring all images to one size"
                )
            shape, grey = shape or picture.size, grey and picture.mode in ("1", "L", "LA", "I;16")
    assert shape is not None
    return shape, grey


def _decoded(image: Any, files: Files, shape: tuple[int, int], grey: bool) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, channels, height, width) uint8 and labels, decoded into place one by one."""
    x = np.empty((len(files), 1 if grey else 3, shape[1], shape[0]), np.uint8)
    for slot, (path, _) in zip(x, files, strict=True):
        with _opened(image, path) as picture:
            if picture.mode == "I;16":  # Pillow would cut off at 255
                picture = image.fromarray((np.asarray(picture) // 256).astype(np.uint8))
            picture = picture.convert("L" if grey else "RGB")
            if picture.size != shape:
                picture = picture.resize(shape, image.Resampling.BILINEAR)
            slot[:] = np.atleast_3d(np.asarray(picture)).transpose(2, 0, 1)
    return x, np.array([label for _, label in files], np.int64)


@contextmanager
def _opened(image: Any, path: Path) -> Iterator[Any]:
    """An open image; errors of opening and decoding become a DataError that names the file."""
    try:
        with image.open(path) as picture:
            yield picture
    except (OSError, SyntaxError) as problem:  # Pillow reports a broken PNG as a SyntaxError
        raise DataError(f"{path}: cannot be read as an image ({problem})") from problem
