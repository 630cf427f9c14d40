"""What a client keeps of earlier runs: a few, by the order in which they went on, and always the one at hand."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from everfed.federation import request as wire
from everfed.federation.client import ClientRuntime, Identity, RealClient
from everfed.federation.joining import Joining, children
from everfed.federation.packet import Packet
from everfed.federation.request import Answer
from everfed.federation.runs import Runs
from everfed.federation.superlink import Settings
from tests.federation.loop import federated, loop_of, runtime
from tests.support.toy import Bench, Toy

BENCH = Bench("fedgp+der", stream=Toy(clients=1, tasks=1, rounds_per_task=1, samples=4))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Packet:
    """The first request of a run."""
    loop = loop_of(BENCH, tmp_path_factory.mktemp("first"))
    federated(BENCH, loop)
    return loop.sent[0][1]


def site(folder: Path, keep: int) -> RealClient:
    return RealClient(folder, Identity("site-0", 0), lambda recipe, scale: runtime(BENCH), keep)


def answer_to(made: RealClient, request: Packet, run: str) -> Answer:
    return Answer.of(made.answer(Packet({**request.header, "run": run}, request.pieces)))


def remembered(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob("*/steps")}


def test_the_runs_that_went_on_last_are_kept(tmp_path: Path, first: Packet, caplog: pytest.LogCaptureFixture) -> None:
    made = site(tmp_path, keep=2)
    answers = {run: answer_to(made, first, run) for run in ("a", "b", "c", "d", "e")}
    assert {answer.kind for answer in answers.values()} == {wire.REPLY}
    assert remembered(tmp_path) == {"c", "d", "e"}
    assert [record.args[0] for record in caplog.records if "was removed" in record.msg] == ["a", "b"]  # type: ignore[index]
    assert answer_to(made, first, "c").replies == answers["c"].replies  # from its journal; and now it is the newest
    made = site(tmp_path, keep=2)  # the order outlives the process
    answer_to(made, first, "f")
    assert remembered(tmp_path) == {"e", "c", "f"}


def test_none_but_the_one_at_hand_may_be_kept(tmp_path: Path, first: Packet) -> None:
    made = site(tmp_path, keep=0)
    for run in ("a", "b", "a"):
        assert answer_to(made, first, run).kind == wire.REPLY
        assert remembered(tmp_path) == {run}


def test_a_run_that_makes_no_step_forgets_nothing(tmp_path: Path, first: Packet) -> None:
    """What is refused, or lacks its recipe, is no reason to drop what others left."""
    made = site(tmp_path, keep=0)
    answer_to(made, first, "a")
    for run in ("b", "c", "d"):
        lacking = Packet({**first.header, "run": run}, {})
        assert Answer.of(made.answer(lacking)).kind == wire.MISSING
    assert "a" in remembered(tmp_path)
    answer_to(made, first, "a")
    assert answer_to(site(tmp_path, 0), first, "a").kind == wire.REPLY
    assert remembered(tmp_path) == {"a"}


def test_nothing_else_in_the_folder_is_touched(tmp_path: Path, first: Packet) -> None:
    (tmp_path / "flwr" / "apps").mkdir(parents=True)
    (tmp_path / "my-own" / "steps").mkdir(parents=True)  # no run has such a name
    (tmp_path / "worker.log").write_text("said")
    made = site(tmp_path, keep=0)
    for run in ("a", "b"):
        answer_to(made, first, run)
    own = {"runs.json", "privacy.jsonl", "b"}
    assert {path.name for path in tmp_path.iterdir()} == {"flwr", "my-own", "worker.log", *own}


def test_a_run_with_the_name_of_another_folder_is_refused(tmp_path: Path, first: Packet) -> None:
    """As a run, `flwr` was pruned after a few others, and the SuperNode's folder with it."""
    made = site(tmp_path, keep=0)
    for name in ("flwr", "audit", "ledger"):
        answer = answer_to(made, first, name)
        assert answer.kind == wire.REFUSED and "not a run's identity" in answer.reason
        assert not (tmp_path / name).exists()


def test_a_kill_while_a_run_is_removed_leaves_nothing_behind(
    tmp_path: Path, first: Packet, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = site(tmp_path, keep=0)
    answer_to(made, first, "a")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path: os.truncate(path / "recipe.toml", 0))
        answer_to(made, first, "b")
    assert remembered(tmp_path) == {".gone.a", "b"}
    assert answer_to(site(tmp_path, keep=0), first, "b").kind == wire.REPLY
    assert remembered(tmp_path) == {"b"}


def test_a_run_that_cannot_be_removed_fails_no_step(
    tmp_path: Path, first: Packet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(source: Path, target: Path) -> None:
        raise PermissionError("not yours")

    made = site(tmp_path, keep=0)
    answer_to(made, first, "a")
    with monkeypatch.context() as patch:
        patch.setattr("everfed.federation.runs.os.rename", denied)
        assert answer_to(made, first, "b").kind == wire.REPLY
    assert "run a cannot be removed: not yours" in caplog.text
    answer_to(site(tmp_path, keep=0), first, "b")
    assert remembered(tmp_path) == {"b"}


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1, null]", b'["../x", "a"]', b"\xff"])
def test_a_damaged_order_says_nothing(damage: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    (tmp_path / "x" / "steps").mkdir(parents=True)
    for run in ("a", "b", "c"):
        (folder / run / "steps").mkdir(parents=True)
    (folder / "runs.json").write_bytes(damage)
    Runs(folder, keep=1).mark_active("b")
    assert len(remembered(folder)) == 2 and "b" in remembered(folder)
    assert remembered(tmp_path) == {"x"}


def test_the_option_reaches_the_worker(tmp_path: Path) -> None:
    (worker, *_) = children(Joining("127.0.0.1:1", tmp_path, "site-0", keep_runs=7))
    assert worker.command[worker.command.index("--keep-runs") + 1] == "7"


def test_children_import_nothing_from_the_folder_that_they_are_started_in(tmp_path: Path) -> None:
    """A file that a server had written there would run with the next start of the client."""
    (tmp_path / "argparse.py").write_text(f"open({str(tmp_path / 'taken')!r}, 'w').close()\n")
    link = Settings("127.0.0.1", 1, tmp_path).command()
    for command in (*(one.command for one in children(Joining("127.0.0.1:1", tmp_path, "site-0"))), link):
        start = command[: command.index("-m") + 2]
        assert start[-1].startswith("everfed.federation.")
        subprocess.run([*start, "--help"], cwd=tmp_path, capture_output=True, check=True)
        assert not (tmp_path / "taken").exists(), start


def test_another_scale_is_another_runtime_and_the_same_one_is_reused(tmp_path: Path, first: Packet) -> None:
    """Scale shortens the training and takes part of the data: a run at full scale is not made with a quarter."""
    built, closed = [], []

    def build(recipe: str, scale: float) -> ClientRuntime:
        made = runtime(BENCH)
        made.engine.close = lambda: closed.append(scale)  # type: ignore[method-assign]
        built.append(scale)
        return made

    made = RealClient(tmp_path, Identity("site-0", 0), build)
    for run, scale in enumerate((0.25, 0.25, 1.0, 0.25)):
        request = Packet({**first.header, "scale": scale}, first.pieces)
        assert answer_to(made, request, f"a{run}").kind == wire.REPLY
    assert built == [0.25, 1.0, 0.25] and closed == [0.25, 1.0]
