"""When a client's code fails, or the process it runs in: the run says which client, in which phase, and resumes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.faults.small import outcome, prepare, resume_command, run_command
from tests.support.child import Ended, Fate, events, everfed, running, state_of, until

PART = '''\
"""A part that fails on client 2 in round 5, while there is a file that says how."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from everfed.method import Part, Phase


@dataclass(frozen=True)
class Fragile(Part):
    name = "fragile"

    def phases(self):
        return (Phase("look", run=self.look),)

    def look(self, client):
        self.fail("look", client)
        return {}

    def receive(self, client):
        self.fail("train", client)

    def fail(self, phase, client):
        if (client.id, client.round) != (2, 5):
            return
        if Path(f"raise-{phase}").exists():
            raise ValueError("a mistake of mine")
        if Path(f"kill-{phase}").exists():
            os.kill(os.getpid(), signal.SIGKILL)
'''
FRAGILE = 'method={ parts = ["fedavg", "memory", "er", "fragile_part:Fragile"], memory = { size = 10 } }'
PROCESSES = ("engine.kind=processes", "engine.workers=2")
MIDDLE = Fate(halts_at=7, kind="phase")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("whole")
    assert everfed(fragile(folder), *run_command("whole", "fedavg", FRAGILE)).code == 0
    return outcome(folder / "whole")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return fragile(tmp_path)


def fragile(folder: Path) -> Path:
    (folder / "fragile_part.py").write_text(PART)
    return prepare(folder)


def failed(ended: Ended, work: Path, message: str) -> None:
    """Exit code 1; the last words and the last event say what happened."""
    assert ended.code == 1, (ended.code, ended.stderr)
    assert re.search(message, ended.stderr.splitlines()[-1]), ended.stderr
    last = events(work / "mine")[-1]
    assert last["event"] == "fault" and re.search(message, last["message"])


def goes_on(work: Path, whole: dict[str, object]) -> None:
    """From its checkpoint, not from the beginning, to the same bits."""
    ended = everfed(work, *resume_command("mine"))
    assert ended.code == 0, ended.stderr
    resumed = [event["round"] for event in events(work / "mine") if event["event"] == "resume"]
    assert resumed and resumed[-1] >= 4, "the first task's end was saved"
    assert outcome(work / "mine") == whole


@pytest.mark.parametrize("phase", ["train", "look"])
@pytest.mark.parametrize("engine", [("engine.kind=eager",), PROCESSES], ids=["eager", "processes"])
def test_a_mistake_in_a_users_part(work: Path, whole: dict[str, object], phase: str, engine: tuple[str, ...]) -> None:
    (work / f"raise-{phase}").touch()
    ended = everfed(work, *run_command("mine", "fedavg", FRAGILE, *engine))
    failed(ended, work, rf"client 2 failed in phase '{phase}' of round 6: .*a mistake of mine")
    (work / f"raise-{phase}").unlink()
    goes_on(work, whole)


@pytest.mark.parametrize("phase", ["train", "look"])
def test_a_worker_that_dies(work: Path, whole: dict[str, object], phase: str) -> None:
    (work / f"kill-{phase}").touch()
    ended = everfed(work, *run_command("mine", "fedavg", FRAGILE, *PROCESSES))
    failed(ended, work, rf"client 2 failed in phase '{phase}' of round 6: worker process \d+ was killed by signal 9")
    (work / f"kill-{phase}").unlink()
    goes_on(work, whole)


def test_a_worker_that_is_killed_from_outside(work: Path) -> None:
    """While it waits for a client; above, one dies that is busy with one."""
    with running(work, *run_command("mine", "fedgp+der", *PROCESSES), fate=MIDDLE) as child:
        os.kill(child.workers()[0], signal.SIGKILL)
        child.go_on()
        ended = child.wait()
    failed(ended, work, r"client \d failed in phase '\w+' of round \d+: worker process \d+ was killed by signal 9")


def test_no_worker_outlives_its_run(work: Path) -> None:
    with running(work, *run_command("mine", "fedgp+der", *PROCESSES), fate=MIDDLE) as child:
        workers = child.workers()
        assert len(workers) == 2
        child.kill()
        child.wait()
        for pid in workers:
            until(lambda: state_of(pid) in ("", "Z"), None)  # noqa: B023 - used at once
