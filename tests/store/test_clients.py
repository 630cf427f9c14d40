"""The store of client states: what was put is what is got, however it is paged, saved and gone back to."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from everfed.core import tree
from everfed.core.message import State
from everfed.store import clients
from everfed.store.clients import ClientStore

FLOATS = 25
BYTES = 4 * FLOATS


def state(mark: int, size: int = FLOATS) -> State:
    return {"memory": {"x": torch.full((size,), float(mark)), "host": {"seen": mark}}}


def same(found: State | None, expected: State) -> bool:
    return found is not None and tree.equal(found, expected)


def files(store: ClientStore) -> set[str]:
    return set(os.listdir(store.folder or ""))


def save(store: ClientStore) -> dict[int, int]:
    """A checkpoint, as far as the store knows one."""
    versions, dirty = store.snapshot()
    store.write(versions, dirty)
    store.collect(versions)
    return versions


# in memory -------------------------------------------------------------------------------------------------------


def test_a_client_that_was_never_put_has_no_state() -> None:
    assert ClientStore().get(3) is None


def test_without_a_folder_nothing_is_paged() -> None:
    store = ClientStore(budget=1)
    for client in range(5):
        store.put(client, state(client))
    assert all(same(store.get(client), state(client)) for client in range(5))
    assert (store.hot_bytes(), store.bytes(), store.clients()) == (5 * BYTES, 5 * BYTES, [0, 1, 2, 3, 4])


def test_a_state_that_grows_and_shrinks_is_counted_once() -> None:
    store = ClientStore()
    for size in (10, 1000, 1):
        store.put(0, state(0, size))
    assert store.hot_bytes() == store.bytes() == 4


# paging ----------------------------------------------------------------------------------------------------------


def test_what_another_process_has_is_neither_held_nor_counted() -> None:
    store = ClientStore()
    for client in range(4):
        store.put(client, state(client))
    store.keep(lambda client: client % 2 == 0)
    assert store.clients() == [0, 2] and store.bytes() == store.hot_bytes() == 2 * BYTES


def test_what_was_not_used_for_longest_is_paged_out(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, budget=3 * BYTES)
    for client in (0, 1, 2):
        store.put(client, state(client))
    store.get(0)
    store.put(3, state(3))
    assert files(store) == {"1.2.safetensors"}
    assert store.hot_bytes() == 3 * BYTES and store.bytes() == 4 * BYTES
    assert same(store.get(1), state(1))
    assert files(store) == {"1.2.safetensors", "2.3.safetensors"}, "it came back, and another one had to go"


def test_a_state_larger_than_the_budget_is_held_alone(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, budget=10)
    store.put(0, state(0))
    assert files(store) == set()
    store.put(1, state(1))
    assert files(store) == {"0.1.safetensors"} and store.hot_bytes() == BYTES


def test_a_state_that_did_not_change_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    real = clients._write_page
    monkeypatch.setattr(clients, "_write_page", lambda path, chunks: written.append(path.name) or real(path, chunks))
    store = ClientStore(tmp_path, budget=BYTES)
    store.put(0, state(0))
    store.put(1, state(1))
    for _ in range(3):
        assert same(store.get(0), state(0)) and same(store.get(1), state(1))
    assert written == ["0.1.safetensors", "1.2.safetensors"]


def test_paging_waits_for_no_disk_and_a_checkpoint_for_every_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name))
    store = ClientStore(tmp_path / "clients", budget=BYTES)
    for client in range(3):
        store.put(client, state(client))
    assert files(store) == {"0.1.safetensors", "1.2.safetensors"} and not synced
    save(store)
    assert sorted(synced[:3]) == ["0.1.safetensors", "1.2.safetensors", "2.3.safetensors"]
    assert synced[3:] == ["clients"], "their names last, once"
    store.put(1, state(7))
    save(store)
    assert synced[4:] == ["1.4.safetensors", "clients"], "what is durable stays so"


def test_a_full_disk_loses_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ClientStore(tmp_path, budget=BYTES)
    store.put(0, state(0))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            store.put(1, state(1))
    assert files(store) == set(), "what was begun is taken back"
    assert same(store.get(0), state(0)) and same(store.get(1), state(1))


# versions --------------------------------------------------------------------------------------------------------


def test_restoring_goes_back_to_what_was_saved(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    for client in (0, 1):
        store.put(client, state(client))
    versions = save(store)
    store.put(0, state(8))
    store.put(2, state(9))
    again = ClientStore(tmp_path)
    again.restore(versions)
    assert again.clients() == [0, 1] and again.hot_bytes() == 0 and again.bytes() == 2 * BYTES
    assert same(again.get(0), state(0)) and same(again.get(1), state(1)) and again.get(2) is None


def test_a_missing_file_is_noticed_before_anything_changes(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    store.put(0, state(0))
    with pytest.raises(FileNotFoundError):
        store.restore({0: 1, 5: 2})
    assert same(store.get(0), state(0)) and store.clients() == [0]


def test_versions_never_come_twice(tmp_path: Path) -> None:
    """Files of rounds that were lost are there; what is put after going back must not be taken for them."""
    store = ClientStore(tmp_path, budget=BYTES)
    store.put(0, state(0))
    versions = save(store)
    for mark in (7, 8):
        store.put(0, state(mark))
        store.put(1, state(mark))
    lost = files(store)
    again = ClientStore(tmp_path, budget=BYTES)
    again.restore(versions)
    again.put(0, state(21))
    again.put(1, state(22))
    assert files(again) > lost, "a name of its own"
    assert same(again.get(0), state(21)) and same(again.get(1), state(22))


def test_collecting_keeps_what_the_checkpoint_and_the_run_need(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, budget=BYTES)
    store.put(0, state(1))
    versions = save(store)
    for mark in (2, 3):
        store.put(0, state(mark))
        store.put(1, state(mark))
    assert files(store) == {"0.1.safetensors", "0.2.safetensors", "1.3.safetensors", "0.4.safetensors"}
    store.collect(versions)
    assert files(store) == {"0.1.safetensors", "0.4.safetensors"}
    store.collect(store.snapshot()[0])
    assert files(store) == {"0.4.safetensors"}


def test_collecting_finds_what_an_earlier_life_left_and_touches_nothing_else(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    store.put(0, state(0))
    save(store)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model.safetensors").write_text("mine, too")
    again = ClientStore(tmp_path)
    again.collect({})
    assert files(again) == {"notes.txt", "model.safetensors"}


# beside the run --------------------------------------------------------------------------------------------------


def test_a_client_that_goes_on_while_its_state_is_written_keeps_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint gets the state it was offered, although a newer one is paged out meanwhile."""
    store = ClientStore(tmp_path, budget=BYTES)
    store.put(0, state(1))
    versions, dirty = store.snapshot()
    store.put(0, state(2))
    store.put(1, state(2))  # pages out client 0, version 2
    store.write(versions, dirty)
    assert {"0.1.safetensors", "0.2.safetensors"} <= files(store)
    store.collect(versions)
    again = ClientStore(tmp_path)
    again.restore(versions)
    assert same(again.get(0), state(1)) and same(store.get(0), state(2))


def test_a_state_paged_while_old_files_are_removed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real = ClientStore(tmp_path, budget=1), Path.unlink
    for client in (0, 1):
        store.put(client, state(1))
    save(store)
    for client in (0, 1):
        store.put(client, state(2))
    versions, dirty = store.snapshot()
    store.write(versions, dirty)

    def while_removing(path: Path, missing_ok: bool = False) -> None:
        store.put(0, state(5))
        store.put(1, state(5))
        real(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", while_removing)
        store.collect(versions)
    assert all(same(store.get(client), state(5)) for client in (0, 1))
    again = ClientStore(tmp_path)
    again.restore(versions)
    assert all(same(again.get(client), state(2)) for client in (0, 1))


def test_clients_run_while_checkpoints_are_written(tmp_path: Path) -> None:
    """Many puts and pages against a thread that saves all the time; every checkpoint is whole."""
    store, stop, failures = ClientStore(tmp_path, budget=2 * BYTES), threading.Event(), []

    def keep_saving() -> None:
        try:
            while not stop.is_set():
                versions, dirty = store.snapshot()
                store.write(versions, dirty)
                for client, version in versions.items():
                    found = tree.from_bytes(store.path(client, version).read_bytes())
                    assert found["memory"]["host"]["seen"] % 10 == client
                store.collect(versions)
        except BaseException as error:
            failures.append(error)

    saver = threading.Thread(target=keep_saving)
    saver.start()
    for mark in range(150):
        client = mark % 7
        store.put(client, state(10 * mark + client))
        assert same(store.get(client), state(10 * mark + client))
    stop.set()
    saver.join()
    assert not failures


class Life(RuleBasedStateMachine):
    """A store beside a plain dictionary: put, get, save in two moves, and go back after a crash at any point."""

    @initialize(budget=st.integers(0, 6))
    def begin(self, budget: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.budget = budget * BYTES
        self.store = ClientStore(self.folder, self.budget)
        self.live: dict[int, State] = {}
        self.saved: tuple[dict[int, int], dict[int, State]] = ({}, {})
        self.offered: tuple[dict[int, int], dict[int, State], dict[int, State]] | None = None
        self.mark = 0

    @rule(client=st.integers(0, 5), size=st.integers(0, 2 * FLOATS))
    def put(self, client: int, size: int) -> None:
        self.mark += 1
        self.live[client] = state(self.mark, size)
        self.store.put(client, self.live[client])

    @rule(client=st.integers(0, 5))
    def get(self, client: int) -> None:
        found = self.store.get(client)
        assert same(found, self.live[client]) if client in self.live else found is None

    @precondition(lambda self: self.offered is None)
    @rule()
    def offer(self) -> None:
        self.offered = (*self.store.snapshot(), dict(self.live))

    @precondition(lambda self: self.offered is not None)
    @rule(collected=st.booleans())
    def finish(self, collected: bool) -> None:
        assert self.offered is not None
        versions, dirty, live = self.offered
        self.store.write(versions, dirty)
        self.saved, self.offered = (versions, live), None
        if collected:
            self.store.collect(versions)
            needed = {*versions.items(), *self.store._version.items()}
            assert set(self.store._pages()) <= needed

    @rule(collected=st.booleans())
    def crash(self, collected: bool) -> None:
        self.store = ClientStore(self.folder, self.budget)
        versions, live = self.saved
        self.store.restore(versions)
        self.live, self.offered = dict(live), None
        if collected:
            self.store.collect(versions)
            assert set(self.store._pages()) == set(versions.items())

    @invariant()
    def memory_is_bounded(self) -> None:
        if hasattr(self, "store"):
            held = [tree.tensor_bytes(s) for s in self.store._hot.values()]
            assert self.store.hot_bytes() == sum(held)
            assert sum(held) <= self.budget or len(held) == 1
            assert self.store.bytes() == sum(tree.tensor_bytes(s) for s in self.live.values())
            assert self.store.clients() == sorted(self.live)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30)
