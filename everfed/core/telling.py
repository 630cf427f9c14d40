"""What a run says of its phases while it runs, and to the watchers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from everfed.core import compact
from everfed.core.divergence import mean_losses
from everfed.core.intake import Intake
from everfed.core.part import Part, overrides
from everfed.core.phase import EVALUATE, TRAIN, Phase
from everfed.core.run_state import RunState
from everfed.core.stream import RoundPlan
from everfed.core.watch import LOSS, Seen, Watcher
from everfed.core.world import Moment

Event = dict[str, Any]


class Teller:
    """Makes events of what happened, and lets the watchers look at the losses and at what parts have for them."""

    def __init__(
        self, notify: Callable[[Event], None], watchers: Sequence[Watcher], parts: Sequence[Part], state: RunState
    ) -> None:
        self.notify, self.watchers, self.state = notify, tuple(watchers), state
        self._signalling = [part for part in parts if overrides(part, "signals")]

    def phase(self, phase: Phase, moment: Moment, intake: Intake, down: int, started: float) -> None:
        """One repeat of a phase is done. Raises Diverged instead, when a client's loss is not finite."""
        # reading the losses waits for a device that is still at work, so the time is taken afterwards
        losses = mean_losses(phase, moment, intake.trained) if intake.trained else None
        event: Event = {
            "event": "phase",
            **_where(moment, phase.name),
            "repeats": phase.repeat,
            **_who(phase, moment.plan),
            "bytes_up": sum(intake.traffic.up.values()),
            "bytes_down": down,
            "seconds": time.monotonic() - started,
        }
        if phase.name == TRAIN:
            event |= moment.plan.notes
        if losses is not None:
            event |= {"loss": float(losses.mean()), "trained": len(intake.trained)}
        self.notify({**event, **_absences(intake)})
        if losses is not None and self.watchers:
            by_client = {one.client: loss for one, loss in zip(intake.trained, losses.tolist(), strict=True)}
            self._watch(moment, {LOSS: by_client, **self._signals(intake)})

    def measured(self, moment: Moment, phase: str, part: str, values: dict[str, float]) -> None:
        """What a part measures."""
        self.notify({"event": "measure", **_where(moment, phase), "part": part, **values})

    def not_scored(self, moment: Moment, intake: Intake) -> None:
        """Clients that were not there to score a model."""
        if intake.absent:
            self.notify({"event": "absent", "round": moment.round, "phase": EVALUATE, **_absences(intake)})

    def _signals(self, intake: Intake) -> dict[str, dict[int, float]]:
        """What parts have for the watchers."""
        found = [part.signals(intake.reduction.result_of(part.name)) for part in self._signalling]
        return {signal: values for own in found for signal, values in own.items()}

    def _watch(self, moment: Moment, seen: Seen) -> None:
        """Let the watchers look, and tell what they say."""
        for watcher in self.watchers:
            memory = self.state.watched.get(watcher.name, {})
            self.state.watched[watcher.name], said = watcher.watch(memory, moment.round, seen)
            for event in said:
                self.notify({"round": moment.round, "task": moment.plan.task, **event})


def _where(moment: Moment, phase: str) -> Event:
    return {"round": moment.round, "task": moment.plan.task, "phase": phase, "repeat": moment.repeat}


def _who(phase: Phase, plan: RoundPlan) -> Event:
    """The clients of a phase, and their tasks where they differ from the round's; in short where they are many."""
    clients = phase.clients(plan)
    tasks = [plan.tasks.get(client, plan.task) for client in clients]
    few = len(clients) <= compact.NAMED
    event: Event = {"clients": list(clients) if few else compact.spans(clients)}
    if any(task != plan.task for task in tasks):
        event["tasks"] = tasks if few else compact.repeats(tasks)
    return event


def _absences(intake: Intake) -> Event:
    """For an event: who did not count, and why."""
    named = {str(client): f"{one.kind}: {one.reason}" for client, one in intake.absent.items()}
    return {"absent": named} if named else {}
