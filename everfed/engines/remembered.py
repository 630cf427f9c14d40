"""What was measured on this machine and is not measured again: lists of numbers by key, in a file of the user's cache
folder. Only speed hangs on it, so a file that cannot be read or written is as good as none."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

from everfed.core import random
from everfed.store.files import write_atomic


class Remembered:
    """One such file."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def path(self) -> Path:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everfed" / self.name

    def find(self, key: str, count: int) -> list[float] | None:
        """The `count` numbers under `key`; None where there are none, or something else."""
        found = self._read().get(key)
        return found if found is not None and len(found) == count and all(map(math.isfinite, found)) else None

    def put(self, key: str, numbers: Iterable[float]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps({**self._read(), key: list(numbers)}).encode())
        except OSError:
            return

    def _read(self) -> dict[str, list[float]]:
        try:
            found = json.loads(self.path.read_text())
            return {str(k): [float(n) for n in v] for k, v in found.items() if isinstance(v, list)}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}


def key_of(*parts: object) -> str:
    """A key for these facts on this machine: a home folder may serve several."""
    return f"{random.key(*(str(part) for part in (*parts, platform.node(), torch.__version__))):x}"
