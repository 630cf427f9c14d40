"""A SuperNode that runs no app: it passes everfed's messages to the worker on this machine and returns the answers.

Flower's own SuperNode fetches the app of a run, and any process of the machine may take tasks from its port and run the
app. Here no app is fetched, nothing is run, and no port is opened. A run that was not submitted with everfed's app, by
the hash of the bundle, is refused.

    python -m everfed.federation.flower.supernode --superlink HOST:PORT --worker SOCKET --insecure
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Error, Message

from everfed.federation.flower.app import bundle
from everfed.federation.flower.internals import (
    ObjectPullError,
    RunNotRunningException,
    fetch_objects,
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
    push_objects,
)
from everfed.federation.flower.pulling import TooLarge, Unreadable, bounded, inflated
from everfed.federation.flower.records import APP_RAISED, FOREIGN_APP, from_records, to_records
from everfed.federation.local import call_worker
from everfed.federation.logs import log_to_stderr
from everfed.federation.packet import FRAME_LIMIT, Packet

HEARTBEAT = 15  # seconds; Flower's is 30, its minimum 10: after a kill the key is refused for two intervals
_LOG = logging.getLogger("everfed.supernode")


@dataclass(frozen=True)
class Link:
    """A SuperNode's calls to the SuperLink."""

    receive: Callable[[], tuple[Message, Any] | None]
    send: Callable[[Message, Any, float], tuple[set[str], str]]
    get_run: Callable[[int], Any]
    pull_object: Callable[[int, str], bytes]
    push_object: Callable[[int, str, str, bytes], None]
    confirm: Callable[[int, str], None]


class SuperNode:
    """ask: sends a packet to the worker and returns its answer. limit: bytes of one message."""

    def __init__(self, link: Link, ask: Callable[[Packet], Packet], limit: int = FRAME_LIMIT) -> None:
        self.link, self.ask, self.limit = link, ask, limit
        self._apps: dict[int, str] = {}  # run -> the hash of its app

    def step(self) -> bool:
        """Receive and answer one message; False when there is none. A message whose objects or whose answer cannot be
        transferred stays unanswered: the server repeats the request."""
        try:
            arrived = self.link.receive()
            if arrived is None:
                return False
            started = time.monotonic()
            reply = self._answer(*arrived)
            self._send(reply, time.monotonic() - started)
        except RunNotRunningException:
            _LOG.info("the run of a message has ended; the message was dropped")
        except (httpx.HTTPStatusError, ObjectPullError) as error:
            _LOG.warning("a message could not be transferred: %s", error)
        return True

    def _answer(self, message: Message, tree: Any) -> Message:
        run = message.metadata.run_id
        if self._app(run) != bundle().hash_str:
            reason = f"run {run} was submitted with an app that is not everfed's (hash {self._app(run)[:16]})"
            _LOG.warning("refused: %s", reason)
            return Message(Error(FOREIGN_APP, reason), reply_to=message)
        try:
            packet = from_records(self._content(message, tree))
            return Message(to_records(self.ask(packet)), reply_to=message)
        except (TooLarge, Unreadable, ValueError, OSError, EOFError) as error:
            _LOG.warning("a message failed: %s: %s", type(error).__name__, error)
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(APP_RAISED, reason), reply_to=message)

    def _app(self, run: int) -> str:
        if run not in self._apps:
            self._apps = {run: str(self.link.get_run(run).fab_hash)}  # one at a time is enough
        return self._apps[run]

    def _content(self, message: Message, tree: Any) -> Any:
        run, name = message.metadata.run_id, message.metadata.message_id
        fetch = bounded(functools.partial(self.link.pull_object, run), self.limit)
        contents = fetch_objects([one.object_id for one in iterate_object_tree(tree)], fetch)
        self.link.confirm(run, name)
        return inflated(name, message.metadata.reply_to_message_id, contents).content

    def _send(self, reply: Message, seconds: float) -> None:
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            wanted, session = self.link.send(reply, get_object_tree(reply), seconds)
            push = functools.partial(self.link.push_object, reply.metadata.run_id, session)
            push_objects(get_all_nested_objects(reply), push, object_ids_to_push=wanted)


@contextmanager
def connected(server: str, root: Path | None, key: Path | None) -> Iterator[Link]:
    """A connection to the SuperLink, with heartbeats. Ends this process with Flower's message if it is refused."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection

    fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    private: Any = load_ssh_private_key(key.read_bytes(), None) if key else None
    keys = (private, private.public_key()) if private else None
    certificate = str(root) if root else None
    with fleet_http_connection.http_request_response(server, root is None, certificate, keys) as calls:
        _, receive, send, get_run, _, pull_object, push_object, confirm = calls
        yield Link(receive, send, get_run, pull_object, push_object, confirm)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="everfed-supernode", description=__doc__.splitlines()[0])
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT", help="the SuperLink, or the proxy before it")
    parser.add_argument("--worker", required=True, metavar="PATH", help="the worker's unix socket")
    parser.add_argument("--poll", type=float, default=0.5, metavar="S", help="seconds between two polls for messages")
    parser.add_argument("--limit", type=int, default=FRAME_LIMIT, metavar="BYTES", help="of one message")
    parser.add_argument("--root-certificates", type=Path, default=None, metavar="FILE", help="the authority's")
    parser.add_argument("--key", type=Path, default=None, metavar="FILE", help="this client's private key")
    parser.add_argument("--insecure", action="store_true", help="neither TLS nor a key")
    chosen = parser.parse_args(arguments)
    if chosen.insecure == (chosen.root_certificates is not None):
        parser.error("give --root-certificates or --insecure")
    os.umask(0o077)
    log_to_stderr()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # the node is deactivated on the way out
    with connected(chosen.superlink, chosen.root_certificates, chosen.key) as link:
        _LOG.info("connected to %s", chosen.superlink)
        node = SuperNode(link, lambda packet: call_worker(chosen.worker, packet), chosen.limit)
        while True:
            if not node.step():
                time.sleep(chosen.poll)
    sys.exit(1)  # Flower's connection ends the block on an error, which it has logged


if __name__ == "__main__":
    main()
