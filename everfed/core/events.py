"""What a run reports while it runs: events, drift monitors that read them, and the check that losses stay finite."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from everfed.core.context import Place
from everfed.core.engine import Replies, Trained
from everfed.core.option import declared_options
from everfed.core.part import Part
from everfed.core.phase import EVALUATE, TRAIN, Phase
from everfed.core.spans import NAMED, repeats, spans
from everfed.core.stream import RoundPlan
from everfed.core.tree import Tree
from everfed.errors import Fault

Event = dict[str, Any]
Observer = Callable[[Event], None]  # what is told everything that happens
LOSS = "loss"
Signals = Mapping[str, Mapping[int, float]]  # signal -> client -> value; "loss": its mean step loss; others: from parts


class Diverged(Fault):
    """A loss is no longer finite."""


class Monitor(Protocol):
    """An observer: reads what clients report of their training, emits events, and changes nothing.

    Its state is JSON-ready and saved with the run's, so that a resumed run emits the same events. A method cannot read
    a monitor; a run with one has the same numbers as without.
    """

    name: str

    def observe(self, state: dict[str, Any], index: int, signals: Signals) -> list[Event]:
        """After the training of round `index`: the events to emit. `state` is the monitor's own, empty at first; it is
        changed in place."""


@runtime_checkable
class Reports(Protocol):
    """A part with numbers by client for monitors."""

    def signals(self, reduced: Tree) -> dict[str, dict[int, float]]:
        """{signal: {client: value}} from what its `train` replies were reduced to."""


class Reporter:
    """Emits the events of phases, and runs the monitors on losses and on the parts' signals. watched: the monitors' own
    state, by name."""

    def __init__(
        self,
        notify: Observer,
        monitors: Sequence[Monitor],
        parts: Sequence[Part],
        watched: dict[str, dict[str, Any]],
    ) -> None:
        self.notify, self.monitors, self.watched = notify, tuple(monitors), watched
        self._reporting = [part for part in parts if isinstance(part, Reports)]
        self._weights = weights_of(parts)

    def phase(self, phase: Phase, place: Place, replies: Replies, down: int, started: float) -> None:
        """Emit that one repeat of a phase is done. Raises Diverged instead, when a client's loss is not finite."""
        # reading the losses waits for a device that is still at work, so the time is taken afterwards
        losses = mean_losses(phase, place, replies.trained, self._weights) if replies.trained else None
        event: Event = {
            "event": "phase",
            **_where(place, phase.name),
            "repeats": phase.repeat,
            **_who(phase, place.plan),
            "bytes_up": sum(replies.traffic.up.values()),
            "bytes_down": down,
            "seconds": time.monotonic() - started,
        }
        if phase.name == TRAIN:
            event |= place.plan.notes
        if losses is not None:
            event |= {"loss": float(losses.mean()), "trained": len(replies.trained)}
        self.notify({**event, **_absences(replies)})
        if losses is not None and self.monitors:
            by_client = {one.client: loss for one, loss in zip(replies.trained, losses.tolist(), strict=True)}
            self._observe(place, {LOSS: by_client, **self._signals(replies)})

    def measured(self, place: Place, phase: str, part: str, values: Mapping[str, float]) -> None:
        """Emit what a part reported."""
        self.notify({"event": "measure", **_where(place, phase), "part": part, **values})

    def not_scored(self, place: Place, replies: Replies) -> None:
        """Emit which clients were absent from scoring."""
        if replies.absent:
            self.notify({"event": "absent", "round": place.round, "phase": EVALUATE, **_absences(replies)})

    def _signals(self, replies: Replies) -> Signals:
        found = [part.signals(replies.reduction.result_of(part.name)) for part in self._reporting]
        return {signal: values for own in found for signal, values in own.items()}

    def _observe(self, place: Place, signals: Signals) -> None:
        for monitor in self.monitors:
            for event in monitor.observe(self.watched.setdefault(monitor.name, {}), place.round, signals):
                self.notify({"round": place.round, "task": place.plan.task, **event})


def _where(place: Place, phase: str) -> Event:
    return {"round": place.round, "task": place.plan.task, "phase": phase, "repeat": place.repeat}


def _who(phase: Phase, plan: RoundPlan) -> Event:
    """The clients of a phase, and their tasks where they differ from the round's; as compact text if they are many."""
    clients = phase.clients(plan)
    tasks = [plan.tasks.get(client, plan.task) for client in clients]
    few = len(clients) <= NAMED
    event: Event = {"clients": list(clients) if few else spans(clients)}
    if any(task != plan.task for task in tasks):
        event["tasks"] = tasks if few else repeats(tasks)
    return event


def _absences(replies: Replies) -> Event:
    """For an event: who did not count, and why."""
    named = {str(client): f"{one.kind}: {one.reason}" for client, one in replies.absent.items()}
    return {"absent": named} if named else {}


# losses ---------------------------------------------------------------------------------------------------------------
def weights_of(parts: Sequence[Part]) -> list[str]:
    """The keys of the terms' weights in a method, with their values: what makes a loss diverge where it is too high."""
    found = [(part, name, declared) for part in parts for name, declared in declared_options(type(part))]
    values = [(f"method.{part.name}.{name}", getattr(part, name), f"{name} {told.about}") for part, name, told in found]
    weights = [(key, value) for key, value, about in values if re.search(r"(weight|strength|regulariser)\b", about)]
    return [f"{key} ({value:g})" for key, value in weights if isinstance(value, float) and value > 0]


def mean_losses(phase: Phase, place: Place, trained: list[Trained], weights: Sequence[str] = ()) -> Tensor:
    """(clients,) float64, each client's mean step loss; reads the device once. Raises Diverged."""
    sums = torch.stack([torch.as_tensor(one.loss).detach() for one in trained]).cpu().double()
    steps = torch.tensor([one.steps for one in trained], dtype=torch.float64)
    bad = [one.client for one, total in zip(trained, sums.tolist(), strict=True) if not math.isfinite(total)]
    if bad:
        raise Diverged(
            f"the loss of client {bad[0]} is not finite in phase {phase.name!r} of round {place.round + 1} "
            f"({len(bad)} of {len(trained)} clients); lower {' or '.join(['train.optimizer.lr', *weights])}"
        )
    return sums / steps


def check_finite(phase: Phase, place: Place, measured: Mapping[str, float]) -> None:
    """Raises Diverged when a number measured in the server's own phase is not finite."""
    bad = [name for name, value in measured.items() if not math.isfinite(value)]
    if bad:
        raise Diverged(
            f"{bad[0]} is not finite in the server's phase {phase.name!r} of round {place.round + 1}, repeat "
            f"{place.repeat}; lower the learning rate of part {phase.owner!r}, or its weights"
        )
