"""`everfed bench` times what it says it times, tells ratios, and refuses what it cannot do. How fast is not asked."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from everfed import engines
from everfed.commands import bench
from everfed.engines import EngineError
from everfed.errors import RecipeError

TINY = """\
[stream]
dataset = "digits"
transform = "rotate"
tasks = 2
clients = 3
max_train = 90
max_test = 30

[model]
kind = "mlp"
hidden = [8]

[train]
rounds_per_task = 3
local_epochs = 2
batch_size = 16

[method]
name = "der"
memory = { size = 10 }
"""
ON_CPU = ("--set", "engine.device=cpu")


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one small recipe in it, on a machine of two cores."""
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engines, "cores", lambda: 2)
    return tmp_path


def everfed_bench(*arguments: str) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(bench.bench)
    return CliRunner().invoke(app, [*arguments, *ON_CPU])


def numbers(*arguments: str) -> dict[str, Any]:
    result = everfed_bench(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_recipe_is_timed_in_every_engine_of_the_machine() -> None:
    found = numbers("tiny.toml", "--rounds", "3", "--out", "deep/er/out.json")
    assert [(row["case"], row["engine"], row["device"]) for row in found["rows"]] == [
        ("tiny", "eager", "cpu"),
        ("tiny", "processes", "cpu"),
    ]
    eager, processes = found["rows"]
    assert eager["times_eager"] == {"median": 1.0, "q1": 1.0, "q3": 1.0}
    for row in (eager, processes):
        spread = row["round_s"]
        assert 0 < spread["q1"] <= spread["median"] <= spread["q3"]
        assert row["samples_per_s"] > 0 and row["start_s"] > 0
    assert json.loads(Path("deep/er/out.json").read_text()) == {k: v for k, v in found.items() if k != "event"}
    assert found["timed_rounds"] == 3 and found["machine"]["cores"] == 2


def test_the_table_has_a_line_for_each_engine_and_the_load() -> None:
    result = everfed_bench("tiny.toml", "--rounds", "1", "--method", "fedavg")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("| tiny")]
    assert ["eager" in lines[0], "processes" in lines[1], len(lines)] == [True, True, 2]
    assert "times eager" in result.stdout and "load average" in result.stdout
    assert Path("runs/bench.json").is_file()


def test_both_engines_run_the_same_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many samples, and the same model at the end: it is the same run twice."""
    lanes: list[bench._Lane] = []
    real = bench._row
    monkeypatch.setattr(bench, "_row", lambda case, lane, first: lanes.append(lane) or real(case, lane, first))
    numbers("tiny.toml", "--rounds", "4")
    eager, processes = lanes
    assert eager.samples == processes.samples == [90 * 2] * 4
    assert len(eager.seconds) == len(processes.seconds) == 4
    left, right = (lane.runner.state.model["params"] for lane in lanes)
    assert left.equal(right)


def test_an_engine_of_half_the_time_is_twice_as_fast() -> None:
    fast, eager = (
        SimpleNamespace(name=name, device="cpu", start=0.0, seconds=seconds, samples=[60, 60, 60])
        for name, seconds in (("processes", [1.0, 2.0, 3.0]), ("eager", [2.0, 8.0, 9.0]))
    )
    row = bench._row("demo", fast, eager)
    assert row["times_eager"] == {"median": 3.0, "q1": 2.5, "q3": 3.5}  # 2, 4 and 3 times
    assert row["samples_per_s"] == 30.0 and row["round_s"]["median"] == 2.0


def test_workers_do_not_outlive_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import multiprocessing

    numbers("tiny.toml", "--rounds", "1")
    assert not multiprocessing.active_children()


def test_built_in_cases_need_no_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.BUILT_IN, "demo", ((1, 8, 8), 6, 1, {"kind": "mlp", "hidden": [8]}))
    monkeypatch.setitem(bench.BUILT_IN, "mcmahan", ((1, 28, 28), 2, 1, {"kind": "small-cnn"}))
    found = numbers("--rounds", "1")
    assert [row["case"] for row in found["rows"]] == ["demo", "demo", "mcmahan", "mcmahan"], "ResNet-18 needs a GPU"
    found = numbers("--rounds", "1", "--cases", "demo", "--engines", "eager", "--method", "fedprox")
    assert [(row["case"], row["engine"]) for row in found["rows"]] == [("demo", "eager")]


def test_settings_of_one_case_are_not_those_of_the_next() -> None:
    before = copy.deepcopy(bench.BUILT_IN)
    table = bench._with_sets({"model": bench.BUILT_IN["demo"][3]}, ["model.hidden=[4]"])
    assert table["model"] == {"kind": "mlp", "hidden": [4]} and before == bench.BUILT_IN


def test_one_core_has_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "cores", lambda: 1)
    assert [row["engine"] for row in numbers("tiny.toml", "--rounds", "1")["rows"]] == ["eager"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("--cases", "demo,vgg"), RecipeError, "--cases vgg: allowed are demo, mcmahan, resnet18"),
        (("tiny.toml", "--engines", "ray"), RecipeError, "--engines ray: allowed are eager, processes, graphs"),
        (("tiny.toml", "--engines", "graphs"), EngineError, "needs a CUDA device"),
        (("tiny.toml", "--cases", "demo"), RecipeError, "do not go with a recipe"),
        (("tiny.toml", "--rounds", "6"), RecipeError, "tiny has 6 rounds, .* needs 7"),
        (("nothing.toml",), RecipeError, "neither a file nor a shipped recipe"),
        (("--set", "stream.clients=3"), RecipeError, "the stream of a built-in case is fixed"),
        (("--set", "name.x=3"), RecipeError, "name is not a table"),
        (("--set", "train.batch=3"), RecipeError, "train.batch"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(arguments: tuple[str, ...], error: type, message: str) -> None:
    result = everfed_bench(*arguments)
    assert isinstance(result.exception, error)
    with pytest.raises(error, match=message):
        raise result.exception
    assert not Path("runs").exists()


def test_its_help_teaches() -> None:
    text = " ".join(everfed_bench("--help").stdout.split())
    assert "everfed bench demo --method fedgp+der" in text and "times faster than" in text


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux's schedstat")
def test_what_other_threads_lose_to_a_checkpoint_is_measured_for_both_ways_of_writing(tmp_path: Path) -> None:
    from benchmarks import checkpoint_lock

    found = checkpoint_lock.main(["--turns", "1", "--scale", "0.001", "--out", str(tmp_path / "found.json")])
    assert found["megabytes"] == pytest.approx(0.19, abs=0.01)
    assert all(len(found[way]["waited_s"]) == 1 and found[way]["took_s"][0] > 0 for way in ("chunks", "safetensors"))
    assert (tmp_path / "found.json").exists()
