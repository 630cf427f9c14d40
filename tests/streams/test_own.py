"""A user's own stream: periods of unknown number, new classes without notice, in a simulation and from a folder."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import everfed
from everfed.cli import app
from everfed.core import tree
from everfed.core.context import TrainOptions
from everfed.core.engine import ClientError
from everfed.core.optimizer import Optimizer
from everfed.core.stream import Stream
from everfed.engines.forking import in_fork
from everfed.errors import DataError, is_user_error
from everfed.streams import OptionError, build, from_function
from tests.parity.test_processes import on_processes
from tests.parity.test_resume import assert_resumes
from tests.support.presets import each_kind
from tests.support.toy import Bench, comparable
from tests.support.waiting import HANG

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
READ: list[tuple[int, int]] = []


def arriving(client: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Client k has k + 2 periods of 20 images; period p brings class p + 1 to those before it."""
    rng = np.random.default_rng(client)
    prototypes = np.random.default_rng(7).integers(0, 180, (6, 4, 4))
    for period in range(client + 2):
        READ.append((client, period))
        y = rng.integers(0, period + 2, 20)
        yield (prototypes[y] + rng.integers(0, 70, (20, 4, 4))).astype(np.uint8), y


def stream(**options: Any) -> Any:
    return from_function(arriving, **{"classes": 6, "clients": 3, "tasks": 4, "rounds_per_task": 2, **options})


TRAIN = TrainOptions(1, 8, Optimizer(lr=0.05))


def test_it_is_a_stream_of_unknown_length() -> None:
    own = stream()
    assert isinstance(own, Stream)
    assert (own.tasks, own.rounds, own.classes, own.input_shape) == (4, 8, 6, (1, 4, 4))
    assert [[len(own.data(client, task)) for task in range(4)] for client in range(3)] == [
        [16, 16, 0, 0],
        [16, 16, 16, 0],
        [16, 16, 16, 16],
    ]
    assert own.labels_of(2, 0) == (0, 1)
    assert own.labels_of(2, 3) == (0, 1, 2, 3, 4)
    assert own.labels_of(0, 3) == ()
    assert len(own.test_of(0, 1)) == 4


def test_nothing_is_read_but_what_is_asked_for() -> None:
    READ.clear()
    own = stream(input_shape=[1, 4, 4])
    assert READ == []
    own.round(0)
    own.data(2, 1)
    assert READ == [(2, 0), (2, 1)]


def test_a_validation_part_is_held_out_of_every_period_and_trained_on_by_nobody() -> None:
    own, whole = stream(validation=0.25), stream()
    for client, task in ((0, 0), (2, 3)):
        kept, held = own.data(client, task), own.test_of(client, task, "validation")
        assert (len(kept), len(held), len(whole.data(client, task))) == (12, 4, 16)
        parts = [kept.ids, held.ids, own.test_of(client, task).ids]
        assert len(np.unique(np.concatenate(parts))) == 20
        assert torch.equal(own.test_of(client, task).x, whole.test_of(client, task).x)
    assert len(own.test_of(0, 2, "validation")) == 0  # its stream is over
    with pytest.raises(OptionError, match="no validation split was held out"):
        whole.test_of(0, 0, "validation")


def test_a_sweep_chooses_on_the_validation_part_of_a_stream_of_ones_own(tmp_path: Path) -> None:
    keys = {"dataset": f"{__name__}:arriving", "scenario": "own", "classes": 6, "clients": 2, "tasks": 2}
    table = {"stream": keys, "method": {"name": "fedavg"}, "model": {"kind": "mlp"}, "train": {"rounds_per_task": 1}}
    found = everfed.sweep(table, {"train.optimizer.lr": [0.001, 0.1]}, out=tmp_path / "sweep", progress=False)
    facts = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert found.best and facts["split"] == "validation"
    results = [json.loads(path.read_text()) for path in (tmp_path / "sweep").rglob("result.json")]
    assert len(results) == 2 and all(result["stream"]["validation"] == 0.1 for result in results)


def test_a_forked_process_takes_no_periods_from_the_open_files_of_its_parent(tmp_path: Path) -> None:
    """A file that is open before a fork has one position for both processes."""
    path = tmp_path / "periods"
    path.write_bytes(bytes([10, 11, 12]))

    def from_file(client: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with open(path, "rb", buffering=0) as file:
            while value := file.read(1):
                yield np.full((5, 1), value[0], dtype=np.float32), np.zeros(5, dtype=np.int64)

    own = from_function(from_file, classes=2, clients=1, tasks=3, rounds_per_task=1)
    assert in_fork(lambda: own.data(0, 1).x.unique().tolist()) == [11]
    assert own.data(0, 1).x.unique().tolist() == [11]


def test_a_server_without_data_needs_the_form_of_a_sample_only() -> None:
    own = stream(input_shape=[5])
    assert (own.input_shape, own.test(0).x.dtype) == ((5,), torch.float32)
    assert stream(input_shape=[7], dtype="int64").test(0).x.dtype == torch.int64


@pytest.mark.parametrize("name", each_kind())
def test_every_method_runs_while_classes_appear_and_streams_end(name: str) -> None:
    outcome = Bench(name, stream=stream(), train=TRAIN).run()
    counts = [row for row in outcome.state.rows[3] if row is not None]
    assert [row[0] for row in counts] == [12, 12, 8, 4]  # everybody's own tests, as long as its stream lasts


@pytest.mark.parametrize("name", ["fedgp+der", "fedssi"])
def test_engines_agree_and_runs_resume(name: str) -> None:
    bench = Bench(name, stream=stream(asynchronous={"kind": "jitter"}), train=TRAIN)
    assert tree.equal(comparable(on_processes(bench).state), comparable(bench.run().state))
    assert_resumes(bench.change(stream=stream()), 3)


@pytest.mark.parametrize("run", [Bench.run, on_processes], ids=["eager", "processes"])
def test_a_class_beyond_the_head_is_the_same_clear_error_everywhere(run: Callable[[Bench], Any]) -> None:
    message = "client 0, period 2: class 2 does not fit the head, which has classes 0 to 1; set stream.classes"
    with pytest.raises(ClientError, match=message) as caught:
        run(Bench("fedavg", stream=stream(classes=2, input_shape=[1, 4, 4], clients=1), train=TRAIN))
    assert str(caught.value).startswith("client 0 failed in phase 'train' of round 3: client 0, period 2: class 2")
    assert type(caught.value.__cause__) is DataError
    assert is_user_error(caught.value)


class Refusal(everfed.UserError):
    """An error of a user's own kind."""


def refusing(client: int) -> Any:
    yield np.zeros((4, 3), dtype=np.float32), np.zeros(4, dtype=np.int64)
    raise Refusal("the folder of the second period is locked")


@pytest.mark.parametrize("run", [Bench.run, on_processes], ids=["eager", "processes"])
def test_an_error_of_the_users_own_kind_arrives_as_it_is(run: Callable[[Bench], Any]) -> None:
    own = from_function(refusing, classes=2, clients=2, tasks=2, rounds_per_task=1)
    with pytest.raises(Refusal, match="^the folder of the second period is locked$"):
        run(Bench("fedavg", stream=own, train=TRAIN, module=lambda shape, classes: torch.nn.Linear(3, classes)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": None}, "stream.classes: expected the number of classes that may ever appear"),
        ({"partition": {"kind": "shards"}}, "stream.partition: has no effect in the scenario own"),
        ({"order": [0, 1]}, "stream.order: has no effect"),
        ({"dtype": "complex64", "input_shape": [3]}, "stream.dtype: 'complex64' is not one of"),
        ({"augment": "crop-flip", "input_shape": [3]}, "stream.augment: 'crop-flip' needs images"),
        ({"test_share": 1.0}, "stream.test_share"),
    ],
)
def test_what_is_not_allowed_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        stream(**options)


def test_a_stream_without_any_period_is_refused() -> None:
    with pytest.raises(OptionError, match="none of the 2 clients has a period"):
        from_function(lambda client: [], classes=2, clients=2)
    table = {"dataset": "tests.streams.test_own:READ", "scenario": "own", "classes": 2}
    with pytest.raises(ValueError, match="is not a function"):
        build(table, 0, 1)


# the example ---------------------------------------------------------------------------------------------------------
def put(folder: Path, client: int, period: int, classes: int) -> None:
    """A file that is complete when it appears."""
    rng = np.random.default_rng([client, period])
    y = np.arange(30) % classes
    x = (np.random.default_rng(7).integers(0, 180, (12, 8, 8))[y] + rng.integers(0, 60, (30, 8, 8))).astype(np.uint8)
    target = folder / f"client-{client}" / f"{period:04d}.npz"
    target.parent.mkdir(parents=True, exist_ok=True)
    np.savez(target.with_suffix(".part.npz.tmp.npz"), x=x, y=y)
    target.with_suffix(".part.npz.tmp.npz").rename(target)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("EVERFED_FOLDER", str(tmp_path / "folder"))
    return tmp_path / "folder"


def test_the_example_reads_a_folder(folder: Path, tmp_path: Path) -> None:
    for client in range(2):
        for period in range(3 - client):  # the second client has a file less
            put(folder, client, period, classes=2 + 2 * period)
    result = everfed.run(EXAMPLES / "growing_folder.toml", tmp_path / "run")
    assert result.data["n_test"] == [12, 12, 6]
    assert result.metrics["acc"] > 0.5
    assert result.data["stream"]["dataset"] == "growing_folder:make_stream"


def test_the_example_says_what_is_wrong_with_the_folder(folder: Path, tmp_path: Path) -> None:
    run = ["run", str(EXAMPLES / "growing_folder.toml"), "--set", "engine.kind=processes", "--out"]
    outcome = CliRunner().invoke(app, [*run, str(tmp_path / "one")])
    assert (outcome.exit_code, "EVERFED_FOLDER: there is no folder" in outcome.output) == (2, True)
    put(folder, 0, 0, classes=2)
    put(folder, 1, 0, classes=2)
    (folder / "client-1" / "0001.npz").write_bytes(b"torn")
    outcome = CliRunner().invoke(app, [*run, str(tmp_path / "two")])
    assert outcome.exit_code == 2
    assert "error: " in outcome.output and "0001.npz: expected an npz with arrays x and y" in outcome.output
    assert "Traceback" not in outcome.output


def test_periods_that_nobody_has_are_no_tasks(folder: Path, tmp_path: Path) -> None:
    """A run that looks at more periods than there are says the same of those that there were."""
    for client in range(2):
        for period in range(2):
            put(folder, client, period, classes=2 + 2 * period)
    table = tomllib.loads((EXAMPLES / "growing_folder.toml").read_text())
    results = []
    for tasks in (2, 3):
        table["stream"]["tasks"] = tasks
        results.append(everfed.run(table, tmp_path / str(tasks)))
    enough, long = (result.data for result in results)
    assert (enough["n_test"], long["n_test"]) == ([12, 12], [12, 12, 0])
    assert long["accuracy_matrix"][1] == [*enough["accuracy_matrix"][1], None]
    assert long["metrics"] == enough["metrics"]
    assert enough["metrics"]["acc"] is not None and enough["metrics"]["forgetting"] is not None


def unlike(client: int) -> Any:
    """Client 1 has images of another size."""
    yield np.zeros((4, 3 + client, 3), dtype=np.uint8), np.zeros(4, dtype=np.int64)


@pytest.mark.parametrize(
    ("given", "client", "form"),
    [
        ({}, 1, r"uint8 \(1, 4, 3\), those of the stream uint8 \(1, 3, 3\)"),
        ({"input_shape": [1, 5, 5]}, 0, r"uint8 \(1, 3, 3\), those of the stream uint8 \(1, 5, 5\)"),
        ({"input_shape": [1, 3, 3], "dtype": "float32"}, 0, r"uint8 \(1, 3, 3\), those of the stream float32"),
    ],
)
def test_samples_of_another_form_are_refused(given: dict[str, Any], client: int, form: str) -> None:
    own = from_function(unlike, classes=2, clients=2, tasks=1, rounds_per_task=1, **given)
    with pytest.raises(DataError, match=f"client {client}, period 1: samples are {form}"):
        own.data(client, 0)


def nothing(client: int) -> None:
    """Forgets to return its periods."""


def without_client() -> list[Any]:
    return []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "client 0: nothing gave NoneType; expected the client's periods"),
        ("without_client", "must take a client's number, and nothing else: too many positional arguments"),
    ],
)
def test_a_function_that_is_no_stream_is_refused(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build({"dataset": f"tests.streams.test_own:{name}", "scenario": "own", "classes": 2, "clients": 1}, 0, 1)


def test_the_example_waits_for_files_that_come_while_it_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERFED_WAIT", str(HANG))
    put(folder, 0, 0, classes=2)
    own = build({"dataset": "growing_folder:make_stream", "scenario": "own", "classes": 10, "clients": 1}, 0, 1)
    assert own.labels_of(0, 0) == (0, 1)

    import growing_folder

    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            put(folder, 0, 1, classes=4)

    monkeypatch.setattr(growing_folder, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    assert own.labels_of(0, 1) == (0, 1, 2, 3)
    assert waits == [growing_folder.POLL] * 3


@pytest.mark.parametrize("engine", ["eager", "processes"])
def test_the_command_line_names_the_class_that_does_not_fit(folder: Path, tmp_path: Path, engine: str) -> None:
    put(folder, 0, 0, classes=12)
    put(folder, 1, 0, classes=2)
    run = ["run", str(EXAMPLES / "growing_folder.toml"), "--set", f"engine.kind={engine}", "--out"]
    outcome = CliRunner().invoke(app, [*run, str(tmp_path / "one")])
    assert outcome.exit_code == 2
    assert "client 0, period 1: class 11 does not fit the head" in outcome.output
    put(folder, 0, 0, classes=2)
    put(folder, 0, 1, classes=12)
    outcome = CliRunner().invoke(app, [*run, str(tmp_path / "two")])
    assert outcome.exit_code == 2
    assert "growing_folder.toml, line 8: client 0 failed in phase" in outcome.output  # where the head gets its width
    assert "round 6: client 0, period 2: class 11 does not fit the head" in outcome.output
    assert "set stream.classes to as many as may ever appear" in outcome.output
    assert "Traceback" not in outcome.output
