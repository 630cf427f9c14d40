"""Readers of the formats data sets are published in. None of them runs code from the file: no pickle."""

from __future__ import annotations

import gzip
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from everfed.data.source import Columns, require_finite
from everfed.data.targets import SPLIT_SEED, held_out, strata
from everfed.errors import DataError

# A set that comes without a test part gets one: this share of every class, drawn with this seed.
TEST_FRACTION = 0.2

R = TypeVar("R")


class Arrays(NamedTuple):
    """The content of a file: samples and labels of both parts, and the class names and further columns if there are
    any."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    class_names: tuple[str, ...] | None = None
    columns: Columns = MappingProxyType({})
    features: tuple[str, ...] = ()  # the names of the columns of x, of a table


# what a damaged file raises
_DAMAGE = (OSError, EOFError, ValueError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error)


def names_the_file(read: Callable[[Path], R]) -> Callable[[Path], R]:
    """Turns the errors of a damaged file into a DataError that names it."""

    @wraps(read)
    def reader(path: Path) -> R:
        try:
            return read(path)
        except _DAMAGE as problem:
            if isinstance(problem, DataError):
                raise
            raise DataError(f"{path}: cannot be read ({problem})") from problem

    return reader


@names_the_file
def read_idx(path: Path) -> np.ndarray:
    """An idx file of unsigned bytes, as MNIST and EMNIST use it, plain or gzipped."""
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
        zero, kind, axes = int.from_bytes(file.read(2)), *file.read(2)
        if zero != 0 or kind != 8:
            raise DataError(f"{path}: not an idx file of unsigned bytes")
        shape = np.frombuffer(file.read(4 * axes), dtype=">u4").astype(int)
        return _shaped(path, np.frombuffer(file.read(), dtype=np.uint8), tuple(shape))


@names_the_file
def read_cifar10_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of a batch of the binary version of CIFAR-10: a label byte and 3x32x32 image bytes per record."""
    return _cifar_records(path, label_bytes=1)


@names_the_file
def read_cifar100_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of the binary version of CIFAR-100: coarse label, fine label and 3x32x32 bytes; y is the fine one."""
    return _cifar_records(path, label_bytes=2)


def _cifar_records(path: Path, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    raw, record = np.fromfile(path, dtype=np.uint8), label_bytes + 3 * 32 * 32
    rows = _shaped(path, raw, (len(raw) // record, record))
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1]


@names_the_file
def read_svhn_mat(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of SVHN's cropped digits, MATLAB format 2; the label 10 stands for the digit 0."""
    from scipy.io import loadmat

    content = loadmat(path)
    return np.ascontiguousarray(content["X"].transpose(3, 2, 0, 1)), content["y"].reshape(-1) % 10


@names_the_file
def read_usps_text(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of zip.train or zip.test: a digit and 256 grey levels in [-1, 1] per line, plain or gzipped."""
    rows = np.loadtxt(path, dtype=np.float32, ndmin=2)
    return _grey_bytes(_shaped(path, rows[:, 1:], (len(rows), 16, 16))), rows[:, 0].astype(np.int64)


@names_the_file
def read_usps_svmlight(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of usps or usps.t in svmlight format, plain or compressed; labels run from 1 to 10."""
    from sklearn.datasets import load_svmlight_file

    x, y = load_svmlight_file(str(path), n_features=256)
    return _grey_bytes(x.toarray().reshape(-1, 16, 16)), y.astype(np.int64) - 1


@names_the_file
def read_npz(path: Path) -> Arrays:
    """x_train, y_train, x_test, y_test; or x, y with a test part drawn by class. `names` may name the classes."""
    with np.load(path, allow_pickle=False) as file:
        names = tuple(str(n) for n in file["names"]) if "names" in file.files else None
        if {"x_train", "y_train", "x_test", "y_test"} <= set(file.files):
            return Arrays(file["x_train"], file["y_train"], file["x_test"], file["y_test"], names)
        if {"x", "y"} <= set(file.files):
            x = file["x"]
            require_finite(x, f"{path}, x")  # here rows still have the file's numbers
            return split_arrays(x, file["y"], names)
        raise DataError(
            f"{path}: needs the arrays x_train, y_train, x_test, y_test, or x and y; it has {', '.join(file.files)}"
        )


def split_arrays(
    x: np.ndarray,
    y: np.ndarray,
    class_names: Sequence[str] | None = None,
    columns: Mapping[str, np.ndarray] | None = None,
) -> Arrays:
    """A fixed test part, a fifth of every class, the same on every machine. columns: of all samples."""
    if len(x) != len(y):
        raise DataError(f"{len(x)} samples but {len(y)} labels")
    groups = np.reshape(y, -1) if y.dtype.kind != "f" and y.size == len(y) else strata(y)
    train, test = held_out(groups, TEST_FRACTION, np.random.default_rng(SPLIT_SEED))
    names = tuple(class_names) if class_names else None
    parted = {name: (values[train], values[test]) for name, values in (columns or {}).items()}
    return Arrays(x[train], y[train], x[test], y[test], names, parted)


def read_names(path: Path) -> tuple[str, ...] | None:
    """One class name per line, or None when there is no such file."""
    if not path.is_file():
        return None
    return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(its place, the object) of every line that is not empty. Raises DataError."""
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                row = json.loads(line) if line.strip() else {}
                if not isinstance(row, dict):
                    raise DataError(f"{path}, line {number}: expected an object, got {type(row).__name__}")
                if line.strip():
                    yield f"{path}, line {number}", row
    except json.JSONDecodeError as problem:
        raise DataError(f"{path}, line {number}: not JSON ({problem})") from problem
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: cannot be read ({problem})") from problem


def _grey_bytes(levels: np.ndarray) -> np.ndarray:
    """Grey levels in [-1, 1] as bytes."""
    return np.rint((np.clip(levels, -1.0, 1.0) + 1.0) * 127.5).astype(np.uint8)


def _shaped(path: Path, flat: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if flat.size != np.prod(shape):
        raise DataError(f"{path}: {flat.size} values, expected shape {shape}; the file is damaged or incomplete")
    return flat.reshape(shape)
