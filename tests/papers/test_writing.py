"""What a reproduction writes: tables, one line, CSV and JSON."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from everfed.experiments.papers import writing
from everfed.experiments.papers.judging import judge
from everfed.experiments.papers.overview import overview
from everfed.experiments.papers.planning import Experiment
from everfed.experiments.papers.tables import find
from everfed.experiments.papers.writing import Reproduction
from tests.papers.made import accuracy, cell

TABLE = find("fedgp/table1")


def found(problems: tuple[str, ...] = ()) -> Reproduction:
    """DER as printed, DER+FedGP ten points too low but surely above DER, and a method that is missing."""
    cells = [
        cell("DER", 40.0, 1.0),
        cell("DER+FedGP", 55.0, 1.0, baseline="DER", claimed=15.0),
        cell("FedAvg", None),
        cell("Ideal", 90.0, missing="method ideal is not here"),
    ]
    runs = {
        Experiment("recipe", "DER"): {seed: accuracy(value) for seed, value in enumerate((0.39, 0.40, 0.41))},
        Experiment("recipe", "DER+FedGP"): {seed: accuracy(value) for seed, value in enumerate((0.43, 0.45, 0.47))},
        Experiment("recipe", "FedAvg"): {0: accuracy(0.30)},
    }
    return Reproduction(TABLE, 1.0, Path("nowhere"), judge(cells, runs), problems)


def test_the_tables() -> None:
    columns, lines = writing.cells(found().measured)
    assert columns == [
        *("Data", "Method", "Ours", "Paper", "Difference", "Level", "To the baseline", "Effect", "Seeds (paper)"),
    ]
    paired = "+5.00 [+2.52, +7.48] over DER (paper +15.00)"
    assert lines == [
        ["MNIST", "DER", "40.00 ± 0.82", "40.00 ± 1", "+0.00", "equivalent", "-", "-", "3 (5)"],
        ["MNIST", "DER+FedGP", "45.00 ± 1.63", "55.00 ± 1", "-10.00", "differs", paired, "confirmed", "3 (5)"],
        ["MNIST", "FedAvg", "30.00", "-", "-", "not judged: no number is printed", "-", "-", "1 (5)"],
    ]
    _, missing = writing.missing(found().judged)
    assert missing == [["method ideal is not here", "1", "Ideal", "MNIST"]]


def test_the_line() -> None:
    assert found(problems=("run: diverged",)).summary == (
        "2 cells judged: 1 equivalent, 1 differs, 0 unresolved; 1 of 1 effects confirmed, 0 contradicted; "
        "1 cells not judged; 1 of 4 cells missing; 1 runs failed"
    )


def test_the_files(tmp_path: Path) -> None:
    paths = found().write(tmp_path / "new")
    assert [path.name for path in paths] == ["fedgp-table1.json", "fedgp-table1.md", "fedgp-table1.csv"]
    data = json.loads(paths[0].read_text())
    assert [one["level"] for one in data["cells"]][:3] == ["equivalent", "differs", None]
    assert data["cells"][1]["effect"]["ours"]["count"] == 3 and data["cells"][1]["paper_seeds"] == 5
    text = paths[1].read_text()
    assert "## Missing" in text and "method ideal is not here" in text and "Holm's correction" in text
    with open(paths[2], newline="") as file:
        rows = list(csv.DictReader(file))
    assert (rows[1]["method"], float(rows[1]["difference"]), rows[1]["level"]) == ("DER+FedGP", -10.0, "differs")
    assert (rows[1]["baseline"], float(rows[1]["to_baseline"]), rows[1]["effect"]) == ("DER", 5.0, "confirmed")
    assert rows[0]["baseline"] == ""


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
