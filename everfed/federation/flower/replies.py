"""Replies of untrusted clients, each pulled in a thread of its own: one that is half there holds nobody up.

A reply is announced before its objects are sent, and the objects may never come, or be no message.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from everfed.federation.flower.internals import ObjectPushError, RunNotRunningException
from everfed.federation.transport import Failure

GRACE = 1.0  # seconds that `collect` waits for a reply from when its pull was begun: most are there by then
UNUSABLE = "its reply may not be used"
# a push that an outage interrupts counts as lost: its objects are dropped with the run
LOST = (httpx.HTTPError, RunNotRunningException, ObjectPushError, OSError)
Reply = Message | Failure


@dataclass
class OpenPull:
    """A reply that is being pulled. dropped: nothing waits for it any more."""

    started: float
    dropped: threading.Event = field(default_factory=threading.Event)


class ReplyThreads:
    """Runs a pull in a thread for each ticket."""

    def __init__(self) -> None:
        self._open: dict[str, OpenPull] = {}  # by the message that is replied to
        self._finished: list[tuple[str, Reply] | BaseException] = []
        self._changed = threading.Condition()

    def start(self, ticket: str, work: Callable[[threading.Event], Reply | None]) -> None:
        """Begin a pull. work: returns the reply, None if there is none yet; its argument is set when nothing waits for
        it any more."""
        pull = OpenPull(time.monotonic())
        with self._changed:
            self._open[ticket] = pull
        threading.Thread(target=self._run, args=(pull, ticket, work), name="pull", daemon=True).start()

    def _run(self, pull: OpenPull, ticket: str, work: Callable[[threading.Event], Reply | None]) -> None:
        error: BaseException | None = None
        reply: Reply | None = None
        try:
            reply = work(pull.dropped)
        except BaseException as raised:  # raised again by the next `collect`
            error = raised
        with self._changed:
            if self._open.get(ticket) is pull:
                del self._open[ticket]
                self._finished += [error] if error is not None else [(ticket, reply)] if reply is not None else []
            self._changed.notify_all()

    def collect(self) -> list[tuple[str, Reply]]:
        """The replies that are complete, by ticket; other pulls go on. Raises what the connection raises."""
        with self._changed:
            while (left := self._grace()) > 0:
                self._changed.wait(left)
            finished, self._finished = self._finished, []
        for one in finished:
            if isinstance(one, BaseException):
                raise one
        return [one for one in finished if isinstance(one, tuple)]

    def _grace(self) -> float:
        """Seconds for which the youngest unfinished reply is still waited for."""
        newest = max((one.started for one in self._open.values()), default=float("-inf"))
        return newest + GRACE - time.monotonic()

    def wait(self, seconds: float) -> None:
        """Until a pull is over, or for so long."""
        with self._changed:
            if not self._finished:
                self._changed.wait(seconds)

    def forget(self, tickets: Iterable[str]) -> None:
        """Stop pulling the replies to these."""
        with self._changed:
            for ticket in tickets:
                if ticket in self._open:
                    self._open.pop(ticket).dropped.set()

    def close(self) -> None:
        """Stop pulling. The threads of Flower's pulls would keep this process from ending."""
        self.forget(list(self._open))


class OneByOne(ReplyThreads):
    """Flower's public Grid, as a ServerApp gets it. Its own pull returns all replies together, waits for the slowest,
    and raises for one that cannot be read. limit: not known to it."""

    outages, limit = 0, 0

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.get_nodes, self.push_messages, self._pull = grid.get_nodes, grid.push_messages, grid.pull_messages

    def pull(self, tickets: list[str]) -> list[tuple[str, Reply]]:
        """The replies that are complete."""
        for ticket in [ticket for ticket in tickets if ticket not in self._open]:
            self.start(ticket, lambda dropped, ticket=ticket: self._one(ticket))  # type: ignore[misc]
        return self.collect()

    def _one(self, ticket: str) -> Reply | None:
        try:
            return next(iter(self._pull([ticket])), None)
        except LOST:
            raise
        except Exception as error:  # untrusted bytes in Flower's decoders may raise anything
            return Failure(f"{UNUSABLE}: {type(error).__name__}: {error}"[:300], own=True)
