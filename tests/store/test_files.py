"""Files are whole after a loss of power at any operation; the disk (`disk.py`) keeps only what was synced."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from everfed.store.files import digest, file_digest, make_folder, make_private, write_atomic, write_synced
from everfed.store.run import RunFolder
from tests.store.disk import Disk


def power_cuts(
    folder: Path, work: Callable[[Path], None], first: Callable[[Path], None] = lambda place: None
) -> Iterator[Path]:
    """One folder for every file operation of `work` at which the power goes, and the last where it goes afterwards;
    all that was not synced is lost. first: makes what is on the disk already."""
    at, failed = 0, True
    while failed:
        at += 1
        place = folder / str(at)
        place.mkdir()
        first(place)
        disk = Disk(at)
        with disk.used():
            work(place)
        failed = disk.failed
        disk.lose_power()
        yield place


def test_a_file_is_the_old_one_or_the_new_one_and_the_new_one_once_it_is_written(tmp_path: Path) -> None:
    old, new = b"old" * 100, b"new content" * 100
    places = power_cuts(
        tmp_path, lambda place: write_atomic(place / "file", new), lambda place: _written(place / "file", old)
    )
    found = [(place / "file").read_bytes() for place in places]
    assert set(found) == {old, new} and found[-1] == new, "what was written is there when write_atomic is over"


@pytest.mark.parametrize("durable", [True, False])
def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, durable: bool) -> None:
    (tmp_path / "taken").mkdir()  # a file cannot replace a folder
    with pytest.raises(OSError):
        write_atomic(tmp_path / "taken", b"content", durable)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_chunks_are_written_in_order_and_their_checksum_is_that_of_the_file(tmp_path: Path) -> None:
    chunks = [b"head", memoryview(b"x" * 100_000), b"", memoryview(b"tail")]
    whole = b"".join(chunks)
    found = write_synced(tmp_path / "file", iter(chunks))
    assert (tmp_path / "file").read_bytes() == whole
    assert found == digest(whole) == file_digest(tmp_path / "file")
    assert found == hashlib.blake2b(whole, digest_size=16).hexdigest()


def test_one_chunk_at_a_time_is_in_memory(tmp_path: Path) -> None:
    """A chunk may be the copy of a large tensor that lies on a device."""
    made: list[weakref.ref[np.ndarray]] = []

    def chunks() -> Iterator[memoryview]:
        for _ in range(4):
            assert [chunk() for chunk in made] == [None] * len(made)
            array = np.zeros(100_000, np.uint8)
            made.append(weakref.ref(array))
            data = [array.data]
            del array
            yield data.pop()

    write_synced(tmp_path / "file", chunks())
    assert len(made) == 4 and (tmp_path / "file").stat().st_size == 400_000


def test_what_is_synced_is_there_after_a_loss_of_power(tmp_path: Path) -> None:
    *_, last = power_cuts(tmp_path, lambda place: _synced(place / "file", [b"a" * 100, memoryview(b"b" * 100)]))
    assert (last / "file").read_bytes() == b"a" * 100 + b"b" * 100


def _synced(path: Path, chunks: list[bytes | memoryview]) -> None:
    path.touch()  # its name is on the disk already; `write_synced` is about the content
    write_synced(path, chunks)


def _written(path: Path, data: bytes) -> None:
    path.write_bytes(data)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_folder_is_there_when_it_was_made(tmp_path: Path, depth: int) -> None:
    *_, last = power_cuts(tmp_path, lambda place: make_folder(place.joinpath(*["a"] * depth)))
    assert last.joinpath(*["a"] * depth).is_dir()


def test_a_run_folder_with_a_recipe_has_its_settings(tmp_path: Path) -> None:
    """Without them a resumed run would forget `--scale`: whatever the moment of a crash, a folder that can be resumed
    has both."""
    settings = {"scale": 0.1, "data_dir": None}
    with_recipe = 0
    for place in power_cuts(tmp_path, lambda place: _created(place / "run", settings)):
        folder = RunFolder(place / "run")
        if folder.recipe.exists():
            with_recipe += 1
            assert RunFolder.open(folder.path).read_settings() == settings
            assert folder.recipe.read_text() == "name = 'toy'\n"
        elif folder.settings.exists():
            assert json.loads(folder.settings.read_text()) == settings
    assert with_recipe


def _created(path: Path, settings: dict[str, object]) -> None:
    RunFolder.create(path, "name = 'toy'\n", settings)


def test_a_killed_process_leaves_no_recipe_without_settings(tmp_path: Path) -> None:
    """As above, where the process dies and the disk loses nothing."""
    settings = {"scale": 0.1}
    for at in range(1, 30):
        disk = Disk(at)
        with disk.used():
            _created(tmp_path / str(at), settings)
        folder = RunFolder(tmp_path / str(at))
        assert not folder.recipe.exists() or folder.read_settings() == settings
        if not disk.failed:
            return
    raise AssertionError("create has more operations than this test expects")


@pytest.mark.parametrize("federated", [True, False])
def test_a_run_that_fails_before_its_first_phase_is_kept_where_clients_may_hold_state(
    tmp_path: Path, federated: bool
) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        RunFolder.new(tmp_path / "run", "seed = 0", {"federated": federated}) as folder,
    ):
        folder.events.write_text('{"event": "start"}\n')
        raise ZeroDivisionError
    assert (tmp_path / "run").exists() is federated


def test_a_folder_that_a_group_may_read_is_closed_to_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    make_private(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_of_a_run_that_fails_before_its_first_phase_nothing_stays(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), RunFolder.new(tmp_path / "runs" / "first", "recipe", {}) as folder:
        for made in (folder.clients, folder.checkpoint, folder.path / "tensorboard"):
            made.mkdir()
            (made / "file").touch()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
