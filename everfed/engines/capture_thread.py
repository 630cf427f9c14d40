"""One thread that captures for all slots, and the moments at which the slots' own threads stand still for it.

cuDNN remembers by thread which kernels it found to be fastest, so that a shape is tuned once for all slots. A capture
is invalidated by some of what other threads do at the same time (a wait for the whole device; and torch's own generator
refuses to draw). So they pause for as long as steps are recorded, which is short; they go on during the trial runs
before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Capturing:
    """wanted: is a capture waiting for the slots' threads, or under way?"""

    def __init__(self) -> None:
        self.wanted = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="capture")
        self._changed = threading.Condition()
        self._working: set[int] = set()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Around all that a slot's thread does on the device."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def pause(self) -> None:
        """To be called between two steps: waits while something is captured."""
        if self.wanted:
            with self._aside():
                pass

    def run(self, function: Callable[..., T], *args: object) -> T:
        """Call `function` in the thread that captures, and wait for it."""
        with self._aside():
            return self._thread.submit(function, *args).result()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """For a function that `run` calls: inside, no slot's thread works."""
        with self._changed:
            self.wanted = True
            self._changed.wait_for(lambda: not self._working)
        try:
            yield
        finally:
            with self._changed:
                self.wanted = False
                self._changed.notify_all()

    def close(self) -> None:
        self._thread.shutdown()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """A thread that works does not, for a while."""
        worked = threading.get_ident() in self._working
        self._leave()
        try:
            yield
        finally:
            if worked:
                self._enter()

    def _enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self.wanted)
            self._working.add(threading.get_ident())

    def _leave(self) -> None:
        with self._changed:
            self._working.discard(threading.get_ident())
            self._changed.notify_all()
