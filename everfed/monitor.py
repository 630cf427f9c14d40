"""A drift monitor: suspects, from each client's training loss alone, that its data has changed (Page, 1954; Hinkley).

A model that has learned what a client sees has a falling loss; when the client begins to see something else, it jumps.
Of every client the monitor follows x = log(loss), so that what counts are factors and not differences, and tests
whether its mean has risen:

    mean <- mean + (x - mean) / min(n, window)
    sum  <- sum + x - mean - delta          least <- min(least, sum)
    a shift is suspected when  sum - least > threshold,  and the client is followed anew from there

It needs no task boundary and nothing from clients that they do not report anyway. What it suspects is told in the
events and the result; no method can read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everfed.core.compact import NAMED, spans
from everfed.core.watch import Memory

SMALLEST = 1e-8  # a loss of 0 has no logarithm


@dataclass(frozen=True)
class Track:
    """What is known of a client since its last shift."""

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
    """Watches a run. Remembers {"tracks": {client: numbers}, "suspected": [{"round", "clients"}, ...]}."""

    detector: PageHinkley = PageHinkley()

    name = "drift"

    def watch(self, memory: Memory, index: int, losses: Mapping[int, float]) -> tuple[Memory, list[dict[str, Any]]]:
        tracks, suspected = dict(memory.get("tracks", {})), []
        for client, loss in losses.items():
            x = math.log(max(loss, SMALLEST))
            known = tracks.get(str(client))
            track, risen = self.detector.step(Track(*known) if known else Track(), x)
            if risen:
                suspected.append(client)
                track = self.detector.step(Track(), x)[0]
            tracks[str(client)] = [track.n, track.mean, track.sum, track.least]
        told = list(memory.get("suspected", ()))
        if not suspected:
            return {"tracks": tracks, "suspected": told}, []
        clients = suspected if len(suspected) <= NAMED else spans(suspected)
        event = {"event": "drift", "clients": clients, "losses": [losses[client] for client in suspected[:NAMED]]}
        return {"tracks": tracks, "suspected": [*told, {"round": index, "clients": clients}]}, [event]
