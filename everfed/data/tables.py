"""Tables of a user's own: CSV files and parquet files, a row for every sample, one column of labels."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from everfed.data.errors import DataError
from everfed.data.formats import Arrays, split_arrays

SUFFIXES = (".csv", ".tsv", ".parquet")
LABELS = ("label", "labels", "target", "class", "y")  # names of the label column, whatever their case
SPLIT, PARTS = "split", ("train", "test")  # a column that says which rows are for testing
Columns = dict[str, np.ndarray]  # text, or numbers


def read_table(path: Path, label: str | None = None) -> Arrays:
    """The numbers of a table as features, float32, and its labels: text, whole numbers, or fractions. label: the column
    of labels, else the one that is called like one of LABELS. A column `split` with train and test divides the rows;
    without it a fixed fifth of every class (or tenth of the fractions) is for testing."""
    columns = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    name = _label_column(path, columns, label)
    y = _labels(path, name, columns.pop(name))
    split = columns.pop(SPLIT, None)
    x = np.stack([_numbers(path, key, values) for key, values in columns.items()], axis=1)
    if split is None:
        return split_arrays(x, y)
    wrong = sorted(set(map(str, split)) - set(PARTS))
    if wrong:
        raise DataError(f"{path}: column {SPLIT!r} must hold {' or '.join(PARTS)}; it has {wrong[0]!r}")
    train = split.astype(str) == PARTS[0]
    return Arrays(x[train], y[train], x[~train], y[~train])


def _read_csv(path: Path) -> Columns:
    """Every column as text."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: cannot be read as text ({problem})") from problem
    first = text.partition("\n")[0]
    delimiter = max(",;\t|", key=first.count)
    names, *rows = [row for row in csv.reader(text.splitlines(), delimiter=delimiter) if row] or [[]]
    if not rows:
        raise DataError(f"{path}: a table needs a first line with the names of its columns, and rows below it")
    ragged = next((number for number, row in enumerate(rows, start=2) if len(row) != len(names)), None)
    if ragged is not None:
        raise DataError(
            f"{path}: row {ragged} has {len(rows[ragged - 2])} values where the first line has {len(names)}"
        )
    return {name.strip(): np.array(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}


def _read_parquet(path: Path) -> Columns:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as missing:
        raise DataError(
            f"{path}: reading parquet needs the package pyarrow; install it with: pip install 'everfed[tables]', or "
            "write the table as CSV"
        ) from missing
    try:
        table = parquet.read_table(path)
    except (OSError, ArrowException) as problem:
        raise DataError(f"{path}: cannot be read as parquet ({problem})") from problem
    return {name: table[name].to_numpy() for name in table.column_names}


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


def _labels(path: Path, name: str, values: np.ndarray) -> np.ndarray:
    """Whole numbers where all of them are, fractions (regression) where some are, else text."""
    words = values.astype(str)
    if (np.char.strip(words) == "").any() or (words == "None").any():
        raise DataError(f"{path}: column {name!r} has rows without a label; remove them")
    try:
        numbers = words.astype(np.float64)
    except ValueError:
        return words
    if not np.isfinite(numbers).all():
        raise DataError(f"{path}: column {name!r} holds numbers that are not finite; remove these rows")
    return numbers if (numbers != np.rint(numbers)).any() else numbers.astype(np.int64)


def _numbers(path: Path, name: str, values: np.ndarray) -> np.ndarray:
    try:
        numbers = values.astype(np.float32)
    except (TypeError, ValueError) as problem:
        raise DataError(
            f"{path}: column {name!r} holds text; features are numbers: encode it, or leave it out ({problem})"
        ) from problem
    missing = np.flatnonzero(~np.isfinite(numbers))
    if len(missing):
        raise DataError(f"{path}: column {name!r} has no number in row {missing[0] + 2}; fill it in, or remove the row")
    return numbers
