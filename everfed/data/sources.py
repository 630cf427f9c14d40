"""Finding a data set by name or path: embedded, in the data folder, a user's own files, or on the hub."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from everfed.data import published
from everfed.data.catalogue import DIGITS, KNOWN, VARIABLE, data_folder
from everfed.data.formats import Arrays, read_npz, split_arrays
from everfed.data.images import read_image_folder
from everfed.data.source import Source, make_source
from everfed.data.tables import FILE, FOLDER, read_table, warnings_about
from everfed.data.tables import SUFFIXES as TABLES
from everfed.data.texts import KNOWN as KNOWN_TEXTS
from everfed.data.texts import is_text, load_texts
from everfed.errors import DataError
from everfed.naming import nearest, places

__all__ = ["EMBEDDED", "HUB_PREFIX", "VARIABLE", "Source", "TextOptions", "data_folder", "load"]

HUB_PREFIX = "hub:"
EMBEDDED = "digits"
_DIGITS = "datasets/data/digits.csv.gz"  # below scikit-learn


@dataclass(frozen=True)
class TextOptions:
    """encoder: as in stream.encoder, None for "auto". most_train, most_test: encode at most so many texts."""

    encoder: str | None = None
    most_train: int | None = None
    most_test: int | None = None


def load(
    name_or_path: str | Path,
    data_dir: str | Path | None = None,
    texts: TextOptions | None = None,
    *,
    image_size: int | None = None,
    label: str | None = None,
    label_kind: str | None = None,
    aside: Collection[str] = (),
) -> Source:
    """The data set of that name. texts: how a set of texts becomes vectors. image_size: pixels a side that the
    images of a folder are resized to. label: the column of a table that has the labels. label_kind: of a user's own
    npz or table, as in `make_source`. aside: columns that say whose a sample is, or when it came, and are no features:
    of a table or of the hub; "file" and "folder" of a folder that has a table, or a folder of images, for every site.

    `digits` is embedded; `hub:<dataset>` comes from the Hugging Face hub; the named sets come from the data folder
    (`data_dir`, else the environment variable EVERFED_DATA); anything else is a user's own npz, table (CSV,
    parquet) or image folder, as a path or as a name in the data folder. A set that is not there is a DataError.
    """
    name = str(name_or_path)
    if name == EMBEDDED:
        return _digits()
    if name.startswith(HUB_PREFIX):
        from everfed.data.hub import load_hub

        return load_hub(name.removeprefix(HUB_PREFIX), aside)
    folder = data_folder(data_dir)
    if is_text(name, folder):
        return _load_texts(name, folder, texts or TextOptions())
    if name in KNOWN:
        return _load_known(name, folder)
    if name in published.KNOWN:
        source: Source = published.KNOWN[name].load(name, folder)[0]
        return source
    return _load_own(name, folder, image_size, label, label_kind, aside)


def _load_texts(name: str, folder: Path | None, options: TextOptions) -> Source:
    from everfed.data.encoders import encoded, make_encoder

    texts = load_texts(name, folder).thinned(options.most_train, options.most_test)
    return encoded(texts, make_encoder(options.encoder, folder))


def _digits() -> Source:
    """1,797 handwritten digits of 8x8 pixels; the grey levels 0..16 become 0..255."""
    images, labels = _digits_file()
    arrays = split_arrays(np.rint(images * (255 / 16)).astype(np.uint8), labels)
    return make_source(EMBEDDED, *arrays[:4], class_names=DIGITS, origin="scikit-learn (embedded)")


@cache  # parsing the text takes as long as a round of a small run, and a comparison has many runs
def _digits_file() -> tuple[np.ndarray, np.ndarray]:
    """(n, 8, 8) grey levels and (n,) labels of scikit-learn's file, read-only. The package is not imported for it:
    that takes longer than a small run; where a version has the file elsewhere, the package reads it."""
    package = find_spec("sklearn")
    folders = (package.submodule_search_locations if package else None) or []
    path = next((found for folder in folders if (found := Path(folder, _DIGITS)).exists()), None)
    if path is not None:
        rows = np.loadtxt(path, delimiter=",", dtype=np.int64)
    else:
        from sklearn.datasets import load_digits

        rows = np.column_stack(load_digits(return_X_y=True)).astype(np.int64)
    rows.flags.writeable = False
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1]


def _load_known(name: str, folder: Path | None) -> Source:
    known = KNOWN[name]
    arrays, files = known.load(name, folder)
    return _from_arrays(
        name, arrays._replace(class_names=arrays.class_names or known.class_names), files[0], known.classes
    )


def _load_own(
    name: str,
    folder: Path | None,
    image_size: int | None,
    label: str | None,
    label_kind: str | None,
    aside: Collection[str],
) -> Source:
    found = places(name, folder, *(f"{name}{suffix}" for suffix in (".npz", *TABLES)))
    for place in found:
        if place.is_file() and place.suffix == ".npz":
            return _from_arrays(place.stem, read_npz(place), place, label_kind=label_kind)
        if place.is_file() and place.suffix in TABLES:
            return _from_arrays(place.stem, read_table(place, label, aside), place, label_kind=label_kind)
        if place.is_dir() and (site := next((one for one in (FILE, FOLDER) if one in aside), None)):
            arrays = read_sites(place, site, label, image_size, aside)
            return _from_arrays(place.name, arrays, place, label_kind=label_kind)
        if place.is_dir():
            return _from_arrays(place.name, read_image_folder(place, image_size), place)
    known = (EMBEDDED, *KNOWN, *published.KNOWN, *KNOWN_TEXTS)
    raise DataError(
        f"data set {name!r} was not found. Looked for an npz file, a table ({', '.join(TABLES)}) or image folder at "
        f"{', '.join(map(str, found[:2]))}.{nearest(name, known)} `everfed list datasets` shows all of them"
    )


def _from_arrays(
    name: str, arrays: Arrays, path: Path, classes: int | None = None, label_kind: str | None = None
) -> Source:
    names, origin = arrays.class_names, str(path.absolute())
    try:
        more: dict[str, Any] = {"classes": classes, "label_kind": label_kind, "columns": arrays.columns}
        source = make_source(name, *arrays[:4], class_names=names, origin=origin, **more)
        return replace(source, warnings=warnings_about(arrays))
    except DataError as problem:
        raise DataError(f"{path}: {problem}") from problem


# a folder of sites ---------------------------------------------------------------------------------------------------
def read_sites(root: Path, column: str, label: str | None, size: int | None, aside: Collection[str]) -> Arrays:
    """All sites below `root`, in the order of their names. column: FILE for <site>.csv, else <site>/<class>/*."""
    if column == FILE:
        files = sorted(path for path in root.iterdir() if path.suffix in TABLES)
        parts = {path.stem: read_table(path, label, set(aside) - {FILE}) for path in files}
    else:
        folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        parts = {path.name: read_image_folder(path, size) for path in folders}
    if not parts:
        what = f"tables ({', '.join(TABLES)})" if column == FILE else "folders with class folders of images"
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
