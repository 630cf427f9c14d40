"""The numbers behind the figures, against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everfed.reports import charts, series
from everfed.reports.groups import grouped
from everfed.reports.read import LoggedRun, read_run, read_runs
from tests.reports.folders import create, evaluation, finished, log, phase, result, start, whole

Values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400)


@given(Values, st.integers(4, 60))
def test_a_thinned_curve_keeps_its_ends_and_its_extremes(values: list[float], limit: int) -> None:
    kept = series.thin(values, limit)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(limit, 4)
    assert {0, len(values) - 1} <= set(kept)
    shown = [values[i] for i in kept]
    assert (min(shown), max(shown)) == (min(values), max(values))


@given(Values)
def test_a_short_curve_is_not_thinned(values: list[float]) -> None:
    assert series.thin(values, len(values)) == list(range(len(values)))


def test_a_spike_of_one_round_in_ten_thousand_survives() -> None:
    values = [0.0] * 10_000
    values[7_777] = 1.0
    assert 7_777 in series.thin(values)


def test_curves_of_one_run(tmp_path: Path) -> None:
    run = read_run(finished(tmp_path / "a").path)
    assert series.score_by_round(run) == pytest.approx({2: 0.8, 4: 0.65, 6: 2.0 / 3})
    assert series.acc_by_task(run) == pytest.approx({1: 0.8, 2: 0.65, 3: 2.0 / 3})
    # after task 2: 0.8 - 0.6; after task 3: ((0.8 - 0.5) + (0.7 - 0.6)) / 2
    assert series.forgetting_by_task(run) == pytest.approx({2: 0.2, 3: 0.2})
    assert series.loss_by_round(run) == pytest.approx({n: 1 / n for n in range(1, 7)})
    assert series.bytes_by_round(run) == {n: 300 * n for n in range(1, 7)}


def test_perplexities_are_averaged_and_have_no_forgetting(tmp_path: Path) -> None:
    folder = create(tmp_path / "a")
    folder.write_result(result(score="perplexity", accuracy_matrix=[[40.0, None], [60.0, 20.0]], metrics={}))
    run = read_run(folder.path)
    assert series.acc_by_task(run) == {1: 40.0, 2: 40.0}
    assert series.forgetting_by_task(run) == {}


def two_seeds(folder: Path) -> list[LoggedRun]:
    finished(folder / "a", seed=0, matrix=[[0.8, None], [0.6, 0.7]])
    finished(folder / "b", seed=1, matrix=[[0.6, None], [0.2, 0.9]])
    return read_runs([folder])


def test_mean_and_population_deviation_over_seeds(tmp_path: Path) -> None:
    (line,) = series.mean_lines(grouped(two_seeds(tmp_path)).groups, series.acc_by_task)
    # task 1: 0.8 and 0.6; task 2: 0.65 and 0.55
    assert line.y == pytest.approx((0.7, 0.6))
    assert line.low == pytest.approx((0.6, 0.55)) and line.high == pytest.approx((0.8, 0.65))
    assert line.seeds == 2


def test_a_mean_goes_as_far_as_every_seed_has_come(tmp_path: Path) -> None:
    finished(tmp_path / "a", seed=0)
    log(create(tmp_path / "b", seed=1), [start(), phase(0), phase(1), evaluation(1, 0, [0.4])])
    groups = grouped(read_runs([tmp_path])).groups
    (line,) = series.mean_lines(groups, series.acc_by_task)
    assert line.x == (1,) and line.y == pytest.approx((0.6,))
    assert [run.x for run in series.run_lines(groups, series.acc_by_task)] == [(1, 2, 3), (1,)]


def test_the_mean_matrix(tmp_path: Path) -> None:
    entries = series.mean_matrix(two_seeds(tmp_path))
    assert entries[0][1] is None
    assert entries[1][0] == pytest.approx((0.4, 0.2)) and entries[1][1] == pytest.approx((0.8, 0.1))


def test_an_entry_that_one_seed_lacks_has_no_mean(tmp_path: Path) -> None:
    """A mean over the other seeds would compare methods on different seeds."""
    finished(tmp_path / "a", seed=0, matrix=[[0.8, 0.3], [0.6, 0.7]])
    finished(tmp_path / "b", seed=1, matrix=[[0.6, None], [0.2, 0.9]])
    entries = series.mean_matrix(read_runs([tmp_path]))
    assert entries[0][1] is None and entries[0][0] == pytest.approx((0.7, 0.1))


def test_tasks_begin_where_the_rounds_say(tmp_path: Path) -> None:
    runs = [read_run(finished(tmp_path / "a").path)]
    assert series.boundaries(runs) == [(1, 1), (2, 3), (3, 5)]
    folder = create(tmp_path / "b")
    log(folder, whole(per_task=3))
    assert series.boundaries([*runs, read_run(folder.path)]) == []


def test_participation_by_task(tmp_path: Path) -> None:
    folder = create(tmp_path / "a")
    log(folder, [start(rounds=3), phase(0, 0, clients=[0, 2]), phase(1, 1, clients=[3], tasks=[2]), phase(2, 1)])
    grid = series.participation(read_run(folder.path), 4)
    assert grid is not None
    assert grid.cells == ((1, None, 2), (None, None, 2), (1, None, 2), (None, 3, 2))


def test_a_large_grid_is_gathered(tmp_path: Path) -> None:
    folder = create(tmp_path / "a")
    rounds, clients = 3 * series.BINS, 2 * series.ROWS
    log(folder, [start(rounds=rounds, clients=clients), *(phase(i, clients=[i % clients]) for i in range(rounds))])
    grid = series.participation(read_run(folder.path), clients)
    assert grid is not None
    assert (len(grid.cells), len(grid.cells[0])) == (series.ROWS, series.BINS)
    assert (grid.clients_per_row, grid.rounds_per_column) == (2, 3)
    # rounds 0, 1, 2 are clients 0, 1, 2, which are rows 0, 0, 1
    assert [row[0] for row in grid.cells[:3]] == [1, 1, None]


def test_cohorts_that_are_only_counted_have_no_grid(tmp_path: Path) -> None:
    folder = create(tmp_path / "a")
    log(folder, [start(), phase(0, clients=500)])
    assert series.participation(read_run(folder.path), 500) is None


def test_class_mix(tmp_path: Path) -> None:
    (mix,) = series.class_mixes(read_run(finished(tmp_path / "a").path))
    assert mix.labels == (0, 1) and mix.counts[1] == (0, 7) and mix.tasks == (1, 2, 3)


def test_costs_are_means_over_finished_seeds(tmp_path: Path) -> None:
    finished(tmp_path / "a", seed=0)
    folder = finished(tmp_path / "b", seed=1)
    cost = {**folder.read_result()["cost"], "bytes_by_part": {"fedavg": {"up": 200, "down": 100}}, "seconds": 8.0}
    folder.write_result(result(seed=1, cost=cost))
    create(tmp_path / "c", seed=2)
    (group,) = grouped(read_runs([tmp_path])).groups
    assert series.bytes_by_part(group, "up") == {"fedavg": 300, "fedgp": 100}
    assert series.mean_cost(group, "seconds") == 6.0
    # six rounds of half a second in both, the rest is something else: 1 and 5 seconds
    assert series.seconds_by_phase(group) == {"train": 3.0, "other": 3.0}


def test_smoothing_is_a_moving_average_without_a_pull_to_zero() -> None:
    """Weight 1/2: 4; (4/4 + 2/2) / (3/4) = 8/3; the same for the band."""
    line = series.Line("a", 0, (1, 2), (4.0, 2.0), (2.0, 2.0), (6.0, 2.0), 2)
    drawn = series.smoothed(line, 0.5)
    assert drawn.y == pytest.approx((4.0, 8 / 3)) and drawn.low == pytest.approx((2.0, 2.0))
    assert drawn.high == pytest.approx((6.0, 10 / 3)) and series.smoothed(line, 0.0) is line


def test_a_mean_over_seeds_of_different_lengths_says_so(tmp_path: Path) -> None:
    log(create(tmp_path / "a", seed=0), [start(seed=0), *(phase(i) for i in range(4))])
    log(create(tmp_path / "b", seed=1), [start(seed=1), *(phase(i) for i in range(2))])
    (line,) = series.mean_lines(grouped(read_runs([tmp_path])).groups, series.loss_by_round)
    assert line.x == (1, 2) and line.seeds == 2 and line.note == "up to the shortest"
    assert "up to the shortest" in charts.legend([line])
