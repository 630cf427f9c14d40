"""Makes the plan of every round: participants, the task of each client, tasks that begin and end, drift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from everfed.core.spans import NAMED, spans
from everfed.core.stream import RoundPlan
from everfed.streams import attendance, clocks
from everfed.streams.options import OptionError, Options


class Calendar:
    """The plans of a stream with `tasks` tasks of R = `rounds_per_task` rounds each. Evaluation is after rounds R, 2R,
    ..., also where clients have clocks of their own."""

    def __init__(self, options: Options, tasks: int, rounds_per_task: int, seed: int) -> None:
        self.clients, self.tasks, self.rounds_per_task = options.clients, tasks, rounds_per_task
        self.rounds, self.boundaries, self.drift = tasks * rounds_per_task, options.boundaries, options.drift
        if options.drift > rounds_per_task:
            raise OptionError("drift", f"{options.drift} rounds are more than a task has: {rounds_per_task}")
        common = np.arange(tasks + 1) * rounds_per_task
        self.clocks: clocks.Clocks | None = None
        if options.asynchronous is not None:
            made = clocks.make(options.asynchronous, self.clients, tasks, rounds_per_task, seed)
            self.clocks = None if (made.first == common).all() else made  # without jitter it is the synchronous stream
        # one row for all clients where they share a clock, whatever their number
        self._first = common[None] if self.clocks is None else self.clocks.first
        self._server = common if self.clocks is None else self.clocks.server
        self.attendance = attendance.make(
            options.participation, options.availability, options.deadline, self.clients, self.rounds, seed
        )

    @property
    def asynchronous(self) -> bool:
        """Do clients change tasks at different rounds?"""
        return self.clocks is not None and not self.clocks.together

    @property
    def fingerprint(self) -> str:
        """Of all files that were read."""
        return (self.clocks.fingerprint if self.clocks else "") + self.attendance.fingerprint

    @property
    def _simple(self) -> bool:
        """Are all clients always available, and in the same task?"""
        return self.clocks is None and self.attendance.there is None and not self.drift

    def within(self, client: int, index: int) -> tuple[int, int]:
        """(rounds of the client's task before `index`, rounds that the task lasts)."""
        begin, end = self._row(client)[self.task_of(client, index) :][:2].tolist()
        return index - begin, end - begin

    def task_of(self, client: int, index: int) -> int:
        """The client's task in round `index`."""
        return int((self._row(client)[1:-1] <= index).sum())

    def _row(self, client: int) -> np.ndarray:
        """The first rounds of a client's tasks, and where the run ends."""
        return np.asarray(self._first[client if len(self._first) > 1 else 0])

    def coming(self, client: int, index: int) -> float:
        """The share of its samples that a client already sees of its next task: it grows over the last `drift` rounds
        of a task, from 1 / (drift + 1) to drift / (drift + 1)."""
        if not self.drift or self.task_of(client, index) == self.tasks - 1:
            return 0.0
        behind, lasts = self.within(client, index)
        return max(0, self.drift - (lasts - behind) + 1) / (self.drift + 1)

    def plan(self, index: int) -> RoundPlan:
        """The plan of round `index`. With hidden boundaries `begins` and `ends` are empty."""
        if not 0 <= index < self.rounds:
            raise IndexError(f"round {index} is not within 0..{self.rounds - 1}")
        participants, late = self.attendance.chosen(index)
        notes: Mapping[str, Any] = {"late": list(late) if len(late) <= NAMED else spans(late)} if late else {}
        if self._simple:
            return self._common_plan(index, participants, notes)
        return self._own_plan(index, participants, notes)

    def _common_plan(self, index: int, participants: tuple[int, ...], notes: Mapping[str, Any]) -> RoundPlan:
        task, within = divmod(index, self.rounds_per_task)
        clients = tuple(range(self.clients))
        last = within == self.rounds_per_task - 1
        return RoundPlan(
            task=task,
            participants=participants,
            tasks=dict.fromkeys(clients, task),
            begins=clients if within == 0 and self.boundaries else (),
            ends=clients if last and self.boundaries else (),
            evaluate=last,
            notes=notes,
        )

    def _own_plan(self, index: int, participants: tuple[int, ...], notes: Mapping[str, Any]) -> RoundPlan:
        there = self.attendance.present(index)
        rows = there if len(self._first) > 1 else np.zeros_like(there)
        tasks = (self._first[:, 1:-1] <= index).sum(axis=1)[rows]
        begun, ending = self._first[rows, tasks], self._first[rows, tasks + 1] == index + 1
        starts = ~self.attendance.was_there(there, begun, index)  # a task begins for a client when it first sees it
        server, at_server = self._server, int((self._server[1:-1] <= index).sum())
        own = dict(zip(there.tolist(), tasks.tolist(), strict=True))
        return RoundPlan(
            task=index // self.rounds_per_task,
            participants=participants,
            tasks=own,
            begins=tuple(there[starts].tolist()) if self.boundaries else (),
            ends=tuple(there[ending].tolist()) if self.boundaries else (),
            evaluate=(index + 1) % self.rounds_per_task == 0,
            notes=notes,
            server_task=at_server if self.boundaries else None,
            opens=self.boundaries and bool(server[at_server] == index),
            closes=self.boundaries and bool(server[at_server + 1] == index + 1),
            drifting=frozenset(client for client in own if self.coming(client, index)) if self.drift else frozenset(),
        )
