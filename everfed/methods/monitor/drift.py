"""A drift monitor: suspects that a client's data has changed, when what it reports jumps (Page, 1954; Hinkley).

A model that has learned what a client sees has a falling loss; when the client begins to see something else, it jumps.
So does the feature shift (`features.py`), which needs no labels. Of every client the monitor follows x = log(value),
so that what counts are factors and not differences, and tests whether its mean has risen:

    mean <- mean + (x - mean) / min(n, window)
    sum  <- sum + x - mean - delta          least <- min(least, sum)
    a shift is suspected when  sum - least > threshold,  and the client is followed anew from there

It needs no task boundary. What it suspects is written to the events and the result; no method can read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everfed.core.events import LOSS, Event, Signals
from everfed.core.spans import NAMED, spans
from everfed.methods.monitor.features import SIGNAL as FEATURES

# A loss of 0 has no logarithm; a shift of 1 is what chance makes.
LEAST: Mapping[str, float] = {LOSS: 1e-8, FEATURES: 1.0}


@dataclass(frozen=True)
class Track:
    """The statistic of one client since its last shift."""

    n: int = 0
    mean: float = 0.0
    sum: float = 0.0
    least: float = 0.0


@dataclass(frozen=True)
class PageHinkley:
    """delta: a rise of the mean that is tolerated. threshold: of the statistic. window: observations that the mean
    remembers. warmup: observations before anything is suspected."""

    delta: float = 0.1
    threshold: float = 0.5
    window: int = 5
    warmup: int = 2

    def step(self, track: Track, x: float) -> tuple[Track, bool]:
        """(the track with one more observation, whether the mean has risen)."""
        n = track.n + 1
        mean = track.mean + (x - track.mean) / min(n, self.window)
        total = track.sum + x - mean - self.delta
        now = Track(n, mean, total, min(track.least, total))
        return now, n > self.warmup and now.sum - now.least > self.threshold


@dataclass(frozen=True)
class DriftMonitor:
    """Follows the signals in `watched`. Its state: {"tracks": {signal: {client: numbers}}, "suspected":
    [{"round", "clients", "by": {signal: clients}}, ...]}."""

    detector: PageHinkley = PageHinkley()
    watched: tuple[str, ...] = (LOSS,)

    name = "drift"

    def observe(self, state: dict[str, Any], index: int, signals: Signals) -> list[Event]:
        tracks, by = state.setdefault("tracks", {}), {}
        suspected = state.setdefault("suspected", [])
        for signal in self.watched:
            tracks[signal], risen = self._follow(tracks.get(signal, {}), signal, signals.get(signal, {}))
            if risen:
                by[signal] = risen
        if not by:
            return []
        clients = sorted({client for risen in by.values() for client in risen})
        found = {"clients": _named(clients), "by": {signal: _named(risen) for signal, risen in by.items()}}
        suspected.append({"round": index, **found})
        values = {signal: [signals[signal][client] for client in risen[:NAMED]] for signal, risen in by.items()}
        return [{"event": "drift", **found, "values": values}]

    def _follow(
        self, tracks: Mapping[str, list[float]], signal: str, values: Mapping[int, float]
    ) -> tuple[dict[str, list[float]], list[int]]:
        """(tracks by client with one more observation each, the clients whose mean has risen)."""
        followed, risen = dict(tracks), []
        for client, value in values.items():
            x = math.log(max(value, LEAST[signal]))
            known = followed.get(str(client))
            track, rises = self.detector.step(Track(int(known[0]), *known[1:]) if known else Track(), x)
            if rises:
                risen.append(client)
                track = self.detector.step(Track(), x)[0]
            followed[str(client)] = [track.n, track.mean, track.sum, track.least]
        return followed, risen


def _named(clients: list[int]) -> list[int] | str:
    return clients if len(clients) <= NAMED else spans(clients)
