"""The table in docs/privacy-reference.md is that of the methods themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks import liars
from everfed.methods import registry as methods
from everfed.privacy.reveals import seen, table, values_sent
from everfed.store.files import marked_parts_renewed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "privacy-reference.md"


def test_the_table_is_that_of_the_methods() -> None:
    text = PAGE.read_text()
    command = "python -m everfed.privacy.reveals docs/privacy-reference.md"
    assert marked_parts_renewed(text, "methods", lambda name: table()) == text, f"renew it with: {command}"


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


def test_everything_that_a_preset_sends_is_explained_with_and_without_secure_aggregation() -> None:
    for name in methods.names():
        method = methods.build(name)
        values = {value for single in (True, False) for _, value in seen(method, single)}
        found = values_sent(method)
        assert not [text for phase in found.values() for text in phase.values() if "the method's page" in text]
        assert values <= {value for phase in found.values() for value in phase}
        end = "this method cannot run" if method.reveals() else "the sum alone"
        assert all(text.endswith(f"each client's; with secure aggregation: {end}") for text in found["train"].values())


def test_every_test_that_the_threat_model_names_is_there() -> None:
    named = re.findall(r"`((?:[a-z]+/)?test_\w+\.py)`", (ROOT / "docs" / "threat-model.md").read_text())
    tests = {path.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert len(named) > 25 and {name.rpartition("/")[2] for name in named} <= tests
