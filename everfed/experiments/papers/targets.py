"""The printed numbers of the papers, one row per cell."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from importlib import resources

FILE = "targets.csv"
# "27.6 sec", "44.6 MB": a number and its unit. Anything else, such as "1.2*T" or "N/A", is no number to compare with.
_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)(?: (sec|MB|GB))?")
_FACTORS = {"GB": 1024.0}  # sizes are kept in MB, which here means MiB: 44.6 MB is ResNet-18 with 1000 classes


@dataclass(frozen=True)
class Target:
    """A printed cell. value, std: in the paper's unit (points, MB, s); None where there is no single number.
    text: the value as it is printed."""

    paper: str
    table: str
    dataset: str
    setting: str
    method: str
    metric: str
    value: float | None
    std: float | None
    text: str


def read() -> tuple[Target, ...]:
    """Every target, in the order of the file."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    return tuple(_target(row) for row in csv.DictReader(io.StringIO(text)))


def _target(row: dict[str, str]) -> Target:
    names = {key: row[key] for key in ("paper", "table", "dataset", "setting", "method", "metric")}
    return Target(**names, value=number(row["value"]), std=number(row["std"]), text=row["value"])


def number(text: str) -> float | None:
    """The number that a cell prints, None where it prints none."""
    found = _NUMBER.fullmatch(text.strip())
    return float(found[1]) * _FACTORS.get(found[2], 1.0) if found else None
