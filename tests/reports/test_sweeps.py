"""Pictures of a sweep: shares by hand, and a line for every cell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everfed.reports import sweeps
from everfed.reports.charts import PieceColours
from everfed.reports.groups import grouped
from everfed.reports.html import render
from everfed.reports.read import read_runs
from tests.reports.folders import finished


def test_shares_by_hand() -> None:
    """Scores 1, 2, 5, 6 on a grid of two by two: whole 17, between the rates 16, between the sizes 1."""
    scores = [1.0, 2.0, 5.0, 6.0]
    assert sweeps.explained([0.1, 0.1, 0.2, 0.2], scores) == pytest.approx(16 / 17)
    assert sweeps.explained(["a", "b", "a", "b"], scores) == pytest.approx(1 / 17)
    assert sweeps.explained([1, 2, 1, 2], [3.0] * 4) == 0.0


def test_numbers_that_never_repeat_are_put_into_thirds() -> None:
    """Six different rates explain everything; in thirds they explain what lies between 1.5, 3.5 and 5.5: 16 of 17.5."""
    assert sweeps.explained([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [1.0, 2, 3, 4, 5, 6]) == pytest.approx(16 / 17.5)


def test_a_line_for_every_cell_with_a_score(tmp_path: Path) -> None:
    for size in (5, 50, 500):
        for rate in (0.1, 0.2):
            matrix = [[0.5, None], [rate + size / 1000, 0.5]]
            options = {"memory": {"size": size}}
            finished(
                tmp_path / f"{size}-{rate}", "der", parts=options, train={"optimizer": {"lr": rate}}, matrix=matrix
            )
    groups = grouped(read_runs([tmp_path])).groups
    coordinates, importance = sweeps.figures(groups, PieceColours())
    assert coordinates.count("<polyline") == 6
    first = re.search(r'<polyline[^>]*points="([^"]*)"', coordinates)
    assert first is not None and first[1] == "0,1000 500,1000 1000,1000"  # the worst cell: least size, rate and score
    assert re.findall(r'scope="row">([^<]*)<', importance) == ["memory.size", "lr"]
    assert "Options and score: der" in render(read_runs([tmp_path]))


def test_two_cells_and_other_methods_are_no_sweep(tmp_path: Path) -> None:
    for size in (5, 50):
        finished(tmp_path / str(size), "der", parts={"memory": {"size": size}})
    finished(tmp_path / "a", "fedavg")
    assert sweeps.figures(grouped(read_runs([tmp_path])).groups, PieceColours()) == []
