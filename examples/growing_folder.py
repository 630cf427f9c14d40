"""A stream of your own that reads a growing folder: one file per period and client, as they arrive.

    FOLDER/client-0/0001.npz, 0002.npz, ...        arrays x (n, ...) and y (n,)
    FOLDER/client-1/...

`everfed run growing_folder.toml` simulates all clients on what is there. The same function serves a real client, which
calls `make_stream` with its own number only. EVERFED_FOLDER names the folder; EVERFED_WAIT is how many seconds to wait
for the next file before the stream is taken to be over (0, the default, for a folder that is complete).
"""

import os
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from everfed import UserError
from everfed.streams import Period

POLL = 0.2  # seconds between two polls of the folder


def make_stream(client: int) -> Iterator[Period]:
    """The client's files in the order of their names, each once; waits for the next one."""
    root = Path(os.environ.get("EVERFED_FOLDER", "folder"))
    if not root.is_dir():
        raise UserError(f"EVERFED_FOLDER: there is no folder {root.resolve()}")
    done: set[Path] = set()
    while (path := next_file(root / f"client-{client}", done)) is not None:
        done.add(path)
        yield read(path)


def read(path: Path) -> Period:
    """A file as a period. A UserError ends the run with its message alone, wherever the function runs."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return Period(arrays["x"], arrays["y"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: expected an npz with arrays x and y: {error}") from error


def next_file(folder: Path, done: set[Path]) -> Path | None:
    """The first file that is new, waited for; None when none came in time. Write files under another name and rename
    them when they are complete: a file is taken as soon as it is there."""
    deadline = time.monotonic() + float(os.environ.get("EVERFED_WAIT", "0"))
    while True:
        new = sorted(set(folder.glob("*.npz")) - done)
        if new:
            return new[0]
        if time.monotonic() >= deadline:
            return None
        time.sleep(POLL)
