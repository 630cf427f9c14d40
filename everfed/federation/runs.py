"""The runs on a client's disk: the current one, and a few before it.

A client cannot know that a run is over (its server may come back), so it keeps those that were active last. Their order
is stored in a file, because a clock may be wrong.

<folder>/<run>/         one run's state
<folder>/runs.json      the runs, the last active one last
<folder>/.gone.<run>/   a run that is being removed: renamed first, so that half of it is never taken for a run
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from everfed.store.files import sync_folder, write_atomic

KEPT = 5  # runs kept beside the current one
STEPS = "steps"
_ORDER, _GONE = "runs.json", ".gone."
_LOG = logging.getLogger("everfed.client")


def is_run(name: str) -> bool:
    """Can this be a run's identity? It becomes the name of a folder, beside folders and files of other names."""
    return 0 < len(name) <= 64 and set(name) <= set("0123456789abcdef")


class Runs:
    """keep: how many runs are kept beside the current one. One process at a time."""

    def __init__(self, folder: Path, keep: int = KEPT) -> None:
        self.folder, self.keep = folder, keep
        for path in folder.glob(f"{_GONE}*"):  # of a process that was killed while it removed them
            shutil.rmtree(path, ignore_errors=True)

    def mark_active(self, run: str) -> None:
        """Record that this run made a step, and remove the oldest runs."""
        order = self._order()
        if order[-1:] != [run]:
            order = [*(other for other in order if other != run), run]
            write_atomic(self.folder / _ORDER, json.dumps(order).encode())
        others = [other for other in self._known(order) if other != run]
        for other in others[: max(0, len(others) - self.keep)]:
            self._remove(other)

    def known(self) -> list[str]:
        """All runs on disk, the one that was active last at the end."""
        return self._known(self._order())

    def _order(self) -> list[str]:
        """The runs in the stored order; none if the file is damaged."""
        with suppress(OSError, ValueError):
            found = json.loads((self.folder / _ORDER).read_bytes())
            if isinstance(found, list):
                return [name for name in found if isinstance(name, str) and (self.folder / name / STEPS).is_dir()]
        return []

    def _known(self, order: list[str]) -> list[str]:
        """All runs on disk, the oldest first; those without a stored order come before all others."""
        here = sorted(path.parent.name for path in self.folder.glob(f"*/{STEPS}") if is_run(path.parent.name))
        return [*(name for name in here if name not in order), *(name for name in order if is_run(name))]

    def _remove(self, run: str) -> None:
        """A run that cannot be removed is logged and tried again the next time."""
        gone = self.folder / f"{_GONE}{run}"
        try:
            os.rename(self.folder / run, gone)
            sync_folder(self.folder)
            shutil.rmtree(gone)
        except OSError as error:
            _LOG.warning("run %s cannot be removed: %s", run, error)
        else:
            _LOG.warning("run %s was removed: %d runs were active after it (--keep-runs)", run, self.keep + 1)
