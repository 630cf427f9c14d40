"""A folder of sites as one set: a table each (column `file`), or a folder of images each (column `folder`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from everfed.data.errors import DataError
from everfed.data.formats import Arrays
from everfed.data.image_folder import read_image_folder
from everfed.data.tables import FILE, SUFFIXES, read_table


def read_sites(root: Path, column: str, label: str | None, size: int | None, aside: Collection[str]) -> Arrays:
    """All sites below `root`, in the order of their names. column: FILE for <site>.csv, else <site>/<class>/*."""
    if column == FILE:
        files = sorted(path for path in root.iterdir() if path.suffix in SUFFIXES)
        parts = {path.stem: read_table(path, label, set(aside) - {FILE}) for path in files}
    else:
        folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        parts = {path.name: read_image_folder(path, size) for path in folders}
    if not parts:
        what = f"tables ({', '.join(SUFFIXES)})" if column == FILE else "folders with class folders of images"
        raise DataError(f"{root}: holds no {what}, one for every site")
    first = next(iter(parts.values()))
    for name, part in parts.items():
        if part.features != first.features or part.x_train.shape[1:] != first.x_train.shape[1:]:
            ours, theirs = part.features or part.x_train.shape[1:], first.features or first.x_train.shape[1:]
            other = next(iter(parts))
            raise DataError(f"{root / name}: samples are of {_text(ours)}, those of {other} of {_text(theirs)}")
    return _joined(parts, column)


def _text(form: tuple[str | int, ...]) -> str:
    return ", ".join(map(str, form))


def _joined(parts: Mapping[str, Arrays], column: str) -> Arrays:
    """One after the other. Labels become the names of their classes, which every site numbers for itself."""
    found = list(parts.values())
    x_train, x_test = (np.concatenate([getattr(part, key) for part in found]) for key in ("x_train", "x_test"))
    y_train, y_test = (np.concatenate([_named(part, key) for part in found]) for key in ("y_train", "y_test"))
    columns = {key: _both([part.columns[key] for part in found]) for key in found[0].columns}
    sites = [(np.full(len(part.x_train), name), np.full(len(part.x_test), name)) for name, part in parts.items()]
    columns[column] = _both(sites)
    return Arrays(x_train, y_train, x_test, y_test, None, columns, found[0].features)


def _both(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([train for train, _ in pairs]), np.concatenate([test for _, test in pairs])


def _named(part: Arrays, key: str) -> np.ndarray:
    labels: np.ndarray = getattr(part, key)
    return labels if part.class_names is None else np.array(part.class_names)[labels]
