"""The run folder: what a run leaves behind, and the only place that knows its file names."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from everfed.errors import UserError
from everfed.store.files import write_atomic

RECIPE, EVENTS, RESULT, MODEL, REPORT = "recipe.toml", "events.jsonl", "result.json", "model.safetensors", "report.html"
CHECKPOINT, CLIENTS, SETTINGS, LOCK = "checkpoint", "clients", "settings.json", ".lock"


class RunError(UserError):
    """A folder that is not a run, or belongs to another one."""


class RunFolder:
    """Paths and writers of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def create(path: Path, recipe_toml: str, settings: dict[str, Any]) -> RunFolder:
        """A new run folder. An existing one is taken only when it holds the same recipe and no result yet."""
        folder = RunFolder(path)
        if path.exists() and not path.is_dir():
            raise RunError(f"--out {path} is a file; name a folder")
        if folder.recipe.exists():
            folder._refuse_other(recipe_toml)
        elif path.is_dir() and any(found.name != SETTINGS for found in path.iterdir()):
            raise RunError(f"--out {path} is not empty and not a run; name a new folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_atomic(folder.settings, json.dumps(settings, indent=2).encode())
            write_atomic(folder.recipe, recipe_toml.encode())
        except OSError as error:
            raise RunError(f"cannot write the run folder {path}: {error.strerror or error}") from error
        return folder

    @staticmethod
    def open(path: Path) -> RunFolder:
        """An existing run folder."""
        folder = RunFolder(path)
        if not folder.recipe.is_file():
            raise RunError(f"{path} is not a run: it has no {RECIPE}")
        return folder

    def discard(self) -> None:
        """Take back what `create` wrote."""
        for path in (self.recipe, self.settings, self.path / LOCK):
            path.unlink(missing_ok=True)

    def _refuse_other(self, recipe_toml: str) -> None:
        if self.recipe.read_text() != recipe_toml:
            raise RunError(
                f"{self.path} belongs to another recipe (compare its {RECIPE}); nothing was overwritten. "
                "Choose another --out, or remove the folder"
            )
        if self.result.exists():
            raise RunError(f"{self.path} is a finished run; choose another --out, or remove the folder to run it again")
        raise RunError(f"{self.path} is an unfinished run of this recipe; go on with `everfed resume {self.path}`")

    @property
    def recipe(self) -> Path:
        return self.path / RECIPE

    @property
    def settings(self) -> Path:
        return self.path / SETTINGS

    @property
    def result(self) -> Path:
        return self.path / RESULT

    @property
    def model(self) -> Path:
        return self.path / MODEL

    @property
    def checkpoint(self) -> Path:
        return self.path / CHECKPOINT

    @property
    def clients(self) -> Path:
        return self.path / CLIENTS

    def read_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads(self.settings.read_text()) if self.settings.exists() else {}
        return settings

    def read_result(self) -> dict[str, Any] | None:
        """result.json, or None while the run is unfinished."""
        if not self.result.exists():
            return None
        try:
            data: dict[str, Any] = json.loads(self.result.read_text())
        except ValueError as error:
            raise RunError(f"{self.result} is not valid JSON: {error}") from error
        return data

    def write_result(self, data: dict[str, Any]) -> None:
        write_atomic(self.result, (json.dumps(data, indent=2) + "\n").encode())


class EventLog:
    """events.jsonl: append-only, one JSON object per line. After a resume, later lines of a round supersede earlier."""

    def __init__(self, path: Path) -> None:
        _end_half_line(path)
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - closed by close()

    def __call__(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps({"time": round(time.time(), 3), **event}) + "\n")

    def close(self) -> None:
        self._file.close()


def _end_half_line(path: Path) -> None:
    """A killed run may leave half a line; end it, so that the next event starts on its own."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with open(path, "rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
