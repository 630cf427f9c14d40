"""Tables of a user's own: CSV files and parquet files, a row for every sample, one column of labels."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from everfed.data.formats import Arrays, split_arrays
from everfed.errors import DataError, optional_package

SUFFIXES = (".csv", ".tsv", ".parquet")
LABELS = ("label", "labels", "target", "class", "y")  # names of the label column, whatever their case
FILE, FOLDER = "file", "folder"  # columns that a folder of tables, or of folders of images, has
WHOSE = ("client", "client_id", "site", "site_id", "user", "user_id", "device", "device_id", "hospital", "subject")
SPLIT, PARTS = "split", ("train", "test")  # a column that says which rows are for testing
MISSING = ("", "na", "n/a", "#n/a", "nan", "null")  # how files write that there is no value
Columns = dict[str, np.ndarray]  # text, or numbers
Where = Callable[[int], str]  # the place of a row in its file


def read_table(path: Path, label: str | None = None, aside: Collection[str] = ()) -> Arrays:
    """The numbers of a table as features, float32, and its labels: text, whole numbers, or fractions. label: the column
    of labels, else the one that is called like one of LABELS. A column `split` with train and test divides the rows;
    without it a fixed fifth of every class (or tenth of the fractions) is for testing. aside: columns that say who or
    when, which are no features."""
    columns, where = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    for key, values in columns.items():
        _require_values(path, key, values, where)
    name = _label_column(path, columns, label)
    y = _labels(path, name, columns.pop(name), where)
    split = columns.pop(SPLIT, None)
    missing = sorted(set(aside) - {FILE} - set(columns))
    if missing:
        raise DataError(f"{path}: there is no column {missing[0]!r}; it has {', '.join(columns)}")
    others = {key: numbers_or_words(columns.pop(key)) for key in aside if key in columns}
    x = np.stack([_numbers(path, key, values, where) for key, values in columns.items()], axis=1)
    if split is None:
        return split_arrays(x, y, columns=others)._replace(features=tuple(columns))
    wrong = sorted(set(map(str, split)) - set(PARTS))
    if wrong:
        raise DataError(f"{path}: column {SPLIT!r} must hold {' or '.join(PARTS)}; it has {wrong[0]!r}")
    train = split.astype(str) == PARTS[0]
    parted = {key: (values[train], values[~train]) for key, values in others.items()}
    return Arrays(x[train], y[train], x[~train], y[~train], None, parted, tuple(columns))


def warnings_about(arrays: Arrays) -> tuple[str, ...]:
    """What is probably no feature of a table: whole numbers in a column that is called like a client."""
    named = [(place, name) for place, name in enumerate(arrays.features) if name.lower() in WHOSE]
    return tuple(
        f"the column {name!r} is a feature like all others; if it says whose a sample is, set stream.partition = "
        f"{{ kind = 'column', column = '{name}' }}"
        for place, name in named
        if (arrays.x_train[:, place] == np.rint(arrays.x_train[:, place])).all()
    )


def numbers_or_words(values: np.ndarray) -> np.ndarray:
    """A column as numbers, which 9 comes before 10 in, where all of it are numbers."""
    words = values.astype(str)
    try:
        numbers = words.astype(np.float64)
    except ValueError:
        return words
    return numbers if (numbers != np.rint(numbers)).any() else numbers.astype(np.int64)


def _read_csv(path: Path) -> tuple[Columns, Where]:
    """Every column as text."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: cannot be read as text ({problem})") from problem
    first = text.partition("\n")[0]
    delimiter = max(",;\t|", key=first.count)
    reader = csv.reader(text.splitlines(keepends=True), delimiter=delimiter)
    (_, names), *rows = [(reader.line_num, row) for row in reader if row] or [(1, [])]
    if not rows:
        raise DataError(f"{path}: a table needs a first line with the names of its columns, and rows below it")
    ragged = next(((line, row) for line, row in rows if len(row) != len(names)), None)
    if ragged is not None:
        line, row = ragged
        raise DataError(f"{path}: line {line} has {len(row)} values where the first line has {len(names)}")
    columns = zip(*(row for _, row in rows), strict=True)
    table = {name.strip(): np.array(values) for name, values in zip(names, columns, strict=True)}
    return table, lambda row: f"line {rows[row][0]}"


def _read_parquet(path: Path) -> tuple[Columns, Where]:
    parquet = optional_package("pyarrow.parquet", "tables", f"{path}: parquet (CSV needs nothing)", DataError)
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError, RuntimeError, NotImplementedError) as problem:
        raise DataError(f"{path}: cannot be read as parquet ({problem})") from problem
    return {name: table[name].to_numpy() for name in table.column_names}, lambda row: f"row {row + 1}"


def _require_values(path: Path, name: str, values: np.ndarray, where: Where) -> None:
    """Raises DataError for a cell that is empty or says that nothing is known."""
    for row, value in enumerate(values.tolist() if values.dtype.kind in "UO" else ()):
        if value is None or str(value).strip().lower() in MISSING:
            what = f"says {str(value).strip()!r}" if value is not None and str(value).strip() else "is empty"
            raise DataError(f"{path}: {where(row)}: column {name!r} {what}; fill it in, or remove the row")


def _label_column(path: Path, columns: Columns, label: str | None) -> str:
    listed = ", ".join(columns)
    if label is not None:
        if label not in columns:
            raise DataError(f"{path}: stream.label = {label!r} is no column; it has {listed}")
        return label
    found = [name for name in columns if name.lower() in LABELS]
    if len(found) != 1:
        raise DataError(
            f"{path}: which column has the labels? Call it label, or set stream.label; the columns are {listed}"
        )
    return found[0]


def _labels(path: Path, name: str, values: np.ndarray, where: Where) -> np.ndarray:
    """Whole numbers where all of them are, fractions (regression) where some are, else text."""
    words = values.astype(str)
    try:
        numbers = words.astype(np.float64)
    except ValueError:
        return words
    _require_finite(path, name, numbers, where)
    return numbers if (numbers != np.rint(numbers)).any() else numbers.astype(np.int64)


def _numbers(path: Path, name: str, values: np.ndarray, where: Where) -> np.ndarray:
    try:
        numbers = values.astype(np.float32)
    except (TypeError, ValueError) as problem:
        word = next((str(value) for value in values if not _is_number(value)), "")
        raise DataError(
            f"{path}: column {name!r} holds text such as {word!r}; features are numbers: encode it, leave it out, or "
            "name it as the column of stream.partition"
        ) from problem
    _require_finite(path, name, numbers, where)
    return numbers


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _require_finite(path: Path, name: str, numbers: np.ndarray, where: Where) -> None:
    wrong = np.flatnonzero(~np.isfinite(numbers))
    if len(wrong):
        place = f"{path}: {where(wrong[0])}: column {name!r}"
        raise DataError(f"{place} has no finite number; correct it, or remove the row")
