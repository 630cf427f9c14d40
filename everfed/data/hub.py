"""Data sets of the Hugging Face hub, by name."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from everfed.data.formats import Arrays, split_arrays
from everfed.data.source import Source, make_source
from everfed.errors import DataError, optional_package
from everfed.naming import require_network

LABEL_NAMES = ("label", "labels", "fine_label", "y", "target")


def load_hub(name: str, aside: Collection[str] = ()) -> Source:
    """The set `owner/name`, or `owner/name:config`, or a folder written by `save_to_disk`.

    Samples are the image column, else the column of numbers; labels are the class-label column with most classes,
    else the one named `label`. The test part is `test`, else `validation`, else a fifth of every class of `train`;
    `origin` records which. aside: further columns, of which nothing is known but whose a sample is, or when it came.
    """
    splits = _splits(name, optional_package("datasets", "hub", f"hub:{name}", DataError))
    if "train" not in splits:
        raise DataError(f"hub:{name}: needs a split 'train'; it has {', '.join(splits)}")
    columns = sample_column(f"hub:{name}", splits["train"]), label_column(f"hub:{name}", splits["train"])
    held = next((s for s in ("test", "validation") if s in splits), None)
    train = _read(splits["train"], *columns)
    names = getattr(splits["train"].features[columns[1]], "names", None)
    others = {key: _column(name, splits["train"], key) for key in aside}
    if held:
        both = {key: (values, _column(name, splits[held], key)) for key, values in others.items()}
        arrays = Arrays(*train, *_read(splits[held], *columns), names, both)
    else:
        arrays = split_arrays(*train, names, others)
    test = f"split {held}" if held else "a fifth of split train"
    origin = f"hub:{name}, columns {columns[0]} and {columns[1]}, test part: {test}"
    return make_source(f"hub:{name}", *arrays[:4], class_names=names, origin=origin, columns=arrays.columns)


def _column(name: str, split: Any, key: str) -> np.ndarray:
    if key not in split.features:
        raise DataError(f"hub:{name}: there is no column {key!r}; it has {', '.join(split.features)}")
    return np.asarray(split[key][:])


def _splits(name: str, datasets: Any) -> Any:
    """The splits of the set, from the disk when `name` is a folder."""
    require_network(f"hub:{name}")
    if Path(name).is_dir():
        return _asked(name, datasets.load_from_disk, name)
    dataset, _, config = name.partition(":")
    return _asked(name, datasets.load_dataset, dataset, *([config] if config else []))


def _asked(name: str, load: Any, *arguments: str) -> Any:
    try:
        loaded = load(*arguments)
    except Exception as problem:  # the package raises errors of many libraries below it
        raise DataError(f"hub:{name}: could not be loaded from the Hugging Face hub ({problem})") from problem
    return loaded if isinstance(loaded, dict) else {"train": loaded}


def sample_column(name: str, split: Any) -> str:
    """The column of images, else of numbers."""
    features = split.features
    images = [c for c, kind in features.items() if type(kind).__name__ == "Image"]
    numbers = [c for c, kind in features.items() if type(kind).__name__.startswith(("List", "Sequence", "Array"))]
    if not images and not numbers:
        raise DataError(f"{name}: has no column of images or of numbers; it has {', '.join(features)}")
    return str((images or numbers)[0])


def label_column(name: str, split: Any) -> str:
    """The class-label column with most classes, else the one with a usual name."""
    features = split.features
    classes = {c: kind.num_classes for c, kind in features.items() if type(kind).__name__ == "ClassLabel"}
    if classes:
        return str(max(classes, key=lambda c: classes[c]))
    named = [c for c in LABEL_NAMES if c in features]
    if not named:
        raise DataError(f"{name}: has no label column; allowed: a class label, or one of {', '.join(LABEL_NAMES)}")
    return named[0]


def _read(split: Any, sample: str, label: str) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) as arrays; images are decoded one by one into place."""
    y = np.asarray(split[label][:], dtype=np.int64)
    if type(split.features[sample]).__name__ != "Image":
        return np.asarray(split.with_format("numpy")[sample][:]), y
    return _images(split, sample), y


def _images(split: Any, sample: str) -> np.ndarray:
    """(n, height, width[, 3]) uint8; grey only when the first image is."""
    first = split[0][sample]
    mode = "L" if first.mode in ("1", "L") else "RGB"
    x = np.empty((len(split), *np.asarray(first.convert(mode)).shape), np.uint8)
    for row, slot in zip(split.select_columns([sample]), x, strict=True):
        if row[sample].size != first.size:
            raise DataError(f"images of {row[sample].size} and {first.size} pixels in one set; they must have one size")
        slot[...] = np.asarray(row[sample].convert(mode))
    return x
