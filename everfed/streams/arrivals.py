"""Replies as they arrive, on a virtual clock: a round ends with its K-th reply, and clients go on meanwhile.

`concurrency` clients train at any time. Whoever replies is replaced at once by a client that is drawn among the idle
ones and receives the newest model; the reply of a client counts once a round, so it may begin again after the round at
the earliest. A client needs its median time (as with `deadline`) times a factor that changes from round to round.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from everfed.streams.attendance import latencies
from everfed.streams.draws import generator
from everfed.streams.options import OptionError, require_number, require_whole

_OPTIONS = ("buffer", "concurrency", "latency", "spread", "noise")


@dataclass
class Arrived:
    """What happens in one round. began: the clients that reply in it, with the round whose model they received. starts:
    those that receive its model. seconds: when it ends."""

    began: dict[int, int] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Arrivals:
    """All rounds of a run. awaited: by round, the rounds whose model a client still trains with after it."""

    rounds: tuple[Arrived, ...]
    awaited: tuple[frozenset[int], ...]
    fingerprint: str = ""


def check(options: Any, clients: int) -> None:
    """Raises OptionError for an option `arrivals` that is not allowed."""
    if not isinstance(options, Mapping):
        raise OptionError("arrivals", f"expected a table such as {{ buffer = 5, concurrency = 10 }}, got {options!r}")
    for name in options:
        if name not in _OPTIONS:
            raise OptionError(f"arrivals.{name}", f"is not an option here; allowed: {', '.join(_OPTIONS)}")
    for name in ("buffer", "concurrency"):
        require_whole(f"arrivals.{name}", options.get(name))
        if options[name] > clients:
            raise OptionError(f"arrivals.{name}", f"{options[name]} is more than there are clients: {clients}")
    if options["buffer"] > options["concurrency"]:
        raise OptionError("arrivals.buffer", "is more than concurrency: a round would wait for replies for ever")
    for name in ("spread", "noise"):
        require_number(f"arrivals.{name}", options.get(name, 0.0), least=0.0)
    if not isinstance(options.get("latency", 1.0), str):
        require_number("arrivals.latency", options.get("latency", 1.0), above=0.0)


def make(options: Mapping[str, Any], clients: int, rounds: int, seed: int) -> Arrivals:
    """The course of a run, from its first round to its last."""
    check(options, clients)
    median, mark = latencies("arrivals", options, clients, seed)
    noise, buffer = options.get("noise", 0.2), options["buffer"]
    found = [Arrived() for _ in range(rounds)]
    training: list[tuple[float, int, int]] = []  # (when it replies, client, round of its model)
    idle = set(range(clients))

    def fill(index: int, now: float) -> None:
        """Draw clients until `concurrency` train, as far as there are idle ones."""
        rng = generator(seed, "arrivals", index, len(found[index].began))
        takes = median * np.exp(noise * generator(seed, "latency", index).standard_normal(clients))
        for client in rng.permutation(sorted(idle))[: options["concurrency"] - len(training)].tolist():
            idle.remove(client)
            found[index].starts.append(client)
            heapq.heappush(training, (now + float(takes[client]), client, index))

    fill(0, 0.0)
    for index, arrived in enumerate(found):
        while len(arrived.began) < buffer:
            arrived.seconds, client, since = heapq.heappop(training)
            arrived.began[client] = since
            if len(arrived.began) < buffer:
                fill(index, arrived.seconds)
        idle.update(arrived.began)
        if index + 1 < rounds:
            fill(index + 1, arrived.seconds)
    return Arrivals(tuple(found), _awaited(found), mark)


def _awaited(found: list[Arrived]) -> tuple[frozenset[int], ...]:
    """Clients that never reply within the run are not waited for."""
    last = {since: index for index, arrived in enumerate(found) for since in arrived.began.values()}
    return tuple(frozenset(s for s in range(i + 1) if last.get(s, -1) > i) for i in range(len(found)))
