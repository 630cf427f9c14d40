"""Every score with its own unit and direction, wherever people read it; metrics that count rounds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import everfed
from everfed.commands import output
from everfed.experiments import comparison
from everfed.experiments.jobs import Outcome
from everfed.metrics import by_task
from everfed.metrics.scores import METRICS, SCORES, score_of
from everfed.metrics.statistics import Spread
from everfed.reports import tables
from everfed.reports.dashboard import Index
from everfed.reports.figures import curve, score
from everfed.reports.groups import grouped
from everfed.reports.progress import ProgressState
from everfed.reports.read import read_run, read_runs
from everfed.reports.trackers import scalars
from tests.reports.folders import create, evaluation, finished, log, phase, result, start

PERPLEXITY = {"perplexity": 31.5, "forgetting_factor": 2.25, "rcp": None, "forgetting_factor_relative": None}


def of_text(value: float, **changes: Any) -> dict[str, Any]:
    """A result that is scored by perplexity."""
    metrics = {**PERPLEXITY, "perplexity": value}
    return result(score="perplexity", accuracy_matrix=[[value]], metrics=metrics, by_logits={}, **changes)


def outcome(row: str, data: dict[str, Any] | None) -> Any:
    return Outcome(SimpleNamespace(row=row), data)  # type: ignore[arg-type]


def compared(found: dict[str, dict[str, Any] | None]) -> tuple[list[str], list[list[str]]]:
    return comparison.table(comparison.rows([outcome(row, data) for row, data in found.items()]), "Method")


def test_a_comparison_ranks_low_perplexities_first_and_prints_them_as_they_are() -> None:
    columns, lines = compared({"a": of_text(40.0), "none": None, "b": of_text(20.0), "c": of_text(30.0)})
    assert columns == ["Method", "Runs", "Perplexity", "Forgetting factor", "Bytes up", "Time"]
    assert [line[0] for line in lines] == ["b", "c", "a", "none"]
    assert lines[0][2:4] == ["20.00", "2.25"] and lines[3][2] == "failed"


@pytest.mark.parametrize(("name", "heading", "learning"), [("accuracy", "Acc", "acc"), ("map", "mAP", "mAP")])
def test_a_comparison_ranks_high_accuracies_first_in_per_cent(name: str, heading: str, learning: str) -> None:
    low, high = (
        result(score=name, metrics={"acc": acc, "forgetting": 0.1, "learning_accuracy": 0.8}) for acc in (0.25, 0.5)
    )
    columns, lines = compared({"low": low, "high": high})
    assert columns[2:5] == [heading, "Forgetting", f"Learning {learning}"]
    assert [line[:4] for line in lines] == [
        ["high", "1/1", "50.00", "10.00"],
        ["low", "1/1", "25.00", "10.00"],
    ]


def test_the_end_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    for data in (of_text(31.5), result(metrics={"acc": 0.4535, "forgetting": 0.1})):
        output.print_result(Path("runs/a"), data, as_json=False)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "fedavg seed 0: Perplexity 31.50  Forgetting factor 2.25"
    assert said[2] == "fedavg seed 0: Acc 45.35 %  Forgetting 10.00 %"


def test_progress() -> None:
    shown = {}
    for name, value in (("accuracy", 0.453), ("map", 0.2), ("perplexity", 31.53), ("recall", 0.5)):
        state = ProgressState()
        state.update({**evaluation(0, 0, [value]), "score": name})
        shown[name] = state.facts().split(", ")[0]
    assert shown == {
        "accuracy": "acc 45.3 %",
        "map": "mAP 20.0 %",
        "perplexity": "perplexity 31.5",
        "recall": "recall 0.5",
    }


def test_a_report_ranks_low_perplexities_first(tmp_path: Path) -> None:
    for seed, (method, value) in enumerate((("fedavg", 40.0), ("er", 20.0), ("der", 30.0))):
        create(tmp_path / method, method).write_result(of_text(value, method=method, seed=seed))
    runs = read_runs([tmp_path])
    table = tables.comparison(grouped(runs).groups)
    assert [row[0] for row in table.rows] == ["er", "der", "fedavg"]
    assert [(c.heading, c.kind) for c in table.columns[2:]] == [("Perplexity", "plain"), ("Forgetting factor", "plain")]
    assert table.rows[0][2] == Spread(20.0, 0.0, 1) and table.best(2) == {0}
    assert tables.runs(runs).columns[4].heading == "Perplexity" and tables.runs(runs).rows[0][4] == 30.0


def test_a_report_of_runs_with_several_scores_has_a_column_for_each(tmp_path: Path) -> None:
    create(tmp_path / "text").write_result(of_text(40.0))
    finished(tmp_path / "images")
    table = tables.runs(read_runs([tmp_path]))
    assert [column.heading for column in table.columns[4:6]] == ["Acc", "Perplexity"]
    assert {row[0]: row[4:6] for row in table.rows} == {"text": (None, 40.0), "images": (pytest.approx(2 / 3), None)}


def test_one_plot_has_one_scale(tmp_path: Path) -> None:
    finished(tmp_path / "images", method="der")
    folder = create(tmp_path / "text", "er")
    log(folder, [start(method="er"), phase(0), {**evaluation(0, 0, [40.0]), "score": "perplexity"}])
    drawn = curve("acc", grouped(read_runs([tmp_path])).groups)
    assert "Accuracy by round" in drawn and "Not drawn: 1 with another score." in drawn
    assert 'data-line="der"' in drawn and 'data-line="er"' not in drawn
    assert "Not drawn" not in curve("loss", grouped(read_runs([tmp_path])).groups)


def test_an_unfinished_run_is_known_by_its_evaluations(tmp_path: Path) -> None:
    folder = create(tmp_path / "a")
    log(folder, [start(), phase(0), {**evaluation(0, 0, [40.0]), "score": "perplexity"}])
    run = read_run(folder.path)
    assert run.score == "perplexity" and score(grouped([run]).groups) is SCORES["perplexity"]
    assert scalars({**evaluation(0, 0, [40.0]), "score": "perplexity"})["evaluation/perplexity"] == 40.0
    index = Index(tmp_path)
    index.poll()
    shown = index.runs["a"].summary
    assert (shown["acc"], shown["score"], shown["heading"], shown["percent"]) == (
        40.0,
        "perplexity",
        "Perplexity",
        False,
    )


def test_the_dashboard_shows_the_metric_of_the_score(tmp_path: Path) -> None:
    create(tmp_path / "a").write_result(of_text(40.0))
    index = Index(tmp_path)
    index.poll()
    assert (index.runs["a"].summary["acc"], index.runs["a"].summary["forgetting"]) == (40.0, 2.25)


def test_the_table_of_scores_is_whole() -> None:
    for one in [*SCORES.values(), score_of("of one's own")]:
        assert one.main in METRICS and one.lost in METRICS and one.better in (-1, 1)
        assert METRICS[one.main].kind == one.kind or one is not SCORES.get(one.word)


# rounds to the best --------------------------------------------------------------------------------------------------
def small(every: int) -> dict[str, Any]:
    return {
        "stream": {"dataset": "digits", "scenario": "class-incremental", "tasks": 2, "clients": 2},
        "model": {"kind": "mlp", "hidden": [16]},
        "train": {"rounds_per_task": 3, "local_epochs": 1},
        "eval": {"every": every, "logits": "seen"},
        "engine": {"kind": "eager"},
        "method": {"name": "fedavg"},
    }


def test_a_run_that_is_scored_every_round_reports_its_rounds_to_the_best(tmp_path: Path) -> None:
    found = everfed.run(small(1), tmp_path / "a").data
    curves = by_task(found["curves"], 2)
    assert [len(task) for task in curves] == [3, 3]
    means = [[sum(row[: t + 1]) / (t + 1) for row in rows] for t, rows in enumerate(curves)]
    best = sum(task.index(max(task)) + 1 for task in means)
    assert found["metrics"]["rounds_to_best"] == best
    assert found["metrics"]["acc_last_rounds"] is None  # A(f) is a mean over ten rounds, which this run has not
    assert found["metrics"]["learning_accuracy_best"] == pytest.approx(
        sum(max(row[t] for row in rows) for t, rows in enumerate(curves)) / 2
    )
    assert found["by_logits"]["full"]["metrics"]["rounds_to_best"] is None  # the curve is that of eval.logits


def test_without_every_round_there_is_no_such_number(tmp_path: Path) -> None:
    assert everfed.run(small(0), tmp_path / "a").metrics["rounds_to_best"] is None


def test_rounds_to_the_best_are_in_the_tables() -> None:
    numbers = {"acc": 0.5, "rounds_to_best": 42, "acc_last_rounds": 0.25}
    columns, lines = compared({"a": result(metrics=numbers)})
    assert columns[2:5] == ["Acc", "Last rounds acc", "Rounds to best"]
    assert lines[0][2:5] == ["50.00", "25.00", "42.00"]
