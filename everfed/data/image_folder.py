"""A folder of images: root/<class>/*, or root/train/<class>/* and root/test/<class>/*."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everfed.data.errors import DataError
from everfed.data.formats import Arrays, split_arrays
from everfed.data.pictures import class_folders, decoded, listed, opened, pillow

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
