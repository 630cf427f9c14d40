"""Reads image files and folders of them. Pillow is imported only here and only when images are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from everfed.data.formats import Arrays, split_arrays
from everfed.errors import DataError, optional_package

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
    return optional_package("PIL.Image", "images", f"{path}: reading images", DataError)


# folders of images ---------------------------------------------------------------------------------------------------
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
    arrays = [decoded(part, shape, grey) for part in files]
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
        with opened(image, path) as picture:
            if shape is not None and picture.size != shape and size is None:
                raise DataError(
                    f"{path}: {picture.size[0]}x{picture.size[1]} pixels where others have {shape[0]}x{shape[1]}; set "
                    "stream.image_size, such as 32, to bring all images to one size"
                )
            shape, grey = shape or picture.size, grey and picture.mode in ("1", "L", "LA", "I;16")
    assert shape is not None
    return shape, grey


# Tiny-ImageNet: 200 classes of 500 training images and 10,000 validation images, 64x64 -------------------------------
def read_tiny_imagenet(files: tuple[Path, ...]) -> Arrays:
    """tiny-imagenet-200/ as it is published: train/<wnid>/images/*.JPEG, and val/images/*.JPEG named in
    val/val_annotations.txt. The validation part is the test part, since the published test part has no labels."""
    notes = files[0]
    root = notes.parent.parent
    classes = class_folders(root / "train")
    train = listed(root / "train", classes, "images")
    label = {name: number for number, name in enumerate(classes)}
    test = [(notes.parent / "images" / name, label[wnid]) for name, wnid in _annotations(notes, label)]
    (x, y), (x_test, y_test) = decoded(train, (64, 64)), decoded(test, (64, 64))
    return Arrays(x, y, x_test, y_test, tuple(classes))


def _annotations(path: Path, known: dict[str, int]) -> list[tuple[str, str]]:
    """(file name, wnid) of every line: both come first, tab-separated."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [tuple(line.split("\t")[:2]) for line in lines if line.strip()]
    for row in rows:
        if len(row) != 2 or row[1] not in known:
            raise DataError(f"{path}: expected a file name and the id of a class below train/, got {' '.join(row)!r}")
    return [(name, wnid) for name, wnid in rows]
