"""What a reproduction writes: tables, one line, CSV and JSON."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from everfed.experiments.papers import writing
from everfed.experiments.papers.judging import judge
from everfed.experiments.papers.listing import overview
from everfed.experiments.papers.planning import Experiment
from everfed.experiments.papers.tables import find
from everfed.experiments.papers.writing import Found
from tests.papers.made import accuracy, cell

TABLE = find("fedgp/table1")


def found(problems: tuple[str, ...] = ()) -> Found:
    """DER as printed, DER+FedGP five points too low but above DER, and a method that is missing."""
    cells = [
        cell("DER", 40.0, 1.0),
        cell("DER+FedGP", 50.0, baseline="DER", claimed=10.0),
        cell("FedAvg", None),
        cell("Ideal", 90.0, missing="method ideal is not here"),
    ]
    runs = {
        Experiment("recipe", "DER"): {0: accuracy(0.40), 1: accuracy(0.42)},
        Experiment("recipe", "DER+FedGP"): {0: accuracy(0.45), 1: accuracy(0.45)},
        Experiment("recipe", "FedAvg"): {0: accuracy(0.30)},
    }
    return Found(TABLE, 1.0, judge(cells, runs), problems)


def test_the_tables() -> None:
    columns, lines = writing.cells(found().measured)
    assert columns == [
        *("Data", "Method", "Ours", "Paper", "Difference (band)", "To the baseline", "Seeds (paper)", "Verdict"),
    ]
    paired = "+4.00 [-8.71, +16.71] over DER (paper +10.00)"
    assert lines == [
        ["MNIST", "DER", "41.00 ± 1.00", "40.00 ± 1", "+1.00 (± 4.00)", "-", "2 (5)", "reproduced"],
        ["MNIST", "DER+FedGP", "45.00 ± 0.00", "50.00", "-5.00 (± 3.00)", paired, "2 (5)", "not reproduced"],
        ["MNIST", "FedAvg", "30.00", "-", "-", "-", "1 (5)", "not judged: no number is printed"],
    ]
    _, missing = writing.missing(found().judged)
    assert missing == [["method ideal is not here", "1", "Ideal", "MNIST"]]


def test_the_line() -> None:
    assert writing.summary(found(problems=("run: diverged",))) == (
        "1 of 2 judged cells reproduced; 1 of 1 claimed differences have the paper's sign; 1 cells not judged; "
        "1 of 4 cells missing; 1 runs failed"
    )


def test_the_files(tmp_path: Path) -> None:
    paths = writing.write(tmp_path / "new", found())
    assert [path.name for path in paths] == ["fedgp-table1.json", "fedgp-table1.md", "fedgp-table1.csv"]
    data = json.loads(paths[0].read_text())
    assert [one["verdict"] for one in data["cells"]][:2] == ["reproduced", "not reproduced"]
    assert data["cells"][1]["paired"]["ours"]["count"] == 2 and data["cells"][1]["paper_seeds"] == 5
    text = paths[1].read_text()
    assert "## Missing" in text and "method ideal is not here" in text and "max(2 (deviation" in text
    with open(paths[2], newline="") as file:
        rows = list(csv.DictReader(file))
    assert (rows[1]["method"], float(rows[1]["difference"])) == ("DER+FedGP", -5.0)
    assert (rows[1]["baseline"], float(rows[1]["to_baseline"]), rows[0]["baseline"]) == ("DER", 4.0, "")


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
    (small,) = overview("stamp/table3-32px", lambda recipe: [0], 1.0)
    assert small.not_judged == {
        "data set imagenet-32, the paper's is imagenet-224; model two-conv-cnn, the paper's is swin-t": 8
    }
    assert len(overview("", lambda recipe: [0], 1.0)) >= 50
