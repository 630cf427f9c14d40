"""Data sets of torch and of Hugging Face as they are: a sample is decoded when a client first needs it, and lies from
then on in a memory-mapped file, so that memory does not grow with the data."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from everfed.core.stream import digest_of
from everfed.data import transforms
from everfed.data.hub import label_column, sample_column
from everfed.data.source import Source, make_targets, one_sample, storage_form, trained
from everfed.errors import DataError
from everfed.store.files import digest, make_folder

CHUNK = 64  # samples decoded at once
MAPPED_BYTES = 32 * 2**20  # of samples that a stream keeps mapped; the others are mapped again on demand
PROBED = 32  # samples whose content identifies a set, with its labels
TARGETS = ("targets", "labels", "_labels")  # attributes of torchvision's sets


class Samples:
    """Behaves like an (n, ...) tensor in storage form; the rows that it is indexed by are decoded then.

    read: the sample of an index, an image or an array. form: its dtype and shape, empty. folder: of the files that
    `mapped` writes. workers: threads that decode; Pillow and torch do so in parallel.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        read: Callable[[int], Any],
        count: int,
        folder: Path,
        *,
        name: str,
        workers: int,
        channels: int | None = None,
        size: int | None = None,
    ) -> None:
        self._read, self._count, self._channels, self._size = read, count, channels, size
        self.folder, self.name, self.workers = folder, name, workers
        self._pool: tuple[int, ThreadPoolExecutor] | None = None
        if count == 0:
            raise DataError(f"{name} is empty")
        first = self._decoded(0)
        self.dtype, self.shape = first.dtype, torch.Size((count, *first.shape))

    def formatted(self, channels: int, size: int) -> Samples:
        """The same images with this format."""
        given = {"name": self.name, "workers": self.workers, "channels": channels, "size": size}
        return Samples(self._read, self._count, self.folder, **given)  # type: ignore[arg-type]

    def dim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, rows: Tensor) -> Tensor:
        """The samples at `rows` (k,), decoded now."""
        if len(rows) == 0:
            return torch.zeros((0, *self.shape[1:]), dtype=self.dtype)
        if self._pool is None or self._pool[0] != os.getpid():  # threads do not survive a fork
            self._pool = (os.getpid(), ThreadPoolExecutor(max(1, self.workers)))
        found = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        for place, sample in enumerate(self._pool[1].map(self._checked, rows.tolist())):
            found[place] = sample
        return found

    def mapped(self, rows: np.ndarray, view: Callable[[Tensor], Tensor], key: str) -> Tensor:
        """view(the samples at `rows`) as a memory-mapped tensor. key: names the view; the file is written once, and
        shared by all processes."""
        if len(rows) == 0:
            return view(self[torch.zeros(0, dtype=torch.int64)])
        what = f"{self.name} {self.dtype} {tuple(self.shape)} {key}"
        path = self.folder / f"{digest(what.encode() + rows.tobytes())}.bin"
        if not path.exists():
            self._write(path, rows, view)
        numbers = len(rows) * int(np.prod(self.shape[1:]))
        return torch.from_file(str(path), shared=False, size=numbers, dtype=self.dtype).view(-1, *self.shape[1:])

    def _write(self, path: Path, rows: np.ndarray, view: Callable[[Tensor], Tensor]) -> None:
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb") as file:
                for first in range(0, len(rows), CHUNK):
                    some = view(self[torch.from_numpy(rows[first : first + CHUNK])])
                    file.write(some.contiguous().numpy().tobytes())
            os.replace(temporary, path)
        except OSError as problem:
            temporary.unlink(missing_ok=True)
            raise DataError(
                f"decoded samples cannot be kept in {path.parent} ({problem}); name another `cache`"
            ) from None

    def probe(self) -> Tensor:
        """Some samples, by which a set is recognised."""
        return self[torch.linspace(0, self._count - 1, min(PROBED, self._count)).long()]

    def _checked(self, index: int) -> Tensor:
        found = self._decoded(index)
        if found.dtype != self.dtype or found.shape != self.shape[1:]:
            raise DataError(
                f"{self.name}: sample {index} is {found.dtype} {tuple(found.shape)}, where the first is {self.dtype} "
                f"{tuple(self.shape[1:])}; for images of different sizes or channels set stream.image_size and "
                "stream.channels"
            )
        return found

    def _decoded(self, index: int) -> Tensor:
        try:
            value = self._read(index)
        except Exception as problem:  # of the user's own data set
            raise DataError(
                f"{self.name}: sample {index} cannot be read ({type(problem).__name__}: {problem})"
            ) from problem
        made = storage_form(one_sample(value, self.name), f"{self.name}, sample {index}")
        if made.dtype == torch.uint8 and (self._size or self._channels):
            try:
                made = transforms.to_format(made, self._channels or made.shape[1], self._size or made.shape[2])
            except ValueError as problem:
                raise DataError(f"{self.name}: sample {index}: {problem}") from problem
        return made[0]


def joined_samples(parts: Sequence[Tensor | Samples]) -> Any:
    """Samples of several sets, one after the other; decoded on demand where those of the first are."""
    first = parts[0]
    if not isinstance(first, Samples):
        return torch.cat([part if isinstance(part, Tensor) else part[torch.arange(len(part))] for part in parts])
    ends = np.cumsum([0, *map(len, parts)])

    def read(index: int) -> Tensor:
        place = int(np.searchsorted(ends, index, side="right")) - 1
        part, own = parts[place], index - int(ends[place])
        return part._checked(own) if isinstance(part, Samples) else part[own]

    return Samples(read, int(ends[-1]), first.folder, name=first.name, workers=first.workers)


def lazy_source(
    train: Any,
    test: Any,
    *,
    name: str,
    targets: tuple[Any, Any] | None,
    classes: int | None,
    class_names: Sequence[str] | None,
    cache: str | Path | None,
    workers: int,
    label_kind: str | None = None,
) -> Source:
    """A source of two data sets. targets: their labels, where they cannot be found without decoding. label_kind: as in
    `make_source`."""
    for part, one in (("train", train), ("test", test)):
        _require_indexed(one, f"{name} {part}")
    y = tuple(labels_of(one, name) for one in (train, test)) if targets is None else targets
    names = class_names or getattr(train, "classes", None) or _feature_names(train)
    found = make_targets(name, y[0], y[1], classes, names, label_kind)
    folder = cache_folder(cache)
    x = [
        Samples(_reader(one), len(one), folder, name=f"{name} {part}", workers=workers)
        for part, one in (("train", train), ("test", test))
    ]
    if cache is not None:  # other data in the same folder gets other files
        for samples, own in zip(x, found[:2], strict=True):
            samples.name += f" {digest_of(samples.name, own, samples.probe())}"
    given: dict[str, Any] = {"x_train": x[0], "x_test": x[1]}
    source = Source(
        name,
        y_train=found.train,
        y_test=found.test,
        classes=found.classes,
        class_names=found.names,
        origin="data sets in Python",
        targets=found.kind,
        **given,
    )
    return trained(source)


def is_several(given: Any) -> bool:
    """Is it a list of data sets, and not a data set that is a list of samples?"""
    return isinstance(given, list | tuple) and bool(given) and all(_is_set(one) for one in given)


def _is_set(one: Any) -> bool:
    plain = isinstance(one, tuple | list | Mapping | str | np.ndarray | Tensor)
    return not plain and hasattr(one, "__getitem__") and hasattr(one, "__len__")


class Joined:
    """Several data sets, one after the other, as one."""

    def __init__(self, datasets: Sequence[Any]) -> None:
        self.datasets = list(datasets)
        for index, one in enumerate(self.datasets):
            _require_indexed(one, f"data set {index + 1}")
        self._ends = np.cumsum([len(one) for one in self.datasets])
        self._readers = [_reader(one) for one in self.datasets]
        self.classes = getattr(self.datasets[0], "classes", None) or _feature_names(self.datasets[0])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[Any]:
        """A sample; the labels are read from the sets themselves."""
        place = int(np.searchsorted(self._ends, index, side="right"))
        return (self._readers[place](index - int(self._ends[place - 1] if place else 0)),)

    def places(self) -> np.ndarray:
        """(n,) the number of the data set that a sample is of."""
        return np.repeat(np.arange(len(self.datasets)), [len(one) for one in self.datasets])


def labels_of(dataset: Any, name: str) -> np.ndarray:
    """(n,) labels without decoding a sample where the set keeps them apart; else every sample is read once."""
    for attribute in TARGETS:
        found = getattr(dataset, attribute, None)
        if found is not None and not callable(found) and len(found) == len(dataset):
            return np.asarray(found)
    if hasattr(dataset, "features"):  # of Hugging Face
        return np.asarray(dataset[label_column(name, dataset)])
    if hasattr(dataset, "indices") and hasattr(dataset, "dataset"):  # torch's Subset
        return labels_of(dataset.dataset, name)[np.asarray(dataset.indices)]
    if hasattr(dataset, "datasets"):  # torch's ConcatDataset
        return np.concatenate([labels_of(one, name) for one in dataset.datasets])
    if hasattr(dataset, "tensors"):  # torch's TensorDataset
        return np.asarray(dataset.tensors[1])
    return np.asarray([_label(dataset, index, name) for index in range(len(dataset))])


def _require_indexed(dataset: Any, name: str) -> None:
    """Raises DataError for what is no data set with a length and samples by index."""
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not indexed:
        raise DataError(
            f"{name} is {type(dataset).__name__}, which has no samples by index; allowed: a data set with "
            "`dataset[i]` and `len(dataset)`. What comes as it flows is a stream of its own: from_function"
        )
    if isinstance(dataset, Mapping):
        raise DataError(f"{name} is a table of data sets ({', '.join(map(str, dataset))}); name one of them")
    if len(dataset) == 0:
        raise DataError(f"{name} is empty")


def _label(dataset: Any, index: int, name: str) -> Any:
    try:
        item = dataset[index]
    except Exception as problem:  # of the user's own data set
        raise DataError(f"{name}: sample {index} cannot be read ({type(problem).__name__}: {problem})") from problem
    if not isinstance(item, Sequence) or len(item) < 2 or item[1] is None:
        raise DataError(
            f"{name}: item {index} must be a sample and its label; got {type(item).__name__}; the labels of both sets "
            "can be given as targets=(...)"
        )
    return item[1]


def _reader(dataset: Any) -> Callable[[int], Any]:
    if hasattr(dataset, "features"):
        column = sample_column("the data set", dataset)
        return lambda index: dataset[index][column]
    return lambda index: dataset[index][0]


def _feature_names(dataset: Any) -> Sequence[str] | None:
    if not hasattr(dataset, "features"):
        return None
    return getattr(dataset.features[label_column("the data set", dataset)], "names", None)


def cache_folder(cache: str | Path | None) -> Path:
    """The folder of decoded samples; without `cache` one that goes with this process."""
    if cache is not None:
        folder = Path(cache).expanduser()
        make_folder(folder)
        return folder
    folder = Path(tempfile.mkdtemp(prefix="everfed-"))
    weakref.finalize(_OWNER, _remove, folder, os.getpid())
    return folder


class _Owner:
    """Lives as long as the process."""


_OWNER = _Owner()


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a forked worker leaves it alone
        shutil.rmtree(folder, ignore_errors=True)
