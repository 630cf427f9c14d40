"""Tables by client: first rounds of tasks, rounds of availability, latencies.

They are given in a recipe, {client: entry}, or in a file: JSON with the same table, or CSV with a header and one row
per fact. Clients are counted from 0, as in a run's events; clients that are not named have the default.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everfed.naming import file_named
from everfed.streams.options import OptionError

Flatten = Callable[[Any], Iterable[Sequence[Any]]]  # a JSON entry -> its rows, as CSV would have them


@dataclass(frozen=True)
class Fact:
    """What a table says of a client. key, place: its option and its place there, for error messages."""

    key: str
    place: str
    client: int
    cells: tuple[Any, ...]

    def refuse(self, problem: str) -> OptionError:
        return OptionError(self.key, f"{self.place}: {problem}")

    def whole(self, column: int) -> int:
        """The cell as a whole number of at least 0."""
        cell = self.cells[column]
        number = int(cell) if isinstance(cell, str) and cell.isdigit() else cell
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise self.refuse(f"expected a whole number of at least 0, got {cell!r}")
        return number

    def number(self, column: int) -> float:
        """The cell as a number of at least 0."""
        try:
            number = float(self.cells[column])
        except (TypeError, ValueError):
            number = -1.0
        if not 0 <= number < float("inf"):
            raise self.refuse(f"expected a number of at least 0, got {self.cells[column]!r}")
        return number


@dataclass(frozen=True)
class Form:
    """The format of a table. columns: of a CSV file, `client` first. flatten: an entry of a table {client: entry} ->
    its rows; raises TypeError or ValueError for a malformed one. example: of an entry."""

    columns: tuple[str, ...]
    flatten: Flatten
    example: str


def read(key: str, path: str, form: Form, clients: int) -> tuple[list[Fact], str]:
    """(rows of a file, a fingerprint of its content). Raises OptionError that names the line or the client."""
    file = file_named(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(key, f"{path} cannot be read: {error}") from error
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
    if file.suffix.lower() != ".json":
        return list(_csv_rows(key, path, text, form, clients)), fingerprint
    try:
        table = json.loads(text)
    except ValueError as error:
        raise OptionError(key, f"{path} is not valid JSON: {error}") from error
    return table_rows(key, table, form, clients, f"{path}, "), fingerprint


def table_rows(key: str, table: Any, form: Form, clients: int, place: str = "") -> list[Fact]:
    """The rows of a table {client: entry}."""
    if not isinstance(table, Mapping):
        raise OptionError(key, f"{place}expected a table such as {{ 3 = {form.example} }}, got {table!r}")
    rows = []
    for name, entry in table.items():
        where = f"{place}client {name}"
        client = _client(key, where, str(name), clients)
        try:
            cells = [tuple(found) for found in form.flatten(entry)]
        except (TypeError, ValueError) as error:
            raise OptionError(key, f"{where}: expected an entry such as {form.example}, got {entry!r}") from error
        if any(len(found) != len(form.columns) - 1 for found in cells):
            raise OptionError(key, f"{where}: expected an entry such as {form.example}, got {entry!r}")
        rows += [Fact(key, where, client, found) for found in cells]
    return rows


def _csv_rows(key: str, path: str, text: str, form: Form, clients: int) -> Iterator[Fact]:
    lines = csv.reader(text.splitlines())
    header = tuple(cell.strip().lower() for cell in next(lines, []))
    if header != form.columns:
        raise OptionError(key, f"{path}, line 1: expected the columns {','.join(form.columns)}, got {','.join(header)}")
    for number, line in enumerate(lines, start=2):
        cells = [cell.strip() for cell in line]
        if not any(cells):
            continue
        place = f"{path}, line {number}"
        if len(cells) != len(form.columns):
            raise OptionError(key, f"{place}: expected {len(form.columns)} cells, got {len(cells)}")
        yield Fact(key, place, _client(key, place, cells[0], clients), tuple(cells[1:]))


def _client(key: str, place: str, name: str, clients: int) -> int:
    if not name.isdigit() or int(name) >= clients:
        raise OptionError(key, f"{place}: client {name!r} is not one of 0 to {clients - 1}")
    return int(name)
