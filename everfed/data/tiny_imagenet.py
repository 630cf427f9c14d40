"""Tiny-ImageNet as it is published: 200 classes of 500 training images and 10,000 validation images, 64x64."""

from __future__ import annotations

from pathlib import Path

from everfed.data.errors import DataError
from everfed.data.formats import Arrays
from everfed.data.image_folder import read_image_folder
from everfed.data.pictures import class_folders, decoded, listed

SIZE = 64


def read_published(files: tuple[Path, ...]) -> Arrays:
    """tiny-imagenet-200/: train/<wnid>/images/*.JPEG, and val/images/*.JPEG named in val/val_annotations.txt. The
    validation part is the test part, since the published test part has no labels."""
    notes = files[0]
    root = notes.parent.parent
    classes = class_folders(root / "train")
    train = listed(root / "train", classes, "images")
    label = {name: number for number, name in enumerate(classes)}
    test = [(notes.parent / "images" / name, label[wnid]) for name, wnid in _annotations(notes, label)]
    (x, y), (x_test, y_test) = decoded(train, SIZE), decoded(test, SIZE)
    return Arrays(x, y, x_test, y_test, tuple(classes))


def read_folders(files: tuple[Path, ...]) -> Arrays:
    """The plain image folder beside names.json: train/<wnid>/ and test/<wnid>/."""
    return read_image_folder(files[0].parent)


def _annotations(path: Path, known: dict[str, int]) -> list[tuple[str, str]]:
    """(file name, wnid) of every line: both come first, tab-separated."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [tuple(line.split("\t")[:2]) for line in lines if line.strip()]
    for row in rows:
        if len(row) != 2 or row[1] not in known:
            raise DataError(f"{path}: expected a file name and the id of a class below train/, got {' '.join(row)!r}")
    return [(name, wnid) for name, wnid in rows]
