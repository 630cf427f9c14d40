"""flower-supernode with a shorter wait between two looks for messages, and a faster heart.

Flower 1.41 sleeps three seconds whenever there was no message and has no setting for it; that alone is half of what a
phase costs. And it says every half minute that it is alive: one that was killed is missed, and its key refused, until
two such times have passed. Here both are shorter. Its arguments are flower-supernode's own, after --poll SECONDS.

    python -m everfed.federation.flower.supernode --poll 0.5 --superlink HOST:PORT ...
"""

from __future__ import annotations

import sys
import time as clock

IDLE = 3.0  # what Flower sleeps
HEARTBEAT = 15  # seconds, the interval that is promised to the SuperLink; Flower's is 30, the least it takes is 10


class ShorterSleep:
    """Stands in for the `time` module inside Flower's loop: its idle sleep is cut to `poll` seconds."""

    def __init__(self, poll: float) -> None:
        self.poll = poll

    def sleep(self, seconds: float) -> None:
        clock.sleep(min(seconds, self.poll))

    def __getattr__(self, name: str) -> object:
        return getattr(clock, name)


def main() -> None:
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection, start_client_internal
    from flwr.supernode.cli.flower_supernode import flower_supernode

    poll = IDLE
    if sys.argv[1:2] == ["--poll"]:
        poll = float(sys.argv[2])
        del sys.argv[1:3]
    start_client_internal.time = ShorterSleep(poll)  # type: ignore[assignment]
    fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    flower_supernode()


if __name__ == "__main__":
    main()
