"""Disks that are full, folders that cannot be written, files that are damaged or belong to something else: a clear
message, exit code 2, nothing overwritten, and a run that goes on once things are put right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.small import outcome, prepare, resume_command, run_command
from tests.support.child import Child, Ended, Fate, events, everfed, running

CASE = "fedgp+der"
WIDE = "model.hidden=[100]"  # a checkpoint of 30 kB, more than the event log ever has
MIDDLE = Fate(halts_at=14, kind="phase", settled=True)  # the second of four tasks has begun, and a checkpoint is there


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, `whole`, and the same one killed in its middle, `mine`. Tests work on copies."""
    folder = prepare(tmp_path_factory.mktemp("stopped"))
    assert everfed(folder, *run_command("whole", CASE, WIDE, every=5.0)).code == 0
    with running(folder, *run_command("mine", CASE, WIDE), fate=MIDDLE):
        pass
    assert not (folder / "mine/result.json").exists()
    return folder


@pytest.fixture
def work(stopped: Path, tmp_path: Path) -> Path:
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    return tmp_path


def refused(ended: Ended, *words: str) -> None:
    """Exit code 2 and one line that says all of `words`."""
    assert ended.code == 2, (ended.code, ended.stderr)
    assert ended.stderr.startswith("error: ") and len(ended.stderr.splitlines()) == 1, ended.stderr
    for word in words:
        assert word in ended.stderr


def content(folder: Path) -> dict[str, bytes]:
    """Every file but the log, to which a fault may be added, and what a killed process had not finished."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    passing = ("events.jsonl", ".lock", ".tmp")
    return {name: path.read_bytes() for name, path in files.items() if not any(word in name for word in passing)}


def goes_on(work: Path, run: str = "mine") -> None:
    """To the same bits as the run that was never stopped."""
    ended = everfed(work, *resume_command(run))
    assert ended.code == 0, ended.stderr
    assert outcome(work / run) == outcome(work / "whole")


# a full disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(work: Path) -> Iterator[Path]:
    """A disk of 1 MiB, mounted below `work`."""
    disk = work / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root and mount(8), to mount a small disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all the space there is left."""
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return ballast


def test_a_disk_that_becomes_full(work: Path, small_disk: Path) -> None:
    with running(work, *run_command("disk/mine", CASE, WIDE), fate=MIDDLE) as child:
        ballast = fill(small_disk)
        child.go_on()
        refused(child.wait(), "cannot write", "disk/mine", "No space left on device", "everfed resume")
    refused(everfed(work, *resume_command("disk/mine")), "cannot write", "disk/mine", "No space left on device")
    ballast.unlink()
    goes_on(work, "disk/mine")


def test_a_disk_that_is_full_from_the_start(work: Path, small_disk: Path) -> None:
    (small_disk / "mine").mkdir()
    ballast = fill(small_disk)
    refused(everfed(work, *run_command("disk/mine", CASE, WIDE)), "cannot write", "disk/mine", "No space left")
    assert not list((small_disk / "mine").iterdir()), "nothing is left behind"
    ballast.unlink()


def test_a_checkpoint_that_does_not_fit_any_more(work: Path) -> None:
    """Files of more than 20 kB are refused: the log goes on, the checkpoint does not."""
    before = content(work / "mine/checkpoint")
    ended = everfed(work, *resume_command("mine"), fate=Fate(file_limit=20_000))
    refused(ended, "cannot write a checkpoint to mine/checkpoint", "File too large", "last good checkpoint is kept")
    assert content(work / "mine/checkpoint") == before
    assert events(work / "mine")[-1]["event"] == "fault"
    goes_on(work)


def test_a_log_that_cannot_grow_any_more(work: Path) -> None:
    before = content(work / "mine/checkpoint")
    size = (work / "mine/events.jsonl").stat().st_size
    ended = everfed(work, *resume_command("mine"), fate=Fate(file_limit=size + 30))
    refused(ended, "cannot write the run folder mine: File too large", "everfed resume")
    assert content(work / "mine/checkpoint") == before
    goes_on(work)


@pytest.mark.parametrize("engine", ["eager", "processes"])
def test_a_client_state_that_cannot_be_paged_out(work: Path, engine: str) -> None:
    """Every client's state is more than the memory it is granted, and more than fits the disk."""
    command = run_command("paged", "paged", WIDE, f"engine.kind={engine}", "engine.workers=2")
    ended = everfed(work, *command, fate=Fate(file_limit=1500))
    refused(ended, "cannot write the run folder paged: File too large")
    goes_on(work, "paged")


def test_a_model_that_does_not_fit_at_the_end(work: Path) -> None:
    """Everything was computed; only the result could not be written."""
    assert everfed(work, *resume_command("mine"), fate=Fate(dies_over="model.safetensors")).code < 0
    ended = everfed(work, *resume_command("mine", every=5.0), fate=Fate(file_limit=20_000))
    refused(ended, "cannot write the run folder mine: File too large")
    assert not (work / "mine/model.safetensors").exists()
    goes_on(work)


# damage ----------------------------------------------------------------------------------------------------------


def flip(data: bytes) -> bytes:
    """One bit, far from the header: the last but some bytes are numbers."""
    return data[:-50] + bytes([data[-50] ^ 16]) + data[-49:]


DAMAGE = {
    "truncated": ("checkpoint/*/run.safetensors", lambda data: data[: len(data) // 2]),
    "bit-flipped": ("checkpoint/*/run.safetensors", flip),
    "client truncated": ("clients/1.*", lambda data: data[: len(data) // 2]),
    "client bit-flipped": ("clients/1.*", flip),
    "client missing": ("clients/1.*", None),
    "list missing": ("checkpoint/*/clients.json", None),
    "list bit-flipped": ("checkpoint/*/clients.json", flip),
    "server missing": ("checkpoint/*/run.safetensors", None),
}


def newest(run: Path, pattern: str) -> Path:
    """Of the files like that, the one that the newest checkpoint names."""
    number = max(int(path.name) for path in (run / "checkpoint").iterdir() if path.name.isdecimal())
    if pattern.startswith("checkpoint"):
        return run / pattern.replace("*", str(number))
    manifest = json.loads((run / f"checkpoint/{number}/clients.json").read_text())
    version = json.loads(manifest["content"])["clients"]["1"][0]
    return run / f"clients/1.{version}.safetensors"


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint(work: Path, damage: str) -> None:
    pattern, spoil = DAMAGE[damage]
    path = newest(work / "mine", pattern)
    data = path.read_bytes()
    path.unlink() if spoil is None else path.write_bytes(spoil(data))
    before = content(work / "mine")
    refused(
        everfed(work, *resume_command("mine")), "checkpoint mine/checkpoint/", "cannot be read", "nothing was changed"
    )
    assert content(work / "mine") == before
    if damage == "truncated":  # of the others it follows: the same files are there again
        path.write_bytes(data)
        goes_on(work)


@pytest.mark.parametrize("name", ["result.json", "settings.json"])
@pytest.mark.parametrize("text", ["{", "[]", "\xff"], ids=["half", "a list", "no text"])
def test_a_malformed_file(work: Path, name: str, text: str) -> None:
    (work / "mine" / name).write_bytes(text.encode("latin-1"))
    before = content(work / "mine")
    refused(everfed(work, *resume_command("mine")), f"mine/{name}")
    assert content(work / "mine") == before


def test_a_result_that_is_not_one(work: Path) -> None:
    (work / "mine/result.json").write_text("{}")
    refused(everfed(work, *resume_command("mine")), "mine/result.json is not a result", "Remove that file")
    (work / "mine/result.json").unlink()
    goes_on(work)


def test_half_a_line_of_the_log(work: Path) -> None:
    with open(work / "mine/events.jsonl", "ab") as file:
        file.write(b'{"time": 17, "event": "pha')
    before = len(events(work / "mine"))
    goes_on(work)
    lines = [json.loads(line) for line in (work / "mine/events.jsonl").read_text().splitlines()]
    assert lines[before]["event"] == "resume"


# belonging -------------------------------------------------------------------------------------------------------


def test_a_folder_of_another_recipe(work: Path) -> None:
    before = content(work / "mine")
    other = everfed(work, *run_command("mine", CASE, WIDE, "train.local_epochs=2"))
    refused(other, "mine belongs to another recipe", "nothing was overwritten")
    refused(everfed(work, *run_command("mine", CASE, WIDE)), "unfinished run of this recipe", "everfed resume mine")
    assert content(work / "mine") == before
    goes_on(work)


def test_a_folder_with_something_else_in_it(work: Path) -> None:
    (work / "thesis").mkdir()
    (work / "thesis/chapter.txt").write_text("one")
    refused(everfed(work, *run_command("thesis", CASE)), "--out thesis is not empty and not a run; name a new folder")
    assert [path.name for path in (work / "thesis").iterdir()] == ["chapter.txt"]


@pytest.mark.parametrize(("old", "new"), [("lr = 0.1", "lr = 0.2"), ("100", "50"), ("seed = 0", "seed = 1")])
def test_a_recipe_that_was_changed_after_the_run_began(work: Path, old: str, new: str) -> None:
    recipe = work / "mine/recipe.toml"
    text = recipe.read_text()
    recipe.write_text(text.replace(old, new))
    assert recipe.read_text() != text
    before = content(work / "mine")
    refused(everfed(work, *resume_command("mine")), "checkpoint mine/checkpoint/", "belongs to another recipe")
    assert content(work / "mine") == before


def test_two_processes_on_one_folder(work: Path) -> None:
    with running(work, *run_command("held", CASE, WIDE), fate=Fate(halts_at=1)) as child:
        refused(everfed(work, *resume_command("held")), "held is being run by another process")
        assert child.alive()


def test_two_processes_that_start_at_once(work: Path) -> None:
    """One of them has the folder; the other says so and leaves it alone."""
    children = [Child(work, *run_command("both", CASE, WIDE)) for _ in range(2)]
    winner, loser = sorted((child.wait() for child in children), key=lambda ended: ended.code)
    assert winner.code == 0, winner.stderr
    refused(loser, "both")
    assert outcome(work / "both") == outcome(work / "whole")


# read-only -------------------------------------------------------------------------------------------------------


@pytest.fixture
def read_only(work: Path) -> Iterator[Path]:
    """`work` with everything below it read-only: for root by a mount, else by permissions."""
    for command in (["mount", "--bind"], ["mount", "-o", "remount,ro,bind"]):
        if os.geteuid() == 0 and subprocess.run([*command, str(work / "mine"), str(work / "mine")]).returncode:
            pytest.skip("root may not mount here: run as another user, or with the right to mount")
    if os.geteuid() != 0:
        (work / "mine").chmod(0o555)
    try:
        yield work
    finally:
        (work / "mine").chmod(0o755) if os.geteuid() else subprocess.run(["umount", "-l", str(work / "mine")])


def test_a_read_only_folder(read_only: Path) -> None:
    before = content(read_only / "mine")
    refused(everfed(read_only, *resume_command("mine")), "cannot write the run folder mine")
    other = everfed(read_only, *run_command("mine/below", CASE, WIDE))
    refused(other, "cannot write the run folder mine/below")
    assert content(read_only / "mine") == before


def test_a_finished_run_may_lie_on_a_read_only_disk(work: Path, request: pytest.FixtureRequest) -> None:
    shutil.rmtree(work / "mine")
    shutil.copytree(work / "whole", work / "mine")
    request.getfixturevalue("read_only")
    assert everfed(work, *resume_command("mine")).code == 0
