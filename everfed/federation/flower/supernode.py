"""flower-supernode with shorter waits and a faster heart, which tells the executor of a new message.

Flower 1.41 sleeps three seconds whenever there was no message, and half a second whenever its app has not answered, and
has no setting for either. And it says every half minute that it is alive: one that was killed is missed, and its key
refused, until two such times have passed. Here all are shorter. Its arguments are flower-supernode's own, after ours.

    python -m everfed.federation.flower.supernode [--poll SECONDS] [--wake-socket PATH] --superlink HOST:PORT ...
"""

from __future__ import annotations

import sys
import time as clock
from collections.abc import Callable
from typing import Any

from everfed.federation.local import wake

IDLE, REPLY = 3.0, 0.5  # what Flower sleeps: without a message; while its app has not answered
LOOK = 0.02  # for the answer, which is looked for in this process's own memory
HEARTBEAT = 15  # seconds, the interval that is promised to the SuperLink; Flower's is 30, the least it takes is 10


class ShorterSleep:
    """Stands in for the `time` module inside Flower's loop: its idle sleep is cut to `poll` seconds."""

    def __init__(self, poll: float) -> None:
        self.poll = poll

    def sleep(self, seconds: float) -> None:
        clock.sleep(min(seconds, LOOK if seconds <= REPLY else self.poll))

    def __getattr__(self, name: str) -> object:
        return getattr(clock, name)


def with_wakeup(pull: Callable[..., int | None], wake_socket: str) -> Callable[..., int | None]:
    """Flower's pull of a message, which tells whoever waits at `wake_socket` when one is here as a whole, and lets no reply
    lie.

    Flower pulls one message and then waits for one reply, whichever comes. One that comes late, of an app that was
    given up, takes the place of the next, and from then on every reply would lie until another message is pulled.
    """

    def pulled(*, state: Any, **named: Any) -> int | None:
        run = pull(state=state, **named)
        if run is None:
            return 0 if has_unsent_reply(state) else None  # anything but None leads on to the replies
        if wake_socket:
            wake(wake_socket)
        return run

    return pulled


def has_unsent_reply(state: Any) -> bool:
    """Is there a reply that was not sent?"""
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
    fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    tune()
    flower_supernode()


if __name__ == "__main__":
    main()
