"""The named data sets: their layouts in the data folder, and where to get them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from everfed.data import formats
from everfed.data.download import ARCHIVES
from everfed.data.formats import Arrays
from everfed.data.images import read_image_folder, read_tiny_imagenet
from everfed.errors import DataError

VARIABLE = "EVERFED_DATA"
Files = tuple[Path, ...]
DIGITS = tuple("0123456789")


def data_folder(data_dir: str | Path | None = None) -> Path | None:
    """The folder that holds data sets: the argument, else EVERFED_DATA, else None."""
    chosen = data_dir or os.environ.get(VARIABLE)
    return Path(chosen).expanduser() if chosen else None


@dataclass(frozen=True)
class FileLayout:
    """One layout of a set on disk.

    folders: places below the data folder. files: the files or folders needed there, each as alternative names. read:
    their paths -> the set.
    """

    folders: tuple[str, ...]
    files: tuple[tuple[str, ...], ...]
    read: Callable[[Files], Any]

    def find(self, root: Path) -> Files | None:
        """The files of the first folder that has them all."""
        for folder in self.folders:
            found = [next(filter(Path.exists, (root / folder / name for name in names)), None) for names in self.files]
            if all(found):
                return tuple(path for path in found if path)
        return None


@dataclass(frozen=True)
class KnownSet:
    """A named set: the layouts it is read in (first found wins), where it is published and what it is. classes: None
    where its files name them, or it has none."""

    layouts: tuple[FileLayout, ...]
    get_it: str
    about: str = ""
    classes: int | None = None
    class_names: tuple[str, ...] | None = None

    def find(self, root: Path | None) -> tuple[FileLayout, Files] | None:
        """The first layout whose files are all there."""
        found = ((layout, layout.find(root)) for layout in self.layouts if root)
        return next(((layout, files) for layout, files in found if files), None)

    def load(self, name: str, root: Path | None) -> tuple[Any, Files]:
        """The set and the files that it was read from. Raises DataError where it is not there."""
        found = self.find(root)
        if found is not None:
            return found[0].read(found[1]), found[1]
        if root is None:
            problem = ": no data folder is named"
        elif not root.is_dir():
            problem = f" was not found: the data folder {root} does not exist"
        else:
            # the first name of the first file of every folder
            places = (str(root / folder / one.files[0][0]) for one in self.layouts for folder in one.folders)
            problem = f" was not found. Looked for: {', '.join(places)}"
        get = f"`everfed data get {name} --data DIR`, or get" if name in ARCHIVES else "Get"
        remedy = f"{get} it from {self.get_it}; then put it into the folder that --data or {VARIABLE} names"
        raise DataError(f"data set {name!r}{problem}. {remedy}")


def _npz(*stems: str) -> FileLayout:
    return FileLayout(("", stems[0]), (tuple(f"{s}.npz" for s in stems),), lambda files: formats.read_npz(files[0]))


def _idx_names(stem: str) -> tuple[str, ...]:
    dotted = stem.replace("-idx", ".idx")
    return stem, f"{stem}.gz", dotted, f"{dotted}.gz"


def _read_idx(files: Files) -> Arrays:
    x, y, x_test, y_test = (formats.read_idx(path) for path in files)
    return Arrays(x, y, x_test, y_test)


def _read_emnist(files: Files) -> Arrays:
    a = _read_idx(files)
    # EMNIST's idx files hold every image with rows and columns exchanged.
    return a._replace(x_train=a.x_train.transpose(0, 2, 1), x_test=a.x_test.transpose(0, 2, 1))


def _pairs(read: Callable[[Path], tuple[np.ndarray, np.ndarray]]) -> Callable[[Files], Arrays]:
    """A reader of (train file, test file) from a reader of one file."""
    return lambda files: Arrays(*read(files[0]), *read(files[1]))


def _read_cifar10(files: Files) -> Arrays:
    *train, test = (formats.read_cifar10_binary(path) for path in files)
    return Arrays(np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train]), *test)


def _read_cifar100(files: Files) -> Arrays:
    names = formats.read_names(files[0].with_name("fine_label_names.txt"))
    return _pairs(formats.read_cifar100_binary)(files)._replace(class_names=names)


def _beside_names(files: Files) -> Arrays:
    """The image folder, train/<wnid>/ and test/<wnid>/, beside names.json."""
    return read_image_folder(files[0].parent)


def _idx_layout(prefix: str, test: str, folders: tuple[str, ...], read: Callable[[Files], Arrays]) -> FileLayout:
    parts = (f"{prefix}train", f"{prefix}{test}")
    stems = [f"{part}-{kind}" for part in parts for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    return FileLayout(folders, tuple(_idx_names(stem) for stem in stems), read)


_EMNIST_DIGITS = KnownSet(
    (
        _npz("emnist-digits", "emnist_digits", "emnist"),
        _idx_layout("emnist-digits-", "test", ("", "emnist", "EMNIST/raw", "emnist/gzip", "gzip"), _read_emnist),
    ),
    "https://www.nist.gov/itl/products-and-services/emnist-dataset (gzip.zip)",
    classes=10,
    class_names=DIGITS,
)
_USPS = ("", "usps", "USPS")
_CIFAR = (
    "https://www.cs.toronto.edu/~kriz/cifar.html: the BINARY version, {file}, unpacked "
    "(the python version is pickled, and everfed reads no pickles), or dataset = '{hub}'"
)

KNOWN: Mapping[str, KnownSet] = {
    "mnist": KnownSet(
        (_npz("mnist"), _idx_layout("", "t10k", ("", "mnist", "MNIST/raw", "mnist/raw"), _read_idx)),
        "https://ossci-datasets.s3.amazonaws.com/mnist/ (four .gz files), or dataset = 'hub:ylecun/mnist'",
        classes=10,
        class_names=DIGITS,
    ),
    "emnist": _EMNIST_DIGITS,
    "emnist-digits": _EMNIST_DIGITS,
    "usps": KnownSet(
        (
            _npz("usps"),
            FileLayout(
                _USPS, (("zip.train", "zip.train.gz"), ("zip.test", "zip.test.gz")), _pairs(formats.read_usps_text)
            ),
            FileLayout(_USPS, (("usps", "usps.bz2"), ("usps.t", "usps.t.bz2")), _pairs(formats.read_usps_svmlight)),
        ),
        "https://hastie.su.domains/ElemStatLearn/data.html (zip.train.gz, zip.test.gz)",
        classes=10,
        class_names=DIGITS,
    ),
    "svhn": KnownSet(
        (
            _npz("svhn"),
            FileLayout(
                ("", "svhn", "SVHN"), (("train_32x32.mat",), ("test_32x32.mat",)), _pairs(formats.read_svhn_mat)
            ),
        ),
        "http://ufldl.stanford.edu/housenumbers/ (train_32x32.mat, test_32x32.mat)",
        classes=10,
        class_names=DIGITS,
    ),
    "cifar10": KnownSet(
        (
            _npz("cifar10"),
            FileLayout(
                ("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10"),
                (*((f"data_batch_{i}.bin",) for i in range(1, 6)), ("test_batch.bin",)),
                _read_cifar10,
            ),
        ),
        _CIFAR.format(file="cifar-10-binary.tar.gz", hub="hub:uoft-cs/cifar10"),
        classes=10,
        class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
    "cifar100": KnownSet(
        (
            _npz("cifar100"),
            FileLayout(
                ("cifar-100-binary", "cifar100/cifar-100-binary", "cifar100"),
                (("train.bin",), ("test.bin",)),
                _read_cifar100,
            ),
        ),
        _CIFAR.format(file="cifar-100-binary.tar.gz", hub="hub:uoft-cs/cifar100"),
        classes=100,
    ),
    "tiny-imagenet": KnownSet(
        (
            _npz("tiny-imagenet", "tiny_imagenet"),
            FileLayout(
                ("tiny-imagenet-200", "tiny-imagenet/tiny-imagenet-200", "tiny-imagenet", "tiny_imagenet"),
                (("val/val_annotations.txt",),),
                read_tiny_imagenet,
            ),
            FileLayout(("tiny-imagenet", "tiny_imagenet"), (("names.json",),), _beside_names),
        ),
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip, unpacked",
    ),
}
