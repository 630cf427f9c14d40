"""Finding a data set by name or path: embedded, in the data folder, a user's own files, or on the hub."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from everfed.data import published
from everfed.data.catalogue import DIGITS, KNOWN
from everfed.data.download import ARCHIVES
from everfed.data.errors import DataError
from everfed.data.formats import Arrays, read_npz, split_arrays
from everfed.data.image_folder import read_image_folder
from everfed.data.source import Source, make_source
from everfed.data.tables import FILE, FOLDER, read_table, warnings_about
from everfed.data.tables import SUFFIXES as TABLES
from everfed.data.texts import KNOWN as KNOWN_TEXTS
from everfed.data.texts import is_text, load_texts
from everfed.naming import nearest, places

__all__ = ["EMBEDDED", "HUB_PREFIX", "VARIABLE", "Source", "TextOptions", "data_folder", "load"]

VARIABLE = "EVERFED_DATA"
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
        return published.KNOWN[name].load(name, folder)
    return _load_own(name, folder, image_size, label, label_kind, aside)


def _load_texts(name: str, folder: Path | None, options: TextOptions) -> Source:
    from everfed.data.encoders import make_encoder
    from everfed.data.features import encoded

    texts = load_texts(name, folder).thinned(options.most_train, options.most_test)
    return encoded(texts, make_encoder(options.encoder, folder))


def data_folder(data_dir: str | Path | None = None) -> Path | None:
    """The folder that holds data sets: the argument, else EVERFED_DATA, else None."""
    chosen = data_dir or os.environ.get(VARIABLE)
    return Path(chosen).expanduser() if chosen else None


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
    if folder is None:
        raise DataError(f"data set {name!r}: no data folder is named. {_remedy(name, known.get_it)}")
    found = known.find(folder)
    if found is None:
        if not folder.is_dir():
            raise DataError(f"data set {name!r} was not found: the data folder {folder} does not exist")
        places = ", ".join(place for layout in known.layouts for place in layout.places(folder))
        raise DataError(f"data set {name!r} was not found. Looked for: {places}. {_remedy(name, known.get_it)}")
    layout, files = found
    arrays = layout.read(files)
    names = arrays.class_names or known.class_names
    return _from_arrays(name, arrays._replace(class_names=names), files[0], known.classes)


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
            from everfed.data.sites import read_sites

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


def _remedy(name: str, get_it: str) -> str:
    command = f"`everfed data get {name} --data DIR`, or get" if name in ARCHIVES else "Get"
    return f"{command} it from {get_it}; then put it into the folder that --data or {VARIABLE} names"
