"""Tables against numbers worked out by hand, in every format."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from everfed.metrics.statistics import Spread
from everfed.reports import tables
from everfed.reports.groups import SeedGroup, grouped
from everfed.reports.html import render
from everfed.reports.read import read_runs
from everfed.reports.tables import Column, ReportTable, cell_text, to_csv, to_html, to_latex, to_markdown
from tests.reports.folders import create, finished, log, phase, result, start


@pytest.fixture
def groups(tmp_path: Path) -> tuple[SeedGroup, ...]:
    """fedavg: Acc 0.65 and 0.55; der: Acc 0.8, one seed, and another that is not finished."""
    finished(tmp_path / "a", "fedavg", 0, matrix=[[0.8, None], [0.6, 0.7]])
    finished(tmp_path / "b", "fedavg", 1, matrix=[[0.6, None], [0.2, 0.9]])
    finished(tmp_path / "c", "der", 0, matrix=[[0.9, None], [0.8, 0.8]])
    log(create(tmp_path / "d", "der", 1), [start("der", 1), phase(0, trained=3)])
    return grouped(read_runs([tmp_path])).groups


def test_comparison_by_hand(groups: tuple[SeedGroup, ...]) -> None:
    text = to_markdown(tables.comparison(groups)).splitlines()
    assert text[2].split("|")[1:4] == [" Method ", " Seeds ", " Acc, %     "]
    # best first; forgetting of fedavg: 0.2 and 0.4; bwt is its negative
    assert [cell.strip() for cell in text[4].split("|")[1:-1]] == [
        *("der", "1/2", "**80.00**", "**10.00**", "**-10.00**", "**85.00**", "**85.00**"),
    ]
    assert [cell.strip() for cell in text[5].split("|")[1:-1]] == [
        *("fedavg", "2/2", "60.0 ± 5.0", "30 ± 10", "-30 ± 10", "75.00 ± 0.00", "65.0 ± 7.5"),
    ]


def test_a_metric_that_one_seed_lacks_has_no_column(tmp_path: Path) -> None:
    for seed, metrics in enumerate(({"acc": 0.5, "bwt": -0.1}, {"acc": 0.7, "bwt": None})):
        create(tmp_path / str(seed), seed=seed).write_result(result(seed=seed, metrics=metrics))
    table = tables.comparison(grouped(read_runs([tmp_path])).groups)
    assert [column.heading for column in table.columns] == ["Method", "Seeds", "Acc"]
    assert table.rows == (("fedavg", "2/2", Spread(pytest.approx(0.6), pytest.approx(0.1), 2)),)


def test_csv_has_full_precision_and_deviations_apart(groups: tuple[SeedGroup, ...]) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(tables.comparison(groups)))))
    assert [row["method"] for row in rows] == ["der", "fedavg"]
    assert float(rows[1]["acc_mean"]) == pytest.approx(0.6, abs=1e-12)
    assert float(rows[1]["acc_deviation"]) == pytest.approx(0.05, abs=1e-12)
    assert rows[1]["acc_seeds"] == "2" and rows[0]["acc_seeds"] == "1"


def test_latex(groups: tuple[SeedGroup, ...]) -> None:
    text = to_latex(tables.comparison(groups))
    assert r"\begin{tabular}{llrrrrr}" in text
    assert r"fedavg & 2/2 & $60.0 \pm 5.0$ & $30 \pm 10$" in text
    assert r"der & 1/2 & \textbf{\boldmath $80.00$}" in text
    assert text.count(r"\\") == 3 and r"\bottomrule" in text


def test_cost_by_hand(groups: tuple[SeedGroup, ...]) -> None:
    text = to_markdown(tables.cost(groups))
    assert "| fedavg | 6      | 4.0 s | 600 B    | 1.2 kB     | 64 B         | 5.0 MB      | 96      |" in text


def test_bytes_by_part(groups: tuple[SeedGroup, ...]) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(tables.bytes_by_part(groups)))))
    found = {(row["method"], row["part"]): (row["bytes_up_mean"], row["bytes_down_mean"]) for row in rows}
    assert found[("fedavg", "fedgp")] == ("200.0", "300.0")


def test_accuracy_matrices(groups: tuple[SeedGroup, ...]) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(tables.accuracy_matrices(groups)))))
    (row,) = (row for row in rows if row["method"] == "fedavg" and row["after_task"] == "2")
    assert float(row["task_1_mean"]) == pytest.approx(0.4) and float(row["task_1_deviation"]) == pytest.approx(0.2)
    (first,) = (row for row in rows if row["method"] == "fedavg" and row["after_task"] == "1")
    assert first["task_2_mean"] == ""


def test_runs_and_their_state(groups: tuple[SeedGroup, ...]) -> None:
    table = tables.runs([run for group in groups for run in group.runs])
    (unfinished,) = (row for row in table.rows if row[0] == "d")
    assert unfinished == ("d", "der", "1", "unfinished at round 1 of 6", None, 0.0, 1.0)


def test_diverged_is_said_where_a_score_is_missing(tmp_path: Path) -> None:
    """In the table of methods, in that of runs, in the legend and in place of the matrix."""
    finished(tmp_path / "a", "der", 0)
    log(create(tmp_path / "b", "si", 0), [start("si"), phase(0), {"event": "fault", "message": "Diverged: the loss"}])
    found = read_runs([tmp_path])
    groups = grouped(found).groups
    assert tables.comparison(groups).rows[1][:3] == ("si", "0/1, 1 diverged", "diverged")
    (row,) = (row for row in tables.runs(found).rows if row[1] == "si")
    assert row[3:5] == ("diverged at round 1 of 6", "diverged")
    page = render(found)
    assert "si (diverged)" in page and "Diverged before a task ended." in page


def test_differences_to_the_best_by_hand(tmp_path: Path) -> None:
    """der: 80 and 60, fedavg: 70 and 40 with these seeds: -10 and -20, so -15 with t(0.975, 1) = 12.706 times 5."""
    for method, seed, last in (
        ("der", 0, 0.8),
        ("der", 1, 0.6),
        ("fedavg", 0, 0.7),
        ("fedavg", 1, 0.4),
        ("er", 7, 0.1),
    ):
        finished(tmp_path / f"{method}-{seed}", method, seed, matrix=[[last]])
    table = tables.paired(grouped(read_runs([tmp_path])).groups)
    assert table.title == "Acc less that of the best method, der"
    ((label, shared, *numbers),) = table.rows  # er shares no seed
    assert (label, shared) == ("fedavg", "2")
    assert numbers == [pytest.approx(v, abs=1e-4) for v in (-0.15, -0.15 - 12.7062 * 0.05, -0.15 + 12.7062 * 0.05)]


def test_task_il_accuracy_is_shown_where_it_is_another_one(tmp_path: Path) -> None:
    folder = finished(tmp_path / "a")
    other = {"accuracy_matrix": [[0.9, None], [0.9, 0.9]], "metrics": {"acc": 0.9}}
    folder.write_result(result(by_logits={"task": other}))
    table = tables.comparison(grouped(read_runs([tmp_path])).groups)
    (i,) = (i for i, column in enumerate(table.columns) if column.heading == "Acc task-IL")
    assert table.rows[0][i] == Spread(0.9, 0.0, 1)


def test_other_metrics_are_shown_where_there_is_no_known_one(tmp_path: Path) -> None:
    folder = create(tmp_path / "a")
    metrics = {"recall": 31.5, "rcp": None}
    folder.write_result(result(score="recall", accuracy_matrix=[[31.5]], metrics=metrics, by_logits={}))
    table = tables.comparison(grouped(read_runs([tmp_path])).groups)
    assert [column.heading for column in table.columns] == ["Method", "Seeds", "recall"]
    assert cell_text(table.rows[0][2], "plain") == "31.50"


def test_no_finished_run(tmp_path: Path) -> None:
    create(tmp_path / "a")
    groups = grouped(read_runs([tmp_path])).groups
    for table in (tables.comparison(groups), tables.cost(groups), tables.bytes_by_part(groups)):
        assert to_markdown(table) and to_csv(table) and to_latex(table) and to_html(table)
    assert tables.comparison(groups).rows == (("fedavg", "0/1"),)


def test_every_format_escapes_what_it_must() -> None:
    table = ReportTable("t", "T", (Column("A_b"), Column("N", "percent")), (("x|y_z & 50% <b>{}\\", 0.5),))
    assert r"x\|y\_z & 50% <b>{}\\" in to_markdown(table)
    assert r"x|y\_z \& 50\% <b>\{\}\textbackslash{} & $50.00$ \\" in to_latex(table)
    assert "x|y_z &amp; 50% &lt;b&gt;{}\\" in to_html(table)
    assert next(csv.reader(io.StringIO(to_csv(table).splitlines()[1])))[0] == "x|y_z & 50% <b>{}\\"


def test_nothing_is_best_where_there_is_one_row_or_no_better() -> None:
    assert ReportTable("t", "T", (Column("N", "plain", 1),), ((1.0,), (None,))).best(0) == set()
    assert ReportTable("t", "T", (Column("N", "plain", 0),), ((1.0,), (2.0,))).best(0) == set()
    assert ReportTable("t", "T", (Column("N", "plain", -1),), ((1.0,), (2.0,), (1.0,))).best(0) == {0, 2}
