"""Checkpoints: written atomically by a thread of their own, every few seconds of work.

checkpoint/<number>/run.safetensors   the server's state
checkpoint/<number>/clients.json      the version of each client's state, with checksums of all files
clients/<client>.<version>.safetensors

A checkpoint exists once its folder has its final name. Older ones are removed after a newer one is durable. Rounds
after a checkpoint are run again when a run is resumed, with the same result.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from everfed.core import tree
from everfed.core.context import PlaceKey
from everfed.core.server import RunState
from everfed.core.tree import Tree
from everfed.errors import UserError
from everfed.store.clients import ClientStore
from everfed.store.files import FOLDER_MODE, digest, file_digest, make_folder, sync_folder, write_synced

RUN, CLIENTS = "run.safetensors", "clients.json"


class CheckpointError(UserError):
    """A checkpoint that cannot be read or written."""


@dataclass(frozen=True)
class Manifest:
    """The content of clients.json. recipe: fingerprint of the recipe; run: checksum of the server's state; clients:
    version and checksum of each client's state."""

    recipe: str
    run: str
    clients: dict[int, tuple[int, str]]

    @property
    def versions(self) -> dict[int, int]:
        return {client: version for client, (version, _) in self.clients.items()}

    def to_json(self) -> bytes:
        content = json.dumps(asdict(self))
        return json.dumps({"digest": digest(content.encode()), "content": content}).encode()

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """Raises ValueError, KeyError or TypeError when it is damaged."""
        outer = json.loads(data)
        if digest(outer["content"].encode()) != outer["digest"]:
            raise ValueError(f"{CLIENTS} is damaged")
        content = json.loads(outer["content"])
        clients = {
            int(client): (int(version), str(checked)) for client, (version, checked) in content["clients"].items()
        }
        return Manifest(content["recipe"], content["run"], clients)


class Checkpoints:
    """Saves a run's state under `folder`, every `every` seconds at most, except where it must.

    recipe: a fingerprint of the recipe; `latest` refuses a checkpoint of another one.
    """

    def __init__(self, folder: Path, store: ClientStore, every: float = 5.0, recipe: str = "") -> None:
        self.folder, self.store, self.every, self.recipe = folder, store, every, recipe
        self.written = 0
        self._last = time.monotonic()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self.durable: PlaceKey = (0, 0, 0, 0)  # a run that is killed resumes from here, or from later
        self._checksums: dict[int, tuple[int, str]] = {}  # client -> (version, checksum) of the newest known file
        make_folder(folder)

    def offer(self, state: RunState, must: bool) -> bool:
        """Start a checkpoint if one is due; True if so. must: save in any case, after a checkpoint that is still being
        written (at a task's end)."""
        self._raise_failure()
        busy = self._thread is not None and self._thread.is_alive()
        if not must and (busy or time.monotonic() - self._last < self.every):
            return False
        self.wait()
        self._last = time.monotonic()
        # the state's trees are never changed in place, so references to them are a snapshot
        job = (state.to_tree(), *self.store.snapshot(), state.place)
        self._thread = threading.Thread(target=self._write_safely, args=job, name="checkpoint", daemon=True)
        self._thread.start()
        return True

    def wait(self) -> None:
        """Wait until the last checkpoint is durable. Raises CheckpointError when it could not be written."""
        self.close()
        self._raise_failure()

    def close(self) -> None:
        """Wait until nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if isinstance(failure, OSError):
            raise CheckpointError(
                f"cannot write a checkpoint to {self.folder}: {failure.strerror or failure}. "
                "The last good checkpoint is kept; free some space, then `everfed resume` the run"
            ) from failure
        if failure is not None:
            raise failure

    def _write_safely(self, run: Tree, versions: dict[int, int], dirty: dict[int, Tree], place: PlaceKey) -> None:
        try:
            self.write(run, versions, dirty)
            self.durable = place
        except Exception as error:
            self._failure = error

    def write(self, run: Tree, versions: dict[int, int], dirty: dict[int, Tree]) -> None:
        """Write one checkpoint to disk and remove what it replaces."""
        self.store.write(versions, dirty)
        chunks = tree.to_chunks(run)  # not one large `bytes`: building it stops all other threads
        clients = self._with_checksums(versions)
        number = max(numbers(self.folder), default=0) + 1
        temporary, final = self.folder / f".{number}.tmp", self.folder / str(number)
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(FOLDER_MODE)
            manifest = Manifest(self.recipe, write_synced(temporary / RUN, chunks), clients)
            write_synced(temporary / CLIENTS, [manifest.to_json()])
            sync_folder(temporary)
            os.replace(temporary, final)
        except Exception:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(self.folder)
        self.written += 1
        for older in numbers(self.folder):
            if older < number:
                shutil.rmtree(self.folder / str(older), ignore_errors=True)
        self.store.collect(versions)

    def _with_checksums(self, versions: dict[int, int]) -> dict[int, tuple[int, str]]:
        """Versions with the checksums of their files; only files that are new since the last checkpoint are read."""
        found: dict[int, tuple[int, str]] = {}
        for client, version in versions.items():
            known = self._checksums.get(client)
            path = self.store.path(client, version)
            found[client] = known if known and known[0] == version else (version, file_digest(path))
        self._checksums = found
        return found


def numbers(folder: Path) -> list[int]:
    """The numbers of the checkpoints in `folder`, ascending."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    return []


def latest(folder: Path, store: ClientStore, recipe: str = "") -> RunState | None:
    """The newest checkpoint, with its client states restored in `store`; None when there is none yet.

    Raises CheckpointError when a file of it is missing or damaged, or when it belongs to another `recipe`; nothing is
    changed then. Client states that are newer than the checkpoint are removed: their rounds are run again.
    """
    found = numbers(folder)
    if not found:
        store.collect({})
        return None
    path = folder / str(found[-1])
    with _reading(path):
        manifest, state = _server_of(path)
        for client, (version, checksum) in manifest.clients.items():
            _intact(store.path(client, version), checksum)
    if manifest.recipe != recipe:
        raise CheckpointError(
            f"checkpoint {path} belongs to another recipe, --scale or stream than the run folder now names; nothing "
            "was changed. Put back the recipe.toml that was run, or start the run again in another folder"
        )
    store.restore(manifest.versions)
    store.collect(manifest.versions)
    return state


def recipe_of(folder: Path) -> str:
    """The fingerprint of the recipe that the newest checkpoint belongs to; empty where there is none."""
    found = numbers(folder)
    if not found:
        return ""
    path = folder / str(found[-1])
    with _reading(path):
        return Manifest.from_json((path / CLIENTS).read_bytes()).recipe


def newest(folder: Path) -> RunState | None:
    """The server's state in the newest checkpoint; nothing is changed, and clients' states are not read."""
    found = numbers(folder)
    if not found:
        return None
    path = folder / str(found[-1])
    with _reading(path):
        return _server_of(path)[1]


def _server_of(path: Path) -> tuple[Manifest, RunState]:
    """What a checkpoint holds of the server, and which clients' states belong to it."""
    manifest = Manifest.from_json((path / CLIENTS).read_bytes())
    return manifest, RunState.from_tree(tree.from_bytes(_intact(path / RUN, manifest.run)))


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raises CheckpointError for a file that is missing or damaged."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be read ({error}); nothing was changed. Restore the folder from a copy, "
            "or start the run again in another folder"
        ) from error


def _intact(path: Path, checksum: str) -> bytes:
    """The content of a file. Raises ValueError when it does not have this checksum."""
    data = path.read_bytes()
    if digest(data) != checksum:
        raise ValueError(f"{path} is damaged")
    return data
