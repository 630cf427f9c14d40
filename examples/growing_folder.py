"""A stream of your own that reads a growing folder: one file per period and client, as they arrive.

    FOLDER/client-0/0001.npz, 0002.npz, ...        arrays x (n, ...) and y (n,)
    FOLDER/client-1/...

`everfed run growing_folder.toml` simulates all clients on what is there. The same function serves a real client, which
calls `make_stream` with its own number only. EVERFED_FOLDER names the folder; EVERFED_WAIT is how many seconds to wait
for the next file before the stream is taken to be over (0, the default, for a folder that is complete).
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from everfed.streams import Period

POLL = 0.2  # seconds between two looks at the folder


def make_stream(client: int) -> Iterator[Period]:
    """The client's files in the order of their names, each once; waits for the next one."""
    folder = Path(os.environ.get("EVERFED_FOLDER", "folder")) / f"client-{client}"
    done: set[Path] = set()
    while (path := next_file(folder, done)) is not None:
        done.add(path)
        with np.load(path, allow_pickle=False) as arrays:
            yield Period(arrays["x"], arrays["y"])


def next_file(folder: Path, done: set[Path]) -> Path | None:
    """The first file that is new, waited for; None when none came in time. Write files under another name and rename
    them when they are complete: a file is taken as soon as it is there."""
    patience = time.monotonic() + float(os.environ.get("EVERFED_WAIT", "0"))
    while True:
        new = sorted(set(folder.glob("*.npz")) - done)
        if new:
            return new[0]
        if time.monotonic() >= patience:
            return None
        time.sleep(POLL)
