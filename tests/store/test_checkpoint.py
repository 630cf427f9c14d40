"""Checkpoints: a crash at any file operation leaves the old state or the new one, never a mix of both."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from everfed.core import tree
from everfed.core.message import State
from everfed.core.server import RunState
from everfed.store import checkpoint
from everfed.store.checkpoint import CheckpointError, Checkpoints, latest, numbers
from everfed.store.clients import ClientStore
from tests.store.disk import Death, Disk

FULL = OSError(errno.ENOSPC, "No space left on device")


def run_state(mark: int) -> RunState:
    """A server's side that is known by its mark."""
    return RunState({"model": {"params": torch.full((50,), float(mark))}}, round=mark, samples=mark)


def client_state(client: int, mark: int) -> State:
    return {"memory": {"x": torch.full((20,), float(100 * client + mark)), "seen": mark}}


class Run:
    """A run reduced to its state: clients 0 and 1 change with every mark, 2 never, and 3 comes with mark 2."""

    def __init__(self, folder: Path, budget: int = 2 << 30) -> None:
        self.folder, self.budget = folder, budget
        self.failure: CheckpointError | None = None
        self.open()

    def open(self) -> None:
        """As a new process would."""
        self.store = ClientStore(self.folder / "clients", self.budget)
        self.checkpoints = Checkpoints(self.folder / "checkpoint", self.store, recipe="mine")
        latest(self.folder / "checkpoint", self.store, "mine")

    def train(self, mark: int) -> None:
        for client, state in self.expected(mark).items():
            if client != 2 or mark == 1:
                self.store.put(client, state)

    def save(self, mark: int) -> None:
        self.train(mark)
        self.checkpoints.write(run_state(mark).to_tree(), *self.store.snapshot())

    def offer(self, mark: int) -> None:
        """Save through the thread that writes, as a run does; a Death there is silent."""
        previous, threading.excepthook = threading.excepthook, lambda _: None
        self.train(mark)
        try:
            self.checkpoints.offer(run_state(mark), must=True)
            self.checkpoints.wait()
        except CheckpointError as error:
            self.failure = error
        finally:
            threading.excepthook = previous

    @staticmethod
    def expected(mark: int) -> dict[int, State]:
        marks = {0: mark, 1: mark, 2: 1, 3: mark}
        return {client: client_state(client, m) for client, m in marks.items() if client != 3 or mark >= 2}

    def found(self) -> tuple[int, dict[int, State]] | None:
        """(mark, client states) of the newest checkpoint, read as a new process would."""
        store = ClientStore(self.folder / "clients")
        state = latest(self.folder / "checkpoint", store, "mine")
        if state is None:
            return None
        assert tree.equal(state.to_tree(), run_state(state.round).to_tree())
        return state.round, {client: store.get(client) or {} for client in store.clients()}

    def mark(self) -> int:
        """The mark of the newest checkpoint, whose every file was checked to belong to it; 0 when there is none."""
        found = self.found()
        if found is None:
            return 0
        mark, states = found
        expected = self.expected(mark)
        assert states.keys() == expected.keys()
        assert all(tree.equal(states[client], expected[client]) for client in states)
        return mark

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


# crashes ---------------------------------------------------------------------------------------------------------


def crashes(template: Path, folder: Path, failure: type[BaseException] | OSError) -> Iterator[tuple[Run, Disk]]:
    """The run after saving mark 2 failed at each of its file operations in turn, from one state with mark 1."""
    at = 0
    while True:
        at += 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template, folder)
        run, disk = Run(folder), Disk(at, failure() if isinstance(failure, type) else failure)
        with disk.used():
            run.offer(2)
        if not disk.failed:
            assert at > 20, "a checkpoint has more operations than that"
            return
        yield run, disk


@pytest.fixture
def template(tmp_path: Path) -> Path:
    Run(tmp_path / "template").save(1)
    return tmp_path / "template"


def test_a_process_that_dies_at_any_operation_leaves_old_or_new(template: Path, tmp_path: Path) -> None:
    marks = [run.mark() for run, _ in crashes(template, tmp_path / "run", Death)]
    assert marks == sorted(marks) and set(marks) == {1, 2}, "old first, then new, nothing else"


def test_after_a_death_the_run_goes_on_and_leaves_nothing_behind(template: Path, tmp_path: Path) -> None:
    for run, _ in crashes(template, tmp_path / "run", Death):
        run.open()
        run.save(3)
        assert run.mark() == 3
        lasting = [name for name in run.files() if not name.endswith(".tmp")]
        assert len(lasting) == 2 + 4, "one checkpoint of two files, one file per client"


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
def test_a_power_failure_at_any_operation_leaves_old_or_new(template: Path, tmp_path: Path, seed: int | None) -> None:
    """Whatever was not synced is gone, or half of it (by seed): names, renames, content."""
    for run, disk in crashes(template, tmp_path / "run", Death):
        disk.lose_power(None if seed is None else random.Random(f"{seed} {disk.at}"))
        assert run.mark() in (1, 2)


def test_the_power_may_fail_right_after_a_checkpoint(template: Path) -> None:
    """Nothing that was finished is lost."""
    run, disk = Run(template), Disk()
    with disk.used():
        run.offer(2)
    disk.lose_power()
    assert run.mark() == 2


def test_the_very_first_checkpoint_is_there_or_not(tmp_path: Path) -> None:
    marks, disk = [], Disk(failed=True)
    while disk.failed:
        run, disk = Run(tmp_path / str(len(marks))), Disk(len(marks) + 1)
        with disk.used():
            run.save(1)
        disk.lose_power()
        marks.append(run.mark())
    assert marks == sorted(marks) and set(marks) == {0, 1}


def test_a_full_disk_is_reported_and_leaves_old_or_new(template: Path, tmp_path: Path) -> None:
    failures = 0
    for run, _ in crashes(template, tmp_path / "run", FULL):
        if run.failure is not None:
            failures += 1
            assert str(run.folder / "checkpoint") in str(run.failure) and "No space left" in str(run.failure)
        assert run.mark() in (1, 2)
        assert not [name for name in run.files() if name.endswith(".tmp")], "what was begun is taken back"
    assert failures > 10, "only a failure to remove what is old is not worth reporting"


# reading ---------------------------------------------------------------------------------------------------------


def test_without_a_checkpoint_there_is_no_state(run: Run) -> None:
    assert run.found() is None
    assert numbers(run.folder / "nowhere") == []


@pytest.mark.parametrize("name", ["run.safetensors", "clients.json", "client"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "one bit"])
def test_a_damaged_file_is_refused_by_name_and_nothing_is_changed(run: Run, name: str, damage: str) -> None:
    run.save(1)
    run.save(2)
    path = next(run.folder.glob("clients/3.*" if name == "client" else f"checkpoint/*/{name}"))
    data = path.read_bytes()
    spoil(path, damage)
    before = {name: (run.folder / name).read_bytes() for name in run.files()}
    with pytest.raises(CheckpointError, match=r"checkpoint/2 cannot be read \(.*nothing was changed") as raised:
        run.found()
    assert damage == "empty" or name == "clients.json" or path.name in str(raised.value)
    assert before == {name: (run.folder / name).read_bytes() for name in run.files()}
    path.write_bytes(data)
    assert run.mark() == 2


def spoil(path: Path, damage: str) -> None:
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "one bit":
        path.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    else:
        path.write_bytes(data[: len(data) // 2] if damage == "truncated" else b"")


@pytest.mark.parametrize("content", ["[]", "{}", '{"digest": 1, "content": "{}"}', "null", '{"content": {}}'])
def test_a_manifest_that_is_something_else_is_refused(run: Run, content: str) -> None:
    run.save(1)
    (run.folder / "checkpoint/1/clients.json").write_text(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        run.found()


def test_a_flipped_bit_anywhere_is_noticed(run: Run) -> None:
    """Also where safetensors would not: inside the numbers, and in the list of versions."""
    run.save(1)
    for path in [*run.folder.glob("checkpoint/1/*"), *run.folder.glob("clients/0.*")]:
        data = path.read_bytes()
        for at in range(0, len(data), 7):
            path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            with pytest.raises(CheckpointError):
                run.found()
        path.write_bytes(data)
    assert run.mark() == 1


def test_a_checkpoint_of_another_recipe_is_refused(run: Run) -> None:
    run.save(1)
    with pytest.raises(CheckpointError, match="belongs to another recipe"):
        latest(run.folder / "checkpoint", run.store, "other")
    assert run.mark() == 1


# pruning and versions --------------------------------------------------------------------------------------------


def test_only_the_newest_checkpoint_and_its_client_files_are_kept(run: Run) -> None:
    for mark in (1, 2, 3):
        run.save(mark)
    assert numbers(run.folder / "checkpoint") == [3]
    assert len(list(run.folder.glob("clients/*"))) == 4
    assert run.checkpoints.written == 3


def test_client_states_belong_to_their_checkpoint(tmp_path: Path) -> None:
    """Clients went on after the checkpoint, and their states were paged to disk; a resumed run does not see them."""
    run = Run(tmp_path, budget=1)
    run.save(1)
    for mark in (7, 8):
        for client in (0, 1, 2):
            run.store.put(client, client_state(client, mark))
    assert len(list(run.folder.glob("clients/*"))) > 3, "newer states are on disk, too"
    assert run.mark() == 1
    assert len(list(run.folder.glob("clients/*"))) == 3, "and gone after a resume"


def test_a_state_that_was_lost_does_not_come_back_under_its_old_number(tmp_path: Path) -> None:
    """Versions count on from the checkpoint; a file of the lost rounds must not stand for a new one: code that was
    corrected between stop and resume makes other states."""
    run = Run(tmp_path, budget=1)
    run.save(1)
    for client in (0, 1):
        run.store.put(client, client_state(client, 7))
    run.open()
    for client in (0, 1):
        run.store.put(client, client_state(client, 8))
    assert all(tree.equal(run.store.get(c) or {}, client_state(c, 8)) for c in (0, 1))


def test_a_run_that_starts_over_forgets_states_without_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, budget=1)
    for client in (0, 1):
        run.store.put(client, client_state(client, 7))
    assert run.found() is None
    assert not list(run.folder.glob("clients/*"))


# beside the run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 400, 2 << 30], ids=["all paged", "some paged", "none paged"])
def test_checkpoints_are_written_while_clients_run(tmp_path: Path, budget: int) -> None:
    """Each holds the states of the moment it was offered, whatever clients do while it is written."""
    run, expected = Run(tmp_path, budget), {}
    for mark in range(1, 60):
        for client in range(6):
            if (client + mark) % 3:
                run.store.put(client, client_state(client, mark))
                expected[client] = client_state(client, mark)
        if mark % 5 == 0:
            run.checkpoints.offer(run_state(mark), must=True)
            then = dict(expected)
        assert all(tree.equal(run.store.get(c) or {}, state) for c, state in expected.items()), "no live state is lost"
        if mark % 5 == 3 and mark > 5:
            run.checkpoints.wait()
            at, states = _read_copy(run, tmp_path.with_name("copy"))
            assert at == mark - 3
            assert all(tree.equal(states[client], then[client]) for client in then)


def test_a_state_paged_while_old_files_are_removed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients go on, and their new states are paged out, just when files that nobody needs are removed."""
    run, real = Run(tmp_path, budget=1), os.unlink

    def meanwhile(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        for client in (0, 1):
            run.store.put(client, client_state(client, 5))
        return real(*arguments, **options)

    run.save(1)
    run.train(2)
    versions, dirty = run.store.snapshot()
    run.store.write(versions, dirty)
    monkeypatch.setattr(os, "unlink", meanwhile)
    run.store.collect(versions)
    assert os.unlink is real, "a file was removed, and the clients went on at that moment"
    assert all(tree.equal(run.store.get(client) or {}, client_state(client, 5)) for client in (0, 1))


def _read_copy(run: Run, copy: Path) -> tuple[int, dict[int, State]]:
    """Reading removes what is newer than the checkpoint, so a copy is read."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run.folder, copy)
    found = Run(copy).found()
    assert found is not None
    return found


def test_it_is_saved_when_due_and_at_task_ends(run: Run) -> None:
    run.checkpoints.every = 3600.0
    assert not run.checkpoints.offer(run_state(1), must=False)
    assert run.checkpoints.offer(run_state(2), must=True)
    run.checkpoints.every = 0.0
    run.checkpoints.wait()
    assert run.checkpoints.offer(run_state(3), must=False)
    run.checkpoints.wait()
    assert run.checkpoints.written == 2


def test_a_busy_writer_is_not_waited_for_unless_it_must(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, real = threading.Event(), run.checkpoints.write

    def slow(*job: Any) -> None:
        let_go.wait()
        real(*job)

    monkeypatch.setattr(run.checkpoints, "write", slow)
    run.checkpoints.every = 0.0
    assert run.checkpoints.offer(run_state(1), must=False)
    assert not run.checkpoints.offer(run_state(2), must=False)
    let_go.set()
    assert run.checkpoints.offer(run_state(3), must=True)
    run.checkpoints.wait()
    state = latest(run.folder / "checkpoint", run.store, "mine")
    assert state is not None and (state.round, run.checkpoints.written) == (3, 2)


def test_a_failure_is_raised_once_and_the_next_checkpoint_may_succeed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_synced", full)
        run.checkpoints.offer(run_state(1), must=True)
        with pytest.raises(CheckpointError, match="No space left on device"):
            run.checkpoints.wait()
    run.checkpoints.offer(run_state(2), must=True)
    run.checkpoints.wait()
    assert numbers(run.folder / "checkpoint") == [1]


def test_a_bug_in_the_writer_is_not_swallowed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.tree, "to_chunks", lambda _: 1 / 0)
    run.checkpoints.offer(run_state(1), must=True)
    with pytest.raises(ZeroDivisionError):
        run.checkpoints.wait()


def test_a_tensor_that_cannot_be_read_midway_leaves_the_old_checkpoint(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may fail while its tensors are brought to the host, when the file is open already."""
    run.save(1)

    def fails(_: Any) -> memoryview:
        raise tree.TreeError("the device is gone")

    monkeypatch.setattr(tree, "_memory", fails)
    with pytest.raises(tree.TreeError, match="gone"):
        run.checkpoints.write(run_state(2).to_tree(), *run.store.snapshot())
    assert run.mark() == 1 and os.listdir(run.folder / "checkpoint") == ["1"]


def test_tensors_are_written_from_where_they_lie(run: Run) -> None:
    """Building the file's content in memory would stop the threads that feed the GPU."""
    run.store.put(0, {"memory": {"x": torch.randn(1 << 18)}})
    state = RunState({"model": {"params": torch.randn(1 << 20), "turned": torch.randn(8, 4).t()}}, round=1)
    tracemalloc.start()
    try:
        run.checkpoints.write(state.to_tree(), *run.store.snapshot())
        extra = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert extra < 1 << 19, f"{extra} bytes for tensors of 4 MiB and 1 MiB"
    found = latest(run.folder / "checkpoint", run.store, "mine")
    assert found is not None and tree.equal(found.to_tree(), state.to_tree())


def test_what_is_on_disk_holds_no_code(run: Run) -> None:
    """JSON and safetensors only."""
    run.save(1)
    json.loads((run.folder / "checkpoint/1/clients.json").read_text())
    for path in [*run.folder.glob("checkpoint/1/*.safetensors"), *run.folder.glob("clients/*")]:
        tree.from_bytes(path.read_bytes())
