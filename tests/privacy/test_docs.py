"""The table in docs/privacy.md is that of the methods themselves."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import liars
from everfed.privacy.reveals import table
from everfed.store.marked import renewed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "privacy.md"


def test_the_table_is_that_of_the_methods() -> None:
    text = PAGE.read_text()
    command = "python -m everfed.privacy.reveals docs/privacy.md"
    assert renewed(text, "methods", lambda name: table()) == text, f"renew it with: {command}"


def test_the_table_holds_what_is_known_of_some_methods() -> None:
    rows = {name.strip(" `"): row for row in table().splitlines()[2:] for name in row.split("|")[1].split(",")}
    assert rows["fedgp"].endswith("| yes |") and "`fedgp/gradient` (reference)" in rows["fedgp"]
    assert rows["coordinated"].endswith("| yes |") and rows["stamp"].endswith("| no |")
    assert "`fedomg/update`" in rows["stamp"].split("|")[3]


def test_the_tables_of_liars_are_those_that_were_measured() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "liars.json").read_text())
    assert measured["seeds"] == [0, 1, 2] and measured["rounds_per_task"] == 6
    for partition in liars.PARTITIONS:
        found = measured["accuracy"][partition]
        assert list(found) == [row.name for row in liars.ROWS] and all(
            list(by) == list(liars.LIES) for by in found.values()
        )
        assert liars.table(found) in PAGE.read_text()
