"""The run folder: its files, their names, and how they are written."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from everfed.errors import FAULT, UserError, exit_code
from everfed.store.files import (
    FOLDER_MODE,
    Locked,
    Opener,
    locked,
    make_folder,
    open_file,
    remove_temporaries,
    write_atomic,
)

RECIPE, EVENTS, RESULT, MODEL = "recipe.toml", "events.jsonl", "result.json", "model.safetensors"
PICTURES, TENSORBOARD = "pictures", "tensorboard"
CHECKPOINT, CLIENTS, SETTINGS, LOCK = "checkpoint", "clients", "settings.json", ".lock"
DISK_FAULTS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
REMEDY = "The last checkpoint is kept: correct this, then `everfed resume` the run"


class RunError(UserError):
    """A folder that is not a run, belongs to another one, or cannot be written."""


class RunHeld(RunError):
    """A run that another process is at."""


class SameRun(RunError):
    """A folder that holds this very run already, finished or not."""


class RunFolder:
    """Paths, readers and writers of one run. opener: opens its files for reading."""

    def __init__(self, path: Path, opener: Opener = open_file) -> None:
        self.path, self._open = path, opener
        self.recipe, self.settings, self.events = path / RECIPE, path / SETTINGS, path / EVENTS
        self.result, self.model, self.checkpoint = path / RESULT, path / MODEL, path / CHECKPOINT
        self.clients = path / CLIENTS
        self.pictures = path / PICTURES  # test samples with the trained model's outputs, where a stream draws any

    @staticmethod
    def create(path: Path, recipe_toml: str, settings: dict[str, Any]) -> RunFolder:
        """A new run folder; one that holds anything else is refused."""
        folder = RunFolder(path)
        with folder._writing(""):
            folder._refuse_taken(recipe_toml)
            make_folder(path)
            write_atomic(folder.settings, json.dumps(settings, indent=2).encode())
            write_atomic(folder.recipe, recipe_toml.encode())
        return folder

    @staticmethod
    @contextmanager
    def new(
        path: Path, recipe_toml: str, settings: dict[str, Any], leads: bool = True, numbered: bool = False
    ) -> Iterator[RunFolder]:
        """A new run folder, locked by this process. It is removed when the run fails before its first phase is done, so
        that nothing is left behind which could not be resumed. leads: False for a process that only takes part in
        another's run (`EngineSection.leads`); it creates and locks nothing. numbered: `path`-2, -3, ... where `path` is
        taken."""
        folder = RunFolder(path)
        if not leads:
            yield folder
            return
        with folder._writing(""):
            if not numbered:
                folder._refuse_taken(recipe_toml)  # before anything is created
            made = [missing for missing in path.parents if not missing.exists()]
        try:
            with folder._writing(""):
                existed = path.exists()
                path = _claimed(path) if numbered else path
                folder = RunFolder(path)
                made = [path, *made] if numbered or not existed else made
                make_folder(path)
            with folder.held(""):
                folder._refuse_taken(recipe_toml)  # another process may have created it meanwhile
                with folder._removed_on_failure():
                    RunFolder.create(path, recipe_toml, settings)
                    yield folder
        except BaseException:
            for empty in made:
                with contextlib.suppress(OSError):
                    empty.rmdir()
            raise

    @staticmethod
    def open(path: Path) -> RunFolder:
        """An existing run folder."""
        folder = RunFolder(path)
        if not path.exists():
            raise RunError(f"{path} does not exist")
        if not folder.recipe.is_file():
            raise RunError(f"{path} is not a run: it has no {RECIPE}")
        return folder

    @contextmanager
    def held(self, remedy: str = REMEDY, leads: bool = True) -> Iterator[None]:
        """Lock the run against other processes, and remove half-written files of a killed one."""
        if not leads:
            yield
            return
        with contextlib.ExitStack() as stack:
            try:
                with self._writing(remedy):
                    stack.enter_context(locked(self.path / LOCK))
            except Locked as error:
                raise RunHeld(f"{self.path} is being run by another process") from error
            self._tidy()
            yield

    def _tidy(self) -> None:
        with self._writing():
            for name in (RECIPE, SETTINGS, MODEL, RESULT):
                remove_temporaries(self.path, f"{name}.*")
            remove_temporaries(self.clients)

    @contextmanager
    def _removed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not self._is_kept(error):
                for path in (self.recipe, self.settings, self.events, self.path / LOCK):
                    with contextlib.suppress(OSError):
                        path.unlink(missing_ok=True)
                for folder in (self.clients, self.checkpoint, self.path / TENSORBOARD):
                    shutil.rmtree(folder, ignore_errors=True)
            raise

    def _is_kept(self, error: BaseException) -> bool:
        """Is there something to resume or to read? A fault is a result, a federation's clients may hold state, and a
        disk that is full keeps what it has."""
        if not self.events.exists():
            return False
        if exit_code(error) == FAULT or isinstance(error, RunError) or self.read_settings().get("federated"):
            return True
        from everfed.store.event_log import read_log  # which imports this module

        return bool(read_log(self.path).phases)

    @staticmethod
    def discard(path: Path) -> None:
        """Remove a run folder, finished or not; anything else is refused."""
        folder = RunFolder(path)
        if not path.exists():
            return
        if not folder.recipe.is_file():
            raise RunError(f"--overwrite: {path} is not a run (it has no {RECIPE}); name another folder")
        with folder.held(""), folder._writing(""):
            shutil.rmtree(path)

    def _refuse_taken(self, recipe_toml: str) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"--out {self.path} is a file; name a folder")
        # listed first: another process that begins this run meanwhile writes its recipe before anything else
        found = list(self.path.iterdir()) if self.path.is_dir() else []
        if self.recipe.exists():
            self._refuse_run(recipe_toml)
        if not all(map(_is_beginning, found)):
            raise RunError(f"--out {self.path} is not empty and not a run; name a new folder")

    def _refuse_run(self, recipe_toml: str) -> None:
        if self.recipe.read_bytes() != recipe_toml.encode():
            raise RunError(
                f"{self.path} belongs to another recipe (compare its {RECIPE}); nothing was overwritten. "
                "Choose another --out, or use --overwrite"
            )
        if self.result.exists():
            raise SameRun(f"{self.path} is a finished run; choose another --out, or use --overwrite to run it again")
        raise SameRun(
            f"{self.path} is an unfinished run of this recipe; go on with `everfed resume {self.path}`, "
            "or use --overwrite"
        )

    def snapshot(self, task: int) -> Path:
        """The model at the end of a task, which counts from 0; the file's name counts from 1."""
        return self.path / f"model-task{task + 1}.safetensors"

    def read_settings(self) -> dict[str, Any]:
        """settings.json: the options of the command line beside the recipe; empty where there is none."""
        return self._read_object(self.settings) or {}

    def read_result(self) -> dict[str, Any] | None:
        """result.json, or None while the run is unfinished."""
        data = self._read_object(self.result)
        if data is not None and not isinstance(data.get("metrics"), dict):
            raise RunError(f"{self.result} is not a result of everfed: it has no metrics. {_REDO}")
        return data

    def read_text(self, path: Path) -> str | None:
        """The content of one of its files; None where it is not there."""
        try:
            with self._open(path) as file:
                return file.read().decode("utf-8")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise RunError(f"{path} is not UTF-8 text: {error}") from error

    def _read_object(self, path: Path) -> dict[str, Any] | None:
        text = self.read_text(path)
        if text is None:
            return None
        remedy = f" {_REDO}" if path == self.result else ""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise RunError(f"{path} is not valid JSON: {error}.{remedy}") from error
        if not isinstance(data, dict):
            raise RunError(f"{path} must hold a JSON object, not {type(data).__name__}.{remedy}")
        return data

    def note(self, **facts: Any) -> None:
        """Add facts about the run to settings.json."""
        with self._writing():
            write_atomic(self.settings, json.dumps({**self.read_settings(), **facts}, indent=2).encode())

    def write_pictures(self, pictures: dict[str, bytes]) -> None:
        """PNG files by name."""
        with self._writing():
            make_folder(self.pictures)
            for name, data in pictures.items():
                write_atomic(self.pictures / f"{name}.png", data)

    def write_model(self, data: bytes, path: Path | None = None) -> None:
        """path: of a snapshot; the trained model's without it."""
        with self._writing():
            write_atomic(path or self.model, data)

    def write_result(self, data: dict[str, Any]) -> None:
        with self._writing():
            write_atomic(self.result, (json.dumps(data, indent=2) + "\n").encode())

    def reopen(self, recipe_toml: str) -> None:
        """Make a finished run one of another recipe, unfinished."""
        with self._writing():
            self.result.unlink(missing_ok=True)
            write_atomic(self.recipe, recipe_toml.encode())

    def fault(self, error: BaseException) -> RunError | None:
        """The error for the user when `error`, or its cause, is a fault of the disk; None when it is not."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UserError):  # a UserError has its own message
            if isinstance(cause, OSError) and self._is_disk_fault(cause):
                return _cannot_write(self.path, cause)
            cause = cause.__cause__
        return None

    def _is_disk_fault(self, error: OSError) -> bool:
        named = str(error.filename or "").startswith(f"{self.path}{os.sep}")
        return error.errno in DISK_FAULTS or (named and error.errno in (errno.EACCES, errno.EPERM))

    @contextmanager
    def _writing(self, remedy: str = REMEDY) -> Iterator[None]:
        with writing(self.path, remedy):
            yield


_REDO = "Remove that file and `everfed resume` the run to write it again"


def _claimed(path: Path) -> Path:
    """`path`, or `path`-2, -3, ...: the first that did not exist. It is created here, so that no two runs get it."""
    make_folder(path.parent)
    for number in itertools.count(1):
        name = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with contextlib.suppress(FileExistsError):
            name.mkdir(FOLDER_MODE)
            return name
    raise AssertionError("unreachable")


def _is_beginning(path: Path) -> bool:
    """Can this file be left by a process that was killed before its run began?"""
    return path.name in (SETTINGS, LOCK) or (path.name.startswith(".") and path.name.endswith(".tmp"))


@contextmanager
def writing(folder: Path, remedy: str = REMEDY) -> Iterator[None]:
    """Turns an OSError into a RunError that names the folder and the remedy."""
    try:
        yield
    except OSError as error:
        raise _cannot_write(folder, error, remedy) from error


def _cannot_write(folder: Path, error: OSError, remedy: str = REMEDY) -> RunError:
    reason = f"cannot write the run folder {folder}: {error.strerror or error}"
    return RunError(f"{reason}. {remedy}" if remedy else reason)
