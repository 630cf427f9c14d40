"""What the benchmark of whole tables makes of the events of runs."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu_rounds
from benchmarks import gpu_table as table


def phase(time: float, task: int, index: int) -> dict[str, Any]:
    return {"event": "phase", "phase": "train", "time": time, "task": task, "round": index}


EVENTS: list[dict[str, Any]] = [
    {"event": "start", "time": 104.0, "round": 0},
    {"event": "warning", "time": 104.5, "message": ""},
    phase(110.0, 0, 0),  # 6 s
    phase(111.0, 0, 1),
    phase(112.0, 0, 2),  # the fastest of the later half
    phase(113.5, 0, 3),
    {"event": "evaluation", "time": 114.0, "task": 0, "round": 3},
    {"event": "checkpoint", "time": 114.25, "round": 4},
    phase(117.25, 1, 4),  # 3 s
    {"event": "measure", "phase": "train", "time": 118.25, "task": 1, "round": 4},  # of the same round: 4 s
    phase(120.25, 1, 5),
    phase(122.25, 1, 6),
    phase(124.25, 1, 7),
    {"event": "evaluation", "time": 125.25, "task": 1, "round": 7},
    {"event": "end", "time": 125.5},
]


def test_every_second_of_a_run_is_counted_once() -> None:
    found = table.split(EVENTS, begun=100.0, ended=127.5, full=10)
    assert found["seconds"] == {
        "start_up": 4.0,
        "warm_rounds": 4 * 1.0 + 4 * 2.0,
        "first_rounds": 5.0 + 0.5 + 2.0,
        "scoring": 1.5,
        "checkpoints": 0.25,
        "end": 2.25,
    }
    assert sum(found["seconds"].values()) == found["total_s"] == 27.5
    assert found["warm_round_s_by_task"] == [1.0, 2.0]
    assert found["first_round_s_by_task"] == [6.0, 4.0]
    assert found["total_over_warm_rounds"] == 27.5 / 12
    assert found["expected"] == {
        "rounds_per_task": 10, "total_s": 27.5 - 12.0 + 30.0, "total_over_warm_rounds": 45.5 / 30
    }  # fmt: skip


def test_rates_are_taken_while_all_runs_are_warm() -> None:
    window = table.Window(warm=2, rounds=2, limit=60.0)
    fast, slow = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [10.0 / 4, 4.0, 5.5, 7.0]
    assert table.rates_of([fast, slow[:3]], 100, window) == [100.0, None]
    assert table.rates_of([fast, slow], 300, window) == [300.0, 200.0]
    assert table.rates_of([fast, slow[:1]], 100, window) == [None, None]


def test_the_gain_is_over_the_same_work_one_run_after_the_other() -> None:
    alone = {"fedavg": 300.0, "der": 150.0}  # 300 images of each take 1 + 2 s: 200 images a second
    assert table.over_alone({"total": 230.0}, alone) == pytest.approx(1.15)
    assert table.over_alone({"total": None}, alone) is None
    assert table.over_alone({"failed": {"der": ""}}, alone) is None
    assert table.over_alone({"total": 230.0}, {**alone, "der": None}) is None


def test_a_line_that_is_being_written_is_no_event(tmp_path: Path) -> None:
    assert table.read_events(tmp_path) == []
    (tmp_path / "events.jsonl").write_text('{"event": "start"}\n{"eve')
    assert table.read_events(tmp_path) == [{"event": "start"}]


class FakeEngine:
    """Captures in rounds 1, 2 and 6 (the several steps in one graph), and looks for slots up to round 3."""

    def __init__(self) -> None:
        self.rounds = 0
        self.tuner = SimpleNamespace(searching=True)

    def round(self) -> None:
        self.rounds += 1
        self.tuner.searching = self.rounds < 3

    def describe(self) -> dict[str, int]:
        return {"captures": sum(self.rounds >= capture for capture in (1, 2, 6))}


@pytest.mark.parametrize(
    ("least", "seconds", "took", "done"),
    [
        (2, 0.0, 0.1, 5),  # three rounds without a capture, from the third on
        (5, 0.0, 0.1, 5),
        (6, 0.0, 0.1, 9),  # the sixth captures again
        (2, 2.0, 0.25, 9),
        (2, 5.0, 0.25, 20),
        (2, 0.0, 31.0, 2),  # not for ever
    ],
)
def test_warm_is_who_captures_nothing_and_has_found_its_slots(monkeypatch, least, seconds, took, done) -> None:
    def timed(work: Any) -> float:
        work()
        return took

    monkeypatch.setattr(gpu_rounds, "seconds", timed)
    engine = FakeEngine()
    assert gpu_rounds.warm_up(engine.round, engine, least, seconds) == took
    assert engine.rounds == done


def test_short_rounds_are_timed_for_a_second() -> None:
    assert [gpu_rounds.turns(5, took, 1.0) for took in (0.6, 0.2, 0.015)] == [5, 5, 67]


@pytest.mark.slow
def test_a_small_table_on_the_cpu(tmp_path: Path) -> None:
    small = ["--recipe", "demo", "--device", "cpu", "--methods", "fedavg,fedprox", "--rounds", "2", "--warm", "1"]
    small += ["--window", "1", "--set", "stream.tasks=2", "--set", 'engine.kind="eager"', "--only", "together,whole"]
    found = table.main([*small, "--out", str(tmp_path / "found.json")])
    assert sum(found["whole"]["seconds"].values()) == pytest.approx(found["whole"]["total_s"])
    assert found["whole"]["expected"]["rounds_per_task"] == 10
    assert all(rate > 0 for rate in found["together"]["alone"].values())
    assert found["together"]["processes"]["over_alone"] > 0
    assert "mps" not in found["together"]
    assert (tmp_path / "found.json").is_file()


def test_rounds_and_the_generator_at_toy_size_on_the_cpu(tmp_path: Path) -> None:
    given = ["--device", "cpu", "--toy", "--only", "rounds,generator", "--warm", "1", "--window", "1", "--steps", "1"]
    found = table.main([*given, "--out", str(tmp_path / "found.json")])
    rounds = {name: found[f"rounds {name}"] for name in table.OF_CASE}
    for name, pieces in table.OF_CASE.items():
        assert list(rounds[name]) == ["fedavg", "fedgp+der", *(f"without {piece}" for piece in pieces)]
        assert rounds[name]["fedavg"]["over_fedavg"] == 1.0
        assert all(row["images_per_s"] * row["median_s"] == pytest.approx(12) for row in rounds[name].values())
    assert found["generator"].keys() == {"all pieces", "without batchnorm"}
    assert found["left_out"] == [] and (tmp_path / "found.json").is_file()


def test_one_case_alone() -> None:
    given = ["--device", "cpu", "--toy", "--warm", "1", "--window", "2", "--only", "rounds mcmahan-b32"]
    found = table.main(given)
    assert [name for name in found if name.startswith("rounds")] == ["rounds mcmahan-b32"]
    assert {row["rounds"] for row in found["rounds mcmahan-b32"].values()} == {2}
    with pytest.raises(SystemExit):
        table.main(["--only", "rounds resnet18-b31"])


def test_a_whole_run_comes_before_those_together() -> None:
    found = table.main(["--device", "cpu", "--only", "together,whole", "--minutes", "-1"])
    assert found["left_out"] == ["whole", "together"]


def test_parts_that_would_begin_too_late_are_left_out() -> None:
    found = table.main(["--device", "cpu", "--toy", "--only", "rounds,generator", "--minutes", "-1"])
    assert found["left_out"] == [*(f"rounds {name}" for name in table.OF_CASE), "generator"]


def test_a_piece_is_missing_inside_only() -> None:
    from everfed.engines import captured_steps

    before = captured_steps.OFTEN
    with pytest.raises(KeyError), table.without("several steps"):
        assert captured_steps.OFTEN > 10**9
        raise KeyError
    assert before == captured_steps.OFTEN
    assert all(hasattr(importlib.import_module(module), name) for module, name, _ in table.PIECES.values())


def test_two_versions_take_turns(tmp_path: Path) -> None:
    """This checkout against itself, on the CPU; a folder without the benchmark is refused."""
    from benchmarks import gpu_versions

    here = str(Path(gpu_versions.__file__).parents[1])
    found = gpu_versions.main([here, "--device", "cpu", "--toy", "--turns", "2", "--rounds", "3"])["rounds"]
    for version in ("before", "after"):
        assert all(found[f"{method} {version}"]["rounds"] == 6 for method in gpu_versions.METHODS)
        medians = [found[f"{method} {version}"]["median_s"] for method in gpu_versions.METHODS]
        assert found[f"ratio {version}"] == pytest.approx(medians[1] / medians[0])
    with pytest.raises(SystemExit):
        gpu_versions.main([str(tmp_path)])


def test_processes_side_by_side() -> None:
    """On the CPU; every number of them has a rate of its own."""
    from benchmarks import gpu_processes

    chosen = ["--device", "cpu", "--toy", "--numbers", "1,2", "--seconds", "0.2"]
    found = gpu_processes.main(chosen)["images_per_s"]
    assert list(found) == ["1", "2"] and all(rate > 0 for rate in found.values())
