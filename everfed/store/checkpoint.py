"""Checkpoints: written beside the run, atomically, by a thread of their own, every few seconds of work.

checkpoint/<number>/run.safetensors   the server's side
checkpoint/<number>/clients.json      which version of each client's state belongs to it
clients/<client>.<version>.safetensors

A checkpoint exists once its folder has its final name. Older ones are removed after a newer one is durable. Between two
checkpoints determinism recovers what was lost: the rounds are simply run again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from pathlib import Path

from everfed.core import tree
from everfed.core.runner import RunState
from everfed.core.tree import Tree
from everfed.errors import UserError
from everfed.store.clients import ClientStore
from everfed.store.files import sync_folder

RUN, CLIENTS = "run.safetensors", "clients.json"


class CheckpointError(UserError):
    """A checkpoint that cannot be read or written."""


class Checkpoints:
    """Saves a run's state under `folder`, at most every `every` seconds unless told that it must."""

    def __init__(self, folder: Path, store: ClientStore, every: float = 5.0) -> None:
        self.folder, self.store, self.every = folder, store, every
        self.written = 0
        self._last = time.monotonic()
        self._thread: threading.Thread | None = None
        self._failure: OSError | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def offer(self, state: RunState, must: bool) -> bool:
        """Save when it is due. A task's end must be saved: it waits for a writer that is still busy."""
        self._raise_failure()
        busy = self._thread is not None and self._thread.is_alive()
        if not must and (busy or time.monotonic() - self._last < self.every):
            return False
        self.wait()
        self._last = time.monotonic()
        # the state's trees are never changed in place, so holding them is a snapshot
        job = (state.to_tree(), *self.store.snapshot())
        self._thread = threading.Thread(target=self._write_safely, args=job, name="checkpoint", daemon=True)
        self._thread.start()
        return True

    def wait(self) -> None:
        """Until the last checkpoint is durable. Raises CheckpointError when it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise CheckpointError(
                f"cannot write a checkpoint to {self.folder}: {failure.strerror or failure}. "
                "The last good checkpoint is kept; free some space and `everfed resume` the run"
            ) from failure

    def _write_safely(self, run: Tree, versions: dict[int, int], dirty: dict[int, Tree]) -> None:
        try:
            self.write(run, versions, dirty)
        except OSError as error:
            self._failure = error

    def write(self, run: Tree, versions: dict[int, int], dirty: dict[int, Tree]) -> None:
        """Put one checkpoint on disk and remove what it replaces."""
        self.store.write(versions, dirty)
        number = max(numbers(self.folder), default=0) + 1
        temporary, final = self.folder / f".{number}.tmp", self.folder / str(number)
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            _write_synced(temporary / RUN, tree.to_bytes(run))
            _write_synced(temporary / CLIENTS, json.dumps(versions).encode())
            os.replace(temporary, final)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(self.folder)
        self.written += 1
        for older in numbers(self.folder):
            if older < number:
                shutil.rmtree(self.folder / str(older), ignore_errors=True)
        self.store.collect(versions)


def numbers(folder: Path) -> list[int]:
    """The checkpoints there are, ascending."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    return []


def latest(folder: Path, store: ClientStore) -> RunState | None:
    """The newest checkpoint, its client states put back into `store`; None when there is none yet."""
    found = numbers(folder)
    if not found:
        return None
    path = folder / str(found[-1])
    try:
        run = tree.from_bytes((path / RUN).read_bytes())
        versions = {int(client): int(v) for client, v in json.loads((path / CLIENTS).read_text()).items()}
        store.restore(versions)
        return RunState.from_tree(run)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be read ({error}); nothing was changed. Restore the folder from a copy, "
            "or start the run again in another folder"
        ) from error


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
