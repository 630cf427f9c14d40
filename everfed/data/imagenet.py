"""ImageNet-1K from its training folder, decoded on demand: at 224 pixels it does not fit in memory.

<data>/imagenet/train/<wnid>/*.JPEG, or the same below ILSVRC/Data/CLS-LOC. The published test part has no labels, and
its validation part has 50 images a class; STAMP's pool has 600 + 100 of every class, all from the training part. Here
these are the first 600 and the next 100 by file name. Names of the set: `imagenet-32` and `imagenet-224`, images
resized to 32x32 or 224x224 whatever their shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from everfed.data.errors import DataError
from everfed.data.pictures import class_folders, decoded, listed
from everfed.data.source import Source

SIZES = {"imagenet-32": 32, "imagenet-224": 224}
GET_IT = "https://image-net.org/download.php (ILSVRC2012, training images), unpacked"
FOLDERS = ("imagenet/train", "imagenet/ILSVRC/Data/CLS-LOC/train", "ILSVRC/Data/CLS-LOC/train")
TRAIN, TEST = 600, 100  # images of every class


class Pictures:
    """Behaves like a (n, 3, size, size) uint8 tensor and decodes the rows it is indexed by."""

    dtype = torch.uint8
    device = torch.device("cpu")

    def __init__(self, files: Sequence[Path], size: int) -> None:
        self.files, self.size = files, size

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.files), 3, self.size, self.size))

    def dim(self) -> int:
        return 4

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """The images at `rows` (k,), decoded now."""
        if len(rows) == 0:
            return torch.zeros((0, *self.shape[1:]), dtype=self.dtype)
        return torch.from_numpy(decoded([(self.files[row], 0) for row in rows.tolist()], (self.size, self.size))[0])


def _places(folder: Path | None) -> list[Path]:
    return [] if folder is None else [folder / place for place in FOLDERS]


def find(folder: Path | None) -> Path | None:
    """The folder with its class folders."""
    return next((place for place in _places(folder) if place.is_dir()), None)


def load_imagenet(name: str, folder: Path | None, train: int = TRAIN, test: int = TEST) -> Source:
    """The set of that name; a folder that is not there, or a class with too few images, is a DataError."""
    root = find(folder)
    if root is None:
        searched = ", ".join(map(str, _places(folder))) or "no data folder is named (EVERFED_DATA or --data)"
        raise DataError(
            f"data set {name!r} was not found. Looked for class folders in: {searched}. Get it from {GET_IT}"
        )
    classes = class_folders(root)
    by_class: list[list[Path]] = [[] for _ in classes]
    for path, label in listed(root, classes):
        by_class[label].append(path)
    for wnid, files in zip(classes, by_class, strict=True):
        if len(files) < train + test:
            raise DataError(f"{root / wnid}: {len(files)} images where {train} + {test} are needed")
    parts = [[files[:train] for files in by_class], [files[train : train + test] for files in by_class]]
    (x, y), (x_test, y_test) = (_lazy(part, SIZES[name]) for part in parts)
    return Source(name, x, y, x_test, y_test, len(classes), tuple(classes), str(root))  # type: ignore[arg-type]


def _lazy(by_class: list[list[Path]], size: int) -> tuple[Pictures, Tensor]:
    labels = torch.repeat_interleave(torch.arange(len(by_class)), torch.tensor([len(files) for files in by_class]))
    return Pictures([path for files in by_class for path in files], size), labels
