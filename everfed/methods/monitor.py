"""The drift monitor of a recipe's [monitor] table: suspects that a client's data has changed, when what the client
reports jumps (Page, 1954; Hinkley).

A model that has learned what a client sees has a falling loss; when the client begins to see something else, it jumps.
So does the feature shift below, which needs no labels. Of every client the monitor follows x = log(value), so that what
counts are factors and not differences, and tests whether its mean has risen:

    mean <- mean + (x - mean) / min(n, window)
    sum  <- sum + x - mean - delta          least <- min(least, sum)
    a shift is suspected when  sum - least > threshold,  and the client is followed anew from there

It needs no task boundary. What it suspects is written to the events and the result; no method can read it.

Feature shift: how far a client's data has moved, as a fixed network sees it; one number per client and round.

The network is the run's own with its first weights, which every client has from the recipe: while the shared model is
trained its features move with every round, and no less than they do when the data changes. Of up to `samples` samples
of the round it makes features, what its last layer is given. With their mean m and their total variance s2 (the
variances of all features, added up), a client remembers a running mean r, a running total variance v, and the error
that sampling alone leaves in r, as a share q of the variance:

    shift = |m - r| / sqrt((s2 + v) / 2  (1/n + q))                 before they are updated by
    r <- (1 - a) r + a m      v <- (1 - a) v + a s2      q <- (1 - a)^2 q + a^2 / n      a = 1 / min(rounds, window)

For samples of one distribution the mean of shift^2 is 1, whatever n, the window or the number of features; a mean that
has moved by d, in units of the root of the total variance, adds d^2 / (1/n + q). So 1 is what chance makes, and after
a shift of more than 3 the reference begins anew.

The reference stays on the client. What leaves it is the shift alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from everfed.core.events import LOSS, Event, Monitor, Signals
from everfed.core.method import Method
from everfed.core.option import RiseOptions
from everfed.core.spans import NAMED, spans
from everfed.core.trainer import Trainer
from everfed.method import Client, Collect, Part, Server, option
from everfed.methods.common.layers import head_inputs, in_precision

if TYPE_CHECKING:
    from everfed.recipe.schema import MonitorSection

FEATURES = "features"  # the signal of the feature shift
SMALLEST = 1e-12  # features that never vary have no scale
BEYOND_CHANCE = 3.0
# A loss of 0 has no logarithm; a shift of 1 is what chance makes.
LEAST: Mapping[str, float] = {LOSS: 1e-8, FEATURES: 1.0}


def _watched(section: MonitorSection) -> tuple[str, ...]:
    if section.kind == "none":
        return ()
    return (LOSS, FEATURES) if section.watch == "both" else (section.watch,)


def reporting(method: Method, section: MonitorSection) -> Method:
    """The method with the part that reports feature shifts, where the recipe asks for them."""
    if FEATURES not in _watched(section):
        return method
    return Method(method.name, (*method.parts, FeatureShift(section.samples)), method.warnings)


def monitors(section: MonitorSection) -> list[Monitor]:
    """The monitors that a recipe asks for."""
    watched = _watched(section)
    return [DriftMonitor(section.as_options(PageHinkley), watched)] if watched else []


# the monitor ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Track:
    """The statistic of one client since its last shift."""

    n: int = 0
    mean: float = 0.0
    sum: float = 0.0
    least: float = 0.0


@dataclass(frozen=True)
class PageHinkley(RiseOptions):
    """Suspects a rise of the mean of what it observes."""

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


# feature shift --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Reference:
    """What a client remembers, as tensors on one device: rounds, v and q are 0-d, r is (features,)."""

    rounds: Tensor
    mean: Tensor
    variance: Tensor
    error: Tensor

    @staticmethod
    def first(features: Tensor) -> Reference:
        """After a first round with features (n, F)."""
        mean, variance = features.mean(0), features.var(0).sum()
        return Reference(torch.ones_like(variance), mean, variance, torch.full_like(variance, 1 / len(features)))

    def moved(self, features: Tensor) -> Tensor:
        """0-d: the shift of features (n, F) against this reference."""
        scale = (features.var(0).sum() + self.variance) / 2 * (1 / len(features) + self.error)
        return (features.mean(0) - self.mean).norm() / scale.clamp(min=SMALLEST).sqrt()

    def updated(self, features: Tensor, window: int) -> Reference:
        """With one more round in it, or with that round alone after a shift beyond chance."""
        new = Reference.first(features)
        rounds = (self.rounds + 1).clamp(max=window)
        a = torch.where(self.moved(features) > BEYOND_CHANCE, 1.0, 1 / rounds)  # no branch: that would wait for the GPU
        error = (1 - a) ** 2 * self.error + a**2 * new.error
        mean, variance = self.mean.lerp(new.mean, a), self.variance.lerp(new.variance, a)
        return Reference(torch.where(a == 1, new.rounds, rounds), mean, variance, error)


@dataclass(frozen=True)
class FeatureShift(Part):
    samples: int = option(about="drawn in every round, at most")
    window: int = option(5, about="rounds that a client's reference remembers")

    name = "monitor"

    def reducers(self):
        return {"shift": Collect(tells="how far the features of a client's samples have moved")}

    def receive(self, client: Client) -> None:
        """Reference and shift after this round's samples; one alone has no variance, and an unsent shift no use."""
        own, x = client.state, client.own_data.x
        own.pop("shift", None)
        if len(x) < 2 or not client.synchronises:
            return
        rows = np.sort(client.rng("monitor").permutation(len(x))[: self.samples])
        features = first_features(client.trainer, x[torch.from_numpy(rows).to(x.device)])
        if not own:
            client.state = vars(Reference.first(features))
            return
        known = Reference(*(own[key].to(features.device) for key in Reference.__dataclass_fields__))
        client.state = {**vars(known.updated(features, self.window)), "shift": known.moved(features)}

    def reply(self, client: Client):
        shift = client.state.get("shift")
        return {} if shift is None or not client.synchronises else {"shift": shift}

    def signals(self, reduced: Mapping[str, Any]) -> dict[str, dict[int, float]]:
        shifts = reduced.get("shift") or {}
        return {FEATURES: {client: float(value) for client, value in shifts.items()}} if shifts else {}

    def update(self, server: Server) -> None:
        shifts = self.signals(server.reduced).get(FEATURES, {}).values()
        if shifts:
            server.report("mean shift", sum(shifts) / len(shifts))
            server.report("largest shift", max(shifts))


def first_features(trainer: Trainer, x: Tensor) -> Tensor:
    """(n, F) of samples in storage form, by the network with its first weights: what its last layer is given, averaged
    over positions; the outputs of a network without `head` and without a linear layer. Eval mode, no gradients."""
    trainer.replica.load(trainer.made("monitor", "first model", trainer.first_model))
    module = trainer.replica.module.eval()
    last = last_layer(module)
    noted: AbstractContextManager[list[Tensor]] = head_inputs(module, layer=last) if last else nullcontext([])
    with torch.no_grad(), in_precision(trainer), noted as seen:
        outputs = module(trainer.stream.inputs(x.to(trainer.device)))
    return pooled((seen[0] if seen else outputs).float())


def last_layer(module: nn.Module) -> nn.Module | None:
    """The layer called `head`, or the last linear one."""
    if isinstance(head := getattr(module, "head", None), nn.Module):
        return head
    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    return linear[-1] if linear else None


def pooled(features: Tensor) -> Tensor:
    """(n, F) of (n, F), of maps (n, F, height, width) or of sequences (n, length, F); of anything else, flattened."""
    if features.dim() == 4:
        return features.mean((2, 3))
    return features.mean(1) if features.dim() == 3 else features.flatten(1)
