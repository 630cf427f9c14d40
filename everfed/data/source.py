"""A data set in storage form, as streams use it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from everfed.data.targets import CLASSES, KINDS, TOKENS, kind_of, storage_targets, strata, thinned
from everfed.errors import DataError

# what is known of every sample of the training and of the test part beside its label, by name
Columns = Mapping[str, tuple[np.ndarray, np.ndarray]]
# An image axis of one of these lengths is taken for the channels.
CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class Source:
    """A data set with its own train and test parts.

    x_*: uint8 images (n, channels, height, width), float32 features (n, ...) or int64 tokens (n, length).
    y_*: by `targets`, one of `everfed.data.targets.KINDS`: (n,) int64 class ids below `classes`; (n, classes) uint8, 0
    or 1, for several labels a sample; (n, classes) float32 for regression. So `classes` is the width of the head.
    origin: where the data came from, for reports. encoder: what made features of texts; "" where nothing did. columns:
    further facts of the samples of both parts, (n,) numbers or words, by which clients and tasks may be divided.
    warnings: shown when a run starts.
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    class_names: tuple[str, ...]
    origin: str
    encoder: str = ""
    targets: str = CLASSES
    columns: Columns = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_pair(self.name, "train", self.x_train, self.y_train)
        _check_pair(self.name, "test", self.x_test, self.y_test)
        for part, y in (("train", self.y_train), ("test", self.y_test)):
            if self.targets == CLASSES:
                _check_classes(self.name, part, y, self.classes)
            elif y.shape[1] != self.classes:
                raise DataError(f"{self.name}: {part} targets have {y.shape[1]} columns, expected {self.classes}")
        _check_alike(self.name, self.x_train, self.x_test)
        for key, parts in self.columns.items():
            lengths = tuple(map(len, parts))
            if lengths != (len(self.y_train), len(self.y_test)):
                expected = f"{len(self.y_train)} of the training part and {len(self.y_test)} of the test part"
                raise DataError(
                    f"{self.name}: column {key!r} has {lengths[0]} and {lengths[1]} entries; expected {expected}"
                )
        if len(self.class_names) != self.classes:
            raise DataError(f"{self.name}: {len(self.class_names)} class names for {self.classes} classes")

    def thinned(self, most_train: int | None, most_test: int | None) -> Source:
        """At most so many samples of each part, every class in proportion: the same ones in every run."""
        parts = (("train", most_train), ("test", most_test))
        train, test = (thinned(self.strata(part), most) for part, most in parts)
        columns = {key: (ours[train], theirs[test]) for key, (ours, theirs) in self.columns.items()}
        return replace(
            self,
            columns=columns,
            x_train=self.x_train[train],
            y_train=self.y_train[train],
            x_test=self.x_test[test],
            y_test=self.y_test[test],
        )

    @property
    def test_labels(self) -> str:
        """A digest of the test labels in their order, which identifies a published test part whatever file holds it."""
        labels = self.y_test.numpy(force=True)
        labels = labels.astype("<i8") if self.targets == CLASSES else labels
        return hashlib.sha256(labels.tobytes()).hexdigest()[:16]

    def strata(self, part: str) -> np.ndarray:
        """(n,) groups of the samples of "train" or "test" by which they are held out and divided; classes themselves
        where every sample has one."""
        return strata(self.y_train if part == "train" else self.y_test)


def make_source(
    name: str,
    x_train: np.ndarray | Tensor,
    y_train: np.ndarray | Tensor,
    x_test: np.ndarray | Tensor,
    y_test: np.ndarray | Tensor,
    *,
    origin: str,
    classes: int | None = None,
    class_names: Sequence[str] | None = None,
    encoder: str = "",
    label_kind: str | None = None,
    columns: Columns | None = None,
) -> Source:
    """A source from arrays in any of the usual layouts. label_kind: one of KINDS; by default by type and shape."""
    targets = make_targets(name, y_train, y_test, classes, class_names, label_kind)
    x = storage_form(x_train, f"{name}, train part"), storage_form(x_test, f"{name}, test part")
    train, test, classes, names, kind = targets
    return trained(Source(name, x[0], train, x[1], test, classes, names, origin, encoder, kind, columns or {}))


class Targets(NamedTuple):
    """The targets of both parts in storage form, the width of the head with the names of its outputs, one of KINDS."""

    train: Tensor
    test: Tensor
    classes: int
    names: tuple[str, ...]
    kind: str


def make_targets(
    name: str,
    y_train: np.ndarray | Tensor,
    y_test: np.ndarray | Tensor,
    classes: int | None,
    class_names: Sequence[str] | None,
    kind: str | None = None,
) -> Targets:
    """Targets from arrays. Classes default to the names given, else to the labels seen: labels that are text, or do not
    count from 0 without a gap, are numbered in their order and give the names."""
    if kind is not None and kind not in KINDS:
        raise DataError(f"{name}: label_kind = {kind!r} is not one of the allowed values: {', '.join(KINDS)}")
    if kind == TOKENS:
        raise DataError(f"{name}: label_kind = {kind!r} is for the scenarios own and language")
    kind = kind or kind_of(y_train, y_test, name)
    if kind != CLASSES:
        train, test = storage_targets(y_train, kind, name), storage_targets(y_test, kind, name)
    else:
        if classes is None and not class_names:
            y_train, y_test, class_names = numbered_labels(y_train, y_test)
        train, test = storage_labels(y_train, name), storage_labels(y_test, name)
    if classes is None:
        classes = train.shape[1] if kind != CLASSES and not class_names else len(class_names or ())
    return Targets(train, test, classes, tuple(map(str, class_names or range(classes))), kind)


def numbered_labels(
    y_train: np.ndarray | Tensor, y_test: np.ndarray | Tensor
) -> tuple[np.ndarray | Tensor, np.ndarray | Tensor, tuple[str, ...]]:
    """(train labels, test labels, class names); what is no list of labels is left for `storage_labels` to refuse."""
    train, test = (y.numpy(force=True) if isinstance(y, Tensor) else np.asarray(y) for y in (y_train, y_test))
    if not all(y.dtype.kind in "iu" for y in (train, test)) and not all(y.dtype.kind in "UO" for y in (train, test)):
        return y_train, y_test, ("",)
    known = np.unique(np.concatenate([train.ravel(), test.ravel()]))
    if known.dtype.kind in "iu" and len(known) and known[0] < 0:
        return y_train, y_test, tuple(map(str, range(int(known[-1]) + 1)))
    return np.searchsorted(known, train), np.searchsorted(known, test), tuple(str(label) for label in known.tolist())


def one_sample(value: Any, name: str) -> Tensor | np.ndarray:
    """(1, ...) one sample: an array, or a picture of Pillow in grey or colour, whatever its mode (a palette, with
    transparency, CMYK)."""
    if hasattr(value, "convert") and hasattr(value, "mode"):
        if value.mode[0] in "IF":
            raise DataError(f"{name}: a picture of mode {value.mode!r} has more than 8 bits; make it an array or 'L'")
        value = value.convert("L" if value.mode in ("1", "L", "LA", "La") else "RGB")
    array = value if isinstance(value, Tensor) else np.asarray(value)
    if array.ndim == 0:
        raise DataError(f"{name}: a sample is an image or an array; got {type(value).__name__}")
    return array[None]


def storage_form(x: np.ndarray | Tensor, name: str = "x") -> Tensor:
    """Samples as streams keep them.

    uint8 (n, h, w) and (n, h, w, c) become images (n, c, h, w); uint8 and float rows become float32; other whole
    numbers become int64 tokens. A 4-D array is channels-last only when its last axis has 1, 3 or 4 entries and its
    second axis has not.
    """
    x = _as_tensor(x, name)
    if x.dim() < 2:
        raise DataError(f"{name}: samples need at least two axes (n, ...), got shape {tuple(x.shape)}")
    if x.dim() == 4 and x.shape[3] in CHANNELS and x.shape[1] not in CHANNELS:
        x = x.permute(0, 3, 1, 2)
    if x.dtype == torch.uint8 and x.dim() == 3:
        x = x.unsqueeze(1)
    require_finite(x, name)
    return x.to(_storage_dtype(x, name)).contiguous()


def require_finite(x: np.ndarray | Tensor, name: str) -> None:
    """Raises DataError that names the first number that float32 cannot hold (NaN, infinity), by row and column."""
    x = _as_tensor(x, name)
    if not x.dtype.is_floating_point or bool(x.float().isfinite().all()):
        return
    wrong = ~x.float().isfinite()
    row, *inside = wrong.nonzero()[0].tolist()
    column = f" in column {inside[0] + 1}" if x.dim() == 2 else f" at {inside}" if inside else ""
    place, many = f"{column} of row {row + 1}" if len(x) > 1 else column, int(wrong.flatten(1).any(1).sum())
    some = f"; {many} of {len(x)} rows have such numbers" if many > 1 else ""
    raise DataError(
        f"{name}: {x[row, *inside].item():g}{place} is no finite number{some}: fill it in, or leave the row out"
    )


def storage_labels(y: np.ndarray | Tensor, name: str = "y") -> Tensor:
    """(n,) int64 class ids from any array of whole numbers, (n,) or (n, 1)."""
    y = _as_tensor(y, name)
    if y.dim() == 2 and y.shape[1] == 1:
        y = y.squeeze(1)
    if y.dim() != 1 or y.dtype.is_floating_point or y.dtype.is_complex or y.dtype == torch.bool:
        raise DataError(f"{name}: labels must be one whole number per sample, got {y.dtype} of shape {tuple(y.shape)}")
    return y.to(torch.int64)


def _storage_dtype(x: Tensor, name: str) -> torch.dtype:
    if x.dtype == torch.uint8 and x.dim() == 4:
        return torch.uint8
    if x.dtype.is_floating_point or x.dtype == torch.uint8:
        return torch.float32
    if x.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        return torch.int64
    raise DataError(f"{name}: samples of type {x.dtype} are not supported; allowed: uint8, signed integers, floats")


def _as_tensor(array: np.ndarray | Tensor, name: str) -> Tensor:
    if isinstance(array, Tensor):
        return array.detach()
    array = np.asarray(array)
    # torch needs native byte order, positive strides and memory that it may write to.
    array = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
    try:
        return torch.from_numpy(array)
    except TypeError as problem:
        raise DataError(f"{name}: arrays of type {array.dtype} are not supported") from problem


def _check_pair(name: str, part: str, x: Tensor, y: Tensor) -> None:
    if len(x) != len(y):
        raise DataError(f"{name}: {len(x)} {part} samples but {len(y)} {part} labels")
    if len(x) == 0:
        few = "; a fifth is held out where a set has no test part, which takes 3 samples" if part == "test" else ""
        raise DataError(f"{name}: the {part} part is empty{few}")


def _check_classes(name: str, part: str, y: Tensor, classes: int) -> None:
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"{name}: {part} labels run from {low} to {high}, allowed: 0 to {classes - 1}; if they are numbers to "
            "predict, stream.label_kind = 'regression'"
        )


def trained(source: Source) -> Source:
    """The source. Raises DataError for classes of its test part that its train part lacks."""
    if source.targets != CLASSES:
        return source
    labels, counts = source.y_test.unique(return_counts=True)
    known = set(source.y_train.unique().tolist())
    missing = [(y, n) for y, n in zip(labels.tolist(), counts.tolist(), strict=True) if y not in known]
    if missing:
        listed = ", ".join(f"{source.class_names[y]!r} ({n})" for y, n in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise DataError(
            f"{source.name}: the test part has classes (samples) that the train part lacks, so that nothing can learn "
            f"them: {listed}{more}. Add samples to the train part, or remove these from the test part"
        )
    return source


def _check_alike(name: str, train: Tensor, test: Tensor) -> None:
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        raise DataError(
            f"{name}: train samples are {train.dtype} {tuple(train.shape[1:])}, "
            f"test samples {test.dtype} {tuple(test.shape[1:])}; they must be alike"
        )
