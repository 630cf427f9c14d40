"""The runs that a client remembers: the one that goes on, and a few before it.

A client is never told that a run is over (its server may come back), so it forgets by a rule: of the others, those that
went on last are kept. The order is written down; a clock may be wrong.

<folder>/<run>/         one run's state
<folder>/runs.json      the runs in the order in which they last went on
<folder>/.gone.<run>/   a run that is being removed: renamed first, so that no half of it is ever taken for a run
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from everfed.store.files import sync_folder, write_atomic

KEPT = 5  # how many runs are remembered beside the one that goes on
STEPS = "steps"
_ORDER, _GONE = "runs.json", ".gone."
_LOG = logging.getLogger("everfed.site")


def is_run(name: str) -> bool:
    """May this be a run's identity? It names a folder."""
    return name.isalnum() and name.isascii() and len(name) <= 64


class Runs:
    """keep: how many are remembered beside the one that goes on. One process at a time."""

    def __init__(self, folder: Path, keep: int = KEPT) -> None:
        self.folder, self.keep = folder, keep
        for path in folder.glob(f"{_GONE}*"):  # of a process that was killed while it removed them
            shutil.rmtree(path, ignore_errors=True)

    def mark_active(self, run: str) -> None:
        """A step of this run is on disk; forget what lies too far back."""
        order = self._order()
        if order[-1:] != [run]:
            order = [*(other for other in order if other != run), run]
            write_atomic(self.folder / _ORDER, json.dumps(order).encode())
        others = [other for other in self._known(order) if other != run]
        for other in others[: max(0, len(others) - self.keep)]:
            self._forget(other)

    def _order(self) -> list[str]:
        """As it was written down; what is damaged says nothing."""
        with suppress(OSError, ValueError):
            found = json.loads((self.folder / _ORDER).read_bytes())
            if isinstance(found, list):
                return [name for name in found if isinstance(name, str) and (self.folder / name / STEPS).is_dir()]
        return []

    def _known(self, order: list[str]) -> list[str]:
        """All runs on disk, the oldest first; those that never went on come before all others."""
        here = sorted(path.parent.name for path in self.folder.glob(f"*/{STEPS}") if is_run(path.parent.name))
        return [*(name for name in here if name not in order), *(name for name in order if is_run(name))]

    def _forget(self, run: str) -> None:
        """A run that cannot be removed is tried again the next time: no reason for a step to fail."""
        gone = self.folder / f"{_GONE}{run}"
        try:
            os.rename(self.folder / run, gone)
            sync_folder(self.folder)
            shutil.rmtree(gone)
        except OSError as error:
            _LOG.warning("run %s cannot be removed: %s", run, error)
        else:
            _LOG.warning("run %s is forgotten: %d went on after it (--keep-runs)", run, self.keep + 1)
