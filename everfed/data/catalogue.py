"""The named data sets: their layouts in the data folder, and where to get them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from everfed.data import formats
from everfed.data.formats import Arrays
from everfed.data.image_folder import read_image_folder, read_tiny_imagenet

Files = tuple[Path, ...]
DIGITS = tuple("0123456789")


@dataclass(frozen=True)
class FileLayout:
    """One layout of a set on disk.

    folders: places below the data folder. files: the files needed, each as alternative names. read: Paths -> Arrays.
    """

    folders: tuple[str, ...]
    files: tuple[tuple[str, ...], ...]
    read: Callable[[Files], Arrays]

    def find(self, root: Path) -> Files | None:
        """The files of the first folder that has them all."""
        for folder in self.folders:
            found = [_first_file(root / folder, names) for names in self.files]
            if all(found):
                return tuple(path for path in found if path)
        return None

    def places(self, root: Path) -> Iterator[str]:
        """The paths that are searched, for messages: the first name of the first file of every folder."""
        for folder in self.folders:
            yield str(root / folder / self.files[0][0])


@dataclass(frozen=True)
class KnownArrays:
    """A named set: its classes (None: as many as its files name), the layouts it is read in (first found wins) and
    where it is published."""

    classes: int | None
    class_names: tuple[str, ...] | None
    layouts: tuple[FileLayout, ...]
    get_it: str

    def find(self, root: Path) -> tuple[FileLayout, Files] | None:
        """The first layout whose files are all there."""
        for layout in self.layouts:
            files = layout.find(root)
            if files:
                return layout, files
        return None


def _first_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


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


_EMNIST_DIGITS = KnownArrays(
    10,
    DIGITS,
    (
        _npz("emnist-digits", "emnist_digits", "emnist"),
        _idx_layout("emnist-digits-", "test", ("", "emnist", "EMNIST/raw", "emnist/gzip", "gzip"), _read_emnist),
    ),
    "https://www.nist.gov/itl/products-and-services/emnist-dataset (gzip.zip)",
)

KNOWN: Mapping[str, KnownArrays] = {
    "mnist": KnownArrays(
        10,
        DIGITS,
        (_npz("mnist"), _idx_layout("", "t10k", ("", "mnist", "MNIST/raw", "mnist/raw"), _read_idx)),
        "https://ossci-datasets.s3.amazonaws.com/mnist/ (four .gz files), or dataset = 'hub:ylecun/mnist'",
    ),
    "emnist": _EMNIST_DIGITS,
    "emnist-digits": _EMNIST_DIGITS,
    "usps": KnownArrays(
        10,
        DIGITS,
        (
            _npz("usps"),
            FileLayout(
                ("", "usps", "USPS"),
                (("zip.train", "zip.train.gz"), ("zip.test", "zip.test.gz")),
                _pairs(formats.read_usps_text),
            ),
            FileLayout(
                ("", "usps", "USPS"),
                (("usps", "usps.bz2"), ("usps.t", "usps.t.bz2")),
                _pairs(formats.read_usps_svmlight),
            ),
        ),
        "https://hastie.su.domains/ElemStatLearn/data.html (zip.train.gz, zip.test.gz)",
    ),
    "svhn": KnownArrays(
        10,
        DIGITS,
        (
            _npz("svhn"),
            FileLayout(
                ("", "svhn", "SVHN"), (("train_32x32.mat",), ("test_32x32.mat",)), _pairs(formats.read_svhn_mat)
            ),
        ),
        "http://ufldl.stanford.edu/housenumbers/ (train_32x32.mat, test_32x32.mat)",
    ),
    "cifar10": KnownArrays(
        10,
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        (
            _npz("cifar10"),
            FileLayout(
                ("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10"),
                (*((f"data_batch_{i}.bin",) for i in range(1, 6)), ("test_batch.bin",)),
                _read_cifar10,
            ),
        ),
        "https://www.cs.toronto.edu/~kriz/cifar.html: the BINARY version, cifar-10-binary.tar.gz, unpacked "
        "(the python version is pickled, and everfed reads no pickles), or dataset = 'hub:uoft-cs/cifar10'",
    ),
    "cifar100": KnownArrays(
        100,
        None,
        (
            _npz("cifar100"),
            FileLayout(
                ("cifar-100-binary", "cifar100/cifar-100-binary", "cifar100"),
                (("train.bin",), ("test.bin",)),
                _read_cifar100,
            ),
        ),
        "https://www.cs.toronto.edu/~kriz/cifar.html: the BINARY version, cifar-100-binary.tar.gz, unpacked "
        "(the python version is pickled, and everfed reads no pickles), or dataset = 'hub:uoft-cs/cifar100'",
    ),
    "tiny-imagenet": KnownArrays(
        None,
        None,
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
