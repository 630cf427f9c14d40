"""flower-supernode with shorter waits and heartbeats, which wakes the executor when a message arrives.

Flower 1.41 sleeps three seconds when there is no message, and half a second while its app has not replied, and has no
setting for either. It sends a heartbeat every 30 seconds: after a SuperNode was killed, its key is refused until two
intervals have passed. Here all are shorter. Flower-supernode's own arguments follow ours.

    python -m everfed.federation.flower.supernode [--poll SECONDS] [--wake-socket PATH] --superlink HOST:PORT ...
"""

from __future__ import annotations

import sys
import time as clock
from collections.abc import Callable
from typing import Any

from everfed.federation.local import wake

IDLE, REPLY = 3.0, 0.5  # seconds that Flower sleeps: without a message; while its app has not replied
LOOK = 0.02  # seconds between two polls for the reply, which is in this process's own memory
STALL = 30.0  # seconds for an app on this machine to deliver an object that it announced
HEARTBEAT = 15  # seconds; Flower's is 30, its minimum 10


class ShorterSleep:
    """Replaces the `time` module in Flower's loop: its idle sleep is shortened to `poll` seconds."""

    def __init__(self, poll: float) -> None:
        self.poll = poll

    def sleep(self, seconds: float) -> None:
        clock.sleep(min(seconds, LOOK if seconds <= REPLY else self.poll))

    def __getattr__(self, name: str) -> object:
        return getattr(clock, name)


def with_wakeup(pull: Callable[..., int | None], wake_socket: str) -> Callable[..., int | None]:
    """Flower's pull of a message, which wakes the executor when one has arrived, and sends late replies.

    Flower pulls one message and then waits for one reply, whichever comes. A late reply, of an app that was given up,
    takes the place of the next one, and from then on every reply would wait until another message is pulled.
    """

    def pulled(*, state: Any, **named: Any) -> int | None:
        run = pull(state=state, **named)
        if run is None:
            return 0 if has_unsent_reply(state) else None  # after anything but None Flower sends replies
        if wake_socket:
            wake(wake_socket)
        return run

    return pulled


class StallLimit:
    """The SuperNode's object store, which raises for an object that an app announced and has not delivered for
    `seconds`. Flower's loop waits for it for ever, and answers no message meanwhile."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._since = ("", 0.0)  # the object that is waited for, and since when

    def get(self, name: str) -> bytes | None:
        content: bytes | None = self._store.get(name)
        if content == b"":
            if self._since[0] != name:
                self._since = (name, clock.monotonic())
            if clock.monotonic() - self._since[1] > self._seconds:
                raise TimeoutError(f"its app announced an object and did not deliver it for {self._seconds:.0f} s")
        return content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def with_stall_limit(push: Callable[..., None], seconds: float = STALL) -> Callable[..., None]:
    """Flower's push of replies, which gives one up whose objects do not come; the server repeats its request."""

    def pushed(*, object_store: Any, **named: Any) -> None:
        push(object_store=StallLimit(object_store, seconds), **named)

    return pushed


def has_unsent_reply(state: Any) -> bool:
    """Is there a reply that has not been sent?"""
    with state.lock_msg_store:
        entries = list(state.msg_store.values())
    return any(not one.is_retrieved and one.message.metadata.reply_to_message_id for one in entries)


def main() -> None:
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection, start_client_internal
    from flwr.supernode.cli.flower_supernode import flower_supernode

    from everfed.federation.flower.tuning import tune

    ours = {"--poll": str(IDLE), "--wake-socket": ""}
    while sys.argv[1:2] and sys.argv[1] in ours:
        ours[sys.argv[1]] = sys.argv[2]
        del sys.argv[1:3]
    start_client_internal.time = ShorterSleep(float(ours["--poll"]))  # type: ignore[assignment]
    plain = start_client_internal._pull_and_store_message
    start_client_internal._pull_and_store_message = with_wakeup(plain, ours["--wake-socket"])
    start_client_internal._push_messages = with_stall_limit(start_client_internal._push_messages)
    fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    tune()
    flower_supernode()


if __name__ == "__main__":
    main()
