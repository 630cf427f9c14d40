"""What a reproduction writes: tables, one line, CSV and JSON."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from everfed.reproduction import writing
from everfed.reproduction.judging import differences, judge
from everfed.reproduction.listing import overview
from everfed.reproduction.planning import Experiment
from everfed.reproduction.tables import find
from everfed.reproduction.writing import Found
from tests.reproduction.made import accuracy, cell

TABLE = find("fedgp/table1")


def found(scale: float = 1.0, problems: tuple[str, ...] = ()) -> Found:
    """DER as printed, DER+FedGP five points too low but above DER, and a method that is missing."""
    cells = [cell("DER", 40.0, 1.0), cell("DER+FedGP", 50.0), cell("Ideal", 90.0, missing="method ideal is not here")]
    runs = {
        Experiment("recipe", "DER"): {0: accuracy(0.40), 1: accuracy(0.42)},
        Experiment("recipe", "DER+FedGP"): {0: accuracy(0.45), 1: accuracy(0.45)},
    }
    judged = judge(cells, runs, scale < 1)
    return Found(TABLE, scale, judged, differences(TABLE, judged), problems)


def test_the_tables() -> None:
    columns, lines = writing.cells(found())
    assert columns == ["Data", "Method", "Ours", "Paper", "Difference", "Runs", "Verdict"]
    assert lines == [
        ["MNIST", "DER", "41.00 ± 1.00", "40.00 ± 1", "+1.00", "2", "reproduced"],
        ["MNIST", "DER+FedGP", "45.00 ± 0.00", "50.00", "-5.00", "2", "not reproduced"],
    ]
    _, paired = writing.paired(found())
    assert paired == [["MNIST K=10 Acc_T", "DER+FedGP - DER", "+4.00 [-8.71, +16.71]", "+10.00", "agrees"]]
    _, missing = writing.missing(found().judged)
    assert missing == [["method ideal is not here", "1", "Ideal", "MNIST"]]


def test_the_line() -> None:
    assert writing.summary(found()) == (
        "1 of 2 judged cells reproduced; 1 of 1 claimed differences have the paper's sign; 1 of 3 cells missing"
    )
    scaled = writing.summary(found(scale=0.1, problems=("run: diverged",)))
    assert scaled == "scaled run: not comparable (--scale 0.1); 1 of 3 cells missing; 1 runs failed"


def test_the_files(tmp_path: Path) -> None:
    paths = writing.write(tmp_path / "new", found())
    assert [path.name for path in paths] == ["fedgp-table1.json", "fedgp-table1.md", "fedgp-table1.csv"]
    data = json.loads(paths[0].read_text())
    assert data["comparable"] and [one["verdict"] for one in data["cells"]][:2] == ["reproduced", "not reproduced"]
    assert data["differences"][0]["ours"]["count"] == 2
    text = paths[1].read_text()
    assert "## Missing" in text and "method ideal is not here" in text and "max(2 (deviation" in text
    with open(paths[2], newline="") as file:
        rows = list(csv.DictReader(file))
    assert (rows[1]["method"], float(rows[1]["difference"])) == ("DER+FedGP", -5.0)


def test_the_list_counts_runs_and_samples() -> None:
    (row,) = overview("fedgp/table5", lambda recipe: [0, 1], 1.0)
    assert (row.cells, row.runnable, row.runs, row.missing) == (66, 66, 88, {})
    mnist, cifar10, cifar100 = 12e6, 5e6, 5e6  # of one run; ideal trains on (T + 1) / 2 times as many
    assert row.samples == 2 * (2 * mnist * (10 + 5.5) + cifar10 * (10 + 3) + cifar100 * (10 + 5.5))
    (drawing,) = overview("fedgp/fig2", lambda recipe: [0], 1.0)
    assert drawing.line()[-2].startswith("nothing to run: a drawing")
    (copied,) = overview("fedssi/table7-scalability", lambda recipe: [0], 1.0)
    assert copied.not_judged == {"the printed numbers repeat Table 2 digit by digit": 20}
    assert "repeat Table 2 digit by digit (20)" in copied.line()[-1]
    assert len(overview("", lambda recipe: [0], 1.0)) >= 50
