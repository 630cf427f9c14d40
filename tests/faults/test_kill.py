"""Killed at any moment, as often as you like: a run that is resumed ends with the same bits."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.small import CASES, outcome, prepare, resume_command, run_command
from tests.support.child import KILLED, Ended, Fate, everfed, python_m, running, until

ENGINES = ("eager", "processes")


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each case ends with when nothing happens to it; filled when first asked for."""
    return _Wholes(prepare(tmp_path_factory.mktemp("whole")))


class _Wholes(dict[str, dict[str, Any]]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, case: str) -> dict[str, Any]:
        succeed(everfed(self.folder, *run_command(case, case, every=5.0)))
        self[case] = outcome(self.folder / case)
        return self[case]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return prepare(tmp_path)


def succeed(ended: Ended) -> Ended:
    assert ended.code == 0, ended.stderr
    return ended


def next_command(work: Path, case: str, *sets: str) -> list[str]:
    """What a user types after a kill: `resume`, or `run` again when the run folder was not even made."""
    return resume_command("mine") if (work / "mine/recipe.toml").exists() else run_command("mine", case, *sets)


def change_engine(folder: Path, kind: str) -> None:
    """A run may go on in another engine: it is the one section of its recipe that decides no number."""
    recipe = folder / "recipe.toml"
    if recipe.exists():
        recipe.write_text(re.sub(r'kind = "(eager|processes)"', f'kind = "{kind}"', recipe.read_text()))


def lives(work: Path, case: str, fates: Iterator[Fate] | list[Fate], engines: tuple[str, ...] = ("eager",)) -> int:
    """Run to the end under one fate after the other, and then undisturbed; returns how often it was killed."""
    killed = 0
    for number, fate in enumerate([*fates, Fate()]):
        engine = engines[number % len(engines)]
        change_engine(work / "mine", engine)
        ended = everfed(work, *next_command(work, case, f"engine.kind={engine}", "engine.workers=2"), fate=fate)
        assert ended.code in (0, KILLED), ended.stderr
        killed += ended.code == KILLED
    return killed


def fates(seed: str, kills: int) -> list[Fate]:
    """A whole run has a hundred file operations or more; a life is granted its share of them."""
    rng = random.Random(seed)
    return [Fate(dies_at=rng.randint(1, 50)) for _ in range(kills)]


# at file operations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_killed_at_file_operations(work: Path, wholes: dict[str, dict[str, Any]], case: str) -> None:
    assert lives(work, case, fates(case, 3)) >= 2
    assert outcome(work / "mine") == wholes[case]


@pytest.mark.parametrize("case", ["fedgp+der", "equalised"])
def test_started_in_one_engine_and_resumed_in_the_other(
    work: Path, wholes: dict[str, dict[str, Any]], case: str
) -> None:
    assert lives(work, case, fates(case, 3), ("processes", "eager")) >= 2
    assert outcome(work / "mine") == wholes[case]


@pytest.mark.parametrize("over", ["recipe.toml", "1.tmp", "checkpoint/2", "model.safetensors", "result.json"])
def test_killed_over_a_certain_file(work: Path, wholes: dict[str, dict[str, Any]], over: str) -> None:
    """Just before it gets its name."""
    assert lives(work, "fedgp+der", [Fate(dies_over=over)] * 2) >= 1
    assert outcome(work / "mine") == wholes["fedgp+der"]
    assert not [path for path in (work / "mine").rglob("*") if path.name.endswith(".tmp")]


# at moments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_killed_when_so_much_was_written(work: Path, wholes: dict[str, dict[str, Any]], engine: str) -> None:
    for lines in (1, 12, 25):
        command = next_command(work, "fedgp+der", f"engine.kind={engine}", "engine.workers=2")
        with running(work, *command, fate=Fate(halts_at=lines)):
            pass
    assert not (work / "mine/result.json").exists(), "it should have been killed in its middle"
    succeed(everfed(work, *resume_command("mine")))
    assert outcome(work / "mine") == wholes["fedgp+der"]


def test_killed_while_python_still_starts(work: Path, wholes: dict[str, dict[str, Any]]) -> None:
    """Started as a user would, killed as soon as the run folder is there and before torch is: its import hangs."""
    (work / "torch.py").write_text("import signal; signal.pause()")
    child = python_m(work, *run_command("mine", "fedgp+der"))
    until((work / "mine/recipe.toml").exists, child)
    child.kill()
    child.communicate()
    (work / "torch.py").unlink()
    assert not (work / "mine/events.jsonl").exists()
    succeed(everfed(work, *resume_command("mine")))
    assert outcome(work / "mine") == wholes["fedgp+der"]


def test_a_run_may_be_resumed_before_its_orphans_are_gone(work: Path, wholes: dict[str, dict[str, Any]]) -> None:
    """Workers outlive a killed process until they notice; they must not keep the run folder locked."""
    command = run_command("mine", "fedgp+der", "engine.kind=processes", "engine.workers=2")
    with running(work, *command, fate=Fate(halts_at=2, kind="phase")) as child:
        orphans = child.workers()
        for pid in orphans:
            os.kill(pid, signal.SIGSTOP)  # as if busy with a long training
        child.kill()
        child.wait()
        try:
            succeed(everfed(work, *resume_command("mine")))
        finally:
            for pid in orphans:
                os.kill(pid, signal.SIGCONT)
    assert len(orphans) == 2
    assert outcome(work / "mine") == wholes["fedgp+der"]


def test_a_finished_run_is_left_alone_however_it_was_finished(work: Path) -> None:
    lives(work, "fedavg", fates("left alone", 1))
    before = {path: path.stat().st_mtime_ns for path in (work / "mine").rglob("*")}
    succeed(everfed(work, *resume_command("mine")))
    assert {path: path.stat().st_mtime_ns for path in (work / "mine").rglob("*")} == before


# many -----------------------------------------------------------------------------------------------------------


def finish(work: Path, whole: dict[str, Any]) -> None:
    """A run that came to its end between two kills is compared and put aside; the next one begins."""
    if (work / "mine/result.json").exists():
        assert outcome(work / "mine") == whole
        (work / "mine").rename(work / f"finished-{time.monotonic_ns()}")


FIFTY = [*((case, ("eager",)) for case in CASES), ("equalised", ENGINES), ("fedgp+der", ("processes",))]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("case", "engines"), FIFTY)
def test_killed_fifty_times_at_file_operations(
    work: Path, wholes: dict[str, dict[str, Any]], case: str, engines: tuple[str, ...]
) -> None:
    rng, killed = random.Random(f"{case} {engines}"), 0
    while killed < 50:
        killed += lives(work, case, [Fate(dies_at=rng.randint(1, 60)) for _ in range(4)], engines)
        finish(work, wholes[case])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine", ENGINES)
def test_real_processes_killed_fifty_times_at_random_moments(
    work: Path, wholes: dict[str, dict[str, Any]], engine: str
) -> None:
    """`python -m everfed`, killed anywhere between its first millisecond and its end."""
    rng, killed = random.Random(engine), 0
    began = time.monotonic()
    first = python_m(work, *run_command("mine", "fedgp+der", f"engine.kind={engine}", "engine.workers=2"))
    assert first.wait() == 0
    longest = 1.2 * (time.monotonic() - began)
    finish(work, wholes["fedgp+der"])
    while killed < 50:
        child = python_m(work, *next_command(work, "fedgp+der", f"engine.kind={engine}", "engine.workers=2"))
        end = time.monotonic() + rng.uniform(0.0, longest)
        until(lambda: time.monotonic() > end, child)  # noqa: B023 - used at once
        child.kill()
        _, errors = child.communicate()
        assert child.returncode in (0, KILLED), errors
        killed += child.returncode == KILLED
        finish(work, wholes["fedgp+der"])
    if (work / "mine").exists():
        succeed(everfed(work, *next_command(work, "fedgp+der")))
        finish(work, wholes["fedgp+der"])
