"""Availability, sampling and deadlines of clients.

availability  clients come and go: by rounds in a table or a file, or at random. An absent client takes part in no
              phase, and keeps its state until it returns.
participation the share of available clients that is sampled for a round.
deadline      more clients are sampled than needed (`oversample`), each takes a simulated time to reply, and the round
              goes on with the first replies; later clients, and those beyond the deadline, are dropped and reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from everfed.streams import traces
from everfed.streams.draws import cohort_size, generator
from everfed.streams.options import OptionError, require_choice, require_number

_AVAILABILITY: Mapping[str, tuple[str, ...]] = {
    "file": ("path",),
    "table": ("rounds",),
    "chance": ("leave", "come"),
}
_DEADLINE = ("seconds", "latency", "spread", "noise", "oversample")


def _windows(entry: Any) -> Iterable[Sequence[Any]]:
    return [(begin, "" if end is None else end) for begin, end in entry]


PRESENCE = traces.Form(("client", "from", "to"), _windows, "[[0, 10], [60, null]]")
LATENCIES = traces.Form(("client", "seconds"), lambda entry: [(entry,)], "2.5")


@dataclass(frozen=True)
class Deadline:
    """seconds: how long the server waits. median: (clients,) median seconds of each client. noise: deviation of the
    logarithm from round to round. oversample: clients sampled per client needed."""

    seconds: float
    median: np.ndarray
    noise: float
    oversample: float


@dataclass(frozen=True)
class Attendance:
    """there: (clients, rounds) availability, None for all clients always. fingerprint: of the files read."""

    clients: int
    share: float
    seed: int
    there: np.ndarray | None = None
    deadline: Deadline | None = None
    fingerprint: str = ""
    _before: np.ndarray | None = field(default=None, repr=False)

    def present(self, index: int) -> np.ndarray:
        """The clients that are available in round `index`, ascending."""
        return np.arange(self.clients) if self.there is None else np.flatnonzero(self.there[:, index])

    def was_there(self, clients: np.ndarray, since: np.ndarray, index: int) -> np.ndarray:
        """(clients,) whether each of them was available in a round from its `since` on and before `index`."""
        if self._before is None:
            return np.asarray(since < index)
        return np.asarray(self._before[clients, index] > self._before[clients, since])

    def chosen(self, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(participants of round `index`, sampled clients that are too late), both ascending."""
        present = self.present(index)
        needed = min(len(present), cohort_size(len(present), self.share))
        count = needed
        if self.deadline is not None:
            count = min(len(present), math.ceil(self.deadline.oversample * needed - 1e-9))
        if count < len(present):
            present = np.sort(generator(self.seed, "participation", index).choice(present, size=count, replace=False))
        if self.deadline is None:
            return tuple(present.tolist()), ()
        return self._in_time(self.deadline, present, needed, index)

    def _in_time(
        self, deadline: Deadline, sampled: np.ndarray, needed: int, index: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        noise = generator(self.seed, "latency", index).standard_normal(self.clients)[sampled]
        takes = deadline.median[sampled] * np.exp(deadline.noise * noise)
        order = np.argsort(takes, kind="stable")
        first = order[: min(needed, int((takes <= deadline.seconds).sum()))]
        late = np.setdiff1d(np.arange(len(sampled)), first)
        return tuple(sampled[np.sort(first)].tolist()), tuple(sampled[late].tolist())


def make(
    share: float,
    availability: Mapping[str, Any] | None,
    deadline: Mapping[str, Any] | None,
    clients: int,
    rounds: int,
    seed: int,
) -> Attendance:
    """The attendance that the options describe."""
    there, mark = (None, "") if availability is None else _presence(availability, clients, rounds, seed)
    limit, other = (None, "") if deadline is None else _deadline(deadline, clients, seed)
    before = None
    if there is not None:
        before = np.concatenate([np.zeros((clients, 1), np.int32), np.cumsum(there, axis=1, dtype=np.int32)], axis=1)
    return Attendance(clients, share, seed, there, limit, mark + other, before)


def check_availability(options: Any) -> None:
    """Raises OptionError for an option `availability` that is not allowed."""
    if not isinstance(options, Mapping):
        raise OptionError(
            "availability", f"expected a table such as {{ kind = 'file', path = '...' }}, got {options!r}"
        )
    require_choice("availability.kind", options.get("kind"), tuple(_AVAILABILITY))
    _known("availability", options, ("kind", *_AVAILABILITY[options["kind"]]))
    for name in ("leave", "come"):
        require_number(f"availability.{name}", options.get(name, 0.1), above=0.0, to=1.0)


def check_deadline(options: Any) -> None:
    """Raises OptionError for an option `deadline` that is not allowed."""
    if not isinstance(options, Mapping) or "seconds" not in options:
        raise OptionError("deadline", f"expected a table such as {{ seconds = 60, latency = 20 }}, got {options!r}")
    _known("deadline", options, _DEADLINE)
    require_number("deadline.seconds", options["seconds"], above=0.0)
    require_number("deadline.oversample", options.get("oversample", 1.0), least=1.0)
    for name in ("spread", "noise"):
        require_number(f"deadline.{name}", options.get(name, 0.0), least=0.0)
    if not isinstance(options.get("latency", 1.0), str):
        require_number("deadline.latency", options.get("latency", 1.0), above=0.0)


def _known(key: str, options: Mapping[str, Any], allowed: Sequence[str]) -> None:
    for name in options:
        if name not in allowed:
            raise OptionError(f"{key}.{name}", f"is not an option here; allowed: {', '.join(allowed)}")


def _presence(options: Mapping[str, Any], clients: int, rounds: int, seed: int) -> tuple[np.ndarray, str]:
    check_availability(options)
    if options["kind"] == "chance":
        leave, come = options.get("leave", 0.1), options.get("come", 0.1)
        return by_chance(clients, rounds, leave, come, generator(seed, "availability")), ""
    if options["kind"] == "file":
        rows, mark = traces.read("availability.path", str(options.get("path", "")), PRESENCE, clients)
    else:
        rows, mark = traces.table_rows("availability.rounds", options.get("rounds"), PRESENCE, clients), ""
    there = np.ones((clients, rounds), dtype=bool)
    there[sorted({row.client for row in rows})] = False
    for row in rows:
        begin, end = row.whole(0), rounds if row.cells[1] == "" else row.whole(1)
        if end <= begin:
            raise row.refuse(f"the end (round {end}) must be after the beginning (round {begin})")
        there[row.client, begin:end] = True
    return there, mark


def by_chance(clients: int, rounds: int, leave: float, come: float, rng: np.random.Generator) -> np.ndarray:
    """(clients, rounds): an available client leaves after a round with probability `leave`, an absent one returns with
    probability `come`; the first round is drawn from the stationary distribution."""
    draws = rng.random((rounds, clients))
    there = np.empty((clients, rounds), dtype=bool)
    now = draws[0] < come / (come + leave)
    for index in range(rounds):
        if index:
            now = np.where(now, draws[index] >= leave, draws[index] < come)
        there[:, index] = now
    return there


def _deadline(options: Mapping[str, Any], clients: int, seed: int) -> tuple[Deadline, str]:
    check_deadline(options)
    median, mark = latencies("deadline", options, clients, seed)
    return Deadline(options["seconds"], median, options.get("noise", 0.2), options.get("oversample", 1.0)), mark


def latencies(key: str, options: Mapping[str, Any], clients: int, seed: int) -> tuple[np.ndarray, str]:
    """((clients,) median seconds of each client: drawn, or from a file; the file's fingerprint)."""
    latency, mark = options.get("latency", 1.0), ""
    if isinstance(latency, str):
        rows, mark = traces.read(f"{key}.latency", latency, LATENCIES, clients)
        if not rows:
            raise OptionError(f"{key}.latency", f"{latency} names no client")
        median = np.full(clients, np.median([row.number(0) for row in rows]))  # for those that are not named
        for row in rows:
            median[row.client] = row.number(0)
        return median, mark
    return latency * np.exp(options.get("spread", 0.5) * generator(seed, "latencies").standard_normal(clients)), mark
