"""The tables of REPRODUCIBILITY.md are those of the records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everfed.cli import app
from everfed.errors import UserError
from everfed.reproduction import records
from everfed.reproduction.page import renewed
from everfed.reproduction.records import FOLDER
from tests.reproduction.test_records import made

ROOT = Path(__file__).parents[2]
PAGE = "# Results\n\n<!-- records: fedgp/table1 -->\nold\n<!-- records: end -->\n\nThe end.\n"


def test_the_pages_tables_are_those_of_the_records() -> None:
    text = (ROOT / "REPRODUCIBILITY.md").read_text(encoding="utf-8")
    kept = records.read_all(ROOT / FOLDER)
    assert kept and renewed(text, kept) == text, "renew them with: everfed record --page REPRODUCIBILITY.md"


def test_every_record_is_shown_on_the_page() -> None:
    text = (ROOT / "REPRODUCIBILITY.md").read_text(encoding="utf-8")
    for record in records.read_all(ROOT / FOLDER):
        assert f"`{record['recipe']}`:" in text, f"{record['recipe']} has records, but no table of the page"


def test_a_table_is_written_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    records.write(made(accuracy=0.6802), tmp_path / "kept")
    done = CliRunner().invoke(app, ["record", "--page", str(page), "--records", str(tmp_path / "kept")])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert text.startswith("# Results\n\n<!-- records: fedgp/table1 -->\n| Data") and "old" not in text
    assert text.endswith("<!-- records: end -->\n\nThe end.\n")
    assert "| 68.02 ± 3.1 | +0.00 (± 6.20)" in text and "| 1 (5)" in text and "reproduced" in text
    assert renewed(text, records.read_all(tmp_path / "kept")) == text


def test_a_changed_number_is_noticed(tmp_path: Path) -> None:
    before, after = (renewed(PAGE, [made(accuracy=accuracy)]) for accuracy in (0.68, 0.69))
    assert before != after


def test_without_records_the_table_says_so() -> None:
    assert "<!-- records: fedgp/table1 -->\nNo records.\n<!-- records: end -->" in renewed(PAGE, [])


def test_marks_of_no_table_are_refused() -> None:
    with pytest.raises(UserError, match="there is no table 'fedgp/table0'"):
        renewed(PAGE.replace("table1", "table0"), [])
    with pytest.raises(UserError, match="no table to renew"):
        renewed("# Results\n", [])


def test_every_run_of_a_recipe_is_a_line_with_the_settings_that_differ() -> None:
    runs = [
        {**made(accuracy=0.5), "recipe": "own", "seed": seed, "settings": {"train": {"optimizer": {"lr": lr}}}}
        for seed, lr in ((0, 0.1), (1, 0.2))
    ]
    text = renewed("<!-- records: recipe:own -->\n<!-- records: end -->\n", runs)
    assert re.search(r"\| train.optimizer.lr +\| seed", text)
    assert re.search(r"\| 0.1 +\| 0 ", text) and re.search(r"\| 0.2 +\| 1 ", text) and "`own`: " in text
