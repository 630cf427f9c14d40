"""events.jsonl, folded line by line into what a run has measured so far.

Bytes may arrive in any pieces, so the same code reads a finished file and follows one that is being written. After a
resume the rounds since the checkpoint are run again: their new lines supersede the old ones, and old lines of rounds
that were not reached again are dropped, so that what is held is always one consistent run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from everfed.core.spans import from_repeats, from_spans

TRAIN = "train"
INTERRUPTION = "KeyboardInterrupt"
CHUNK = 1 << 20  # bytes read at a time
LONGEST_LINE = 16 << 20  # a longer one is no event; what lies before the next line end is dropped

Opener = Callable[[Path], BinaryIO]
T = TypeVar("T")


def open_file(path: Path) -> BinaryIO:
    """The way files are opened unless the caller has another."""
    return open(path, "rb")


@dataclass(frozen=True, slots=True)
class PhaseLine:
    """One phase of one round. clients: who was asked, None where the log holds only their number, `asked`. tasks: the
    task each of them was in, None where all were in the round's. trained: how many of them trained, None for phases
    that do not train. late: who was chosen as well and dropped for being too late."""

    round: int
    task: int
    phase: str
    clients: tuple[int, ...] | None
    tasks: tuple[int, ...] | None
    asked: int
    trained: int | None
    loss: float | None
    bytes_up: int
    bytes_down: int
    seconds: float
    late: tuple[int, ...] = ()

    @property
    def skipped(self) -> int:
        """Clients that were asked to train and did not: no data, or no reply."""
        return 0 if self.trained is None else max(0, self.asked - self.trained)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores after a round. accuracy[i]: on task i, None where not measured. score: their mean over tasks seen."""

    round: int
    task: int
    task_end: bool
    accuracy: tuple[float | None, ...]
    score: float | None


@dataclass(frozen=True, slots=True)
class Note:
    """Something that happened to the run: a fault, a warning, a resume, or an event this version does not know."""

    kind: str
    time: float | None
    round: int
    message: str


@dataclass(frozen=True, slots=True)
class Start:
    """The announcement of a run, repeated at each resume. round: where it began or went on."""

    method: str
    recipe: str
    seed: int
    rounds: int
    tasks: int
    clients: int
    round: int


@dataclass
class Log:
    """Everything that the lines read so far say."""

    start: Start | None = None
    phases: dict[tuple[int, str, int], PhaseLine] = field(default_factory=dict)  # by (round, phase, repeat)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)  # by round
    buffers: dict[int, tuple[int, ...]] = field(default_factory=dict)  # round -> samples in buffers, by task
    shifts: dict[int, tuple[int, ...]] = field(default_factory=dict)  # round -> clients whose data may have changed
    shifts_by: dict[int, dict[str, tuple[int, ...]]] = field(default_factory=dict)  # the same by what gave them away
    measures: dict[str, dict[int, float]] = field(default_factory=dict)  # "part: what" -> by round, the last of it
    buffers_of: tuple[int, int] | None = None  # (clients that were looked at, all), where these are not the same
    notes: list[Note] = field(default_factory=list)
    lines: int = 0
    unreadable: int = 0
    first_time: float | None = None
    last_time: float | None = None
    last_kind: str = ""
    rounds_done: int = 0
    skipped: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    loss: float | None = None
    score: str = ""  # what evaluations measure; empty before the first
    slowest: float = 0.0  # seconds of the longest phase
    _half: bytes = b""
    _resumed: bool = False
    _cohorts: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    # reading -----------------------------------------------------------------------------------------------------
    def feed(self, data: bytes) -> None:
        """Take further bytes of the file. A line that is not ended yet waits for the rest."""
        *lines, self._half = (self._half + data).split(b"\n")
        for line in lines:
            if line.strip():
                self._line(line)
        if len(self._half) > LONGEST_LINE:
            self._half = b"?"  # no JSON begins like this, so the rest of the line is counted as unreadable

    def _line(self, line: bytes) -> None:
        self.lines += 1
        try:
            event = json.loads(line)
            self._take(event)
        except (ValueError, KeyError, TypeError, AttributeError):
            self.unreadable += 1

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        _TAKERS.get(kind, Log._take_other)(self, event)
        self.last_kind = kind
        when = event.get("time")
        if isinstance(when, int | float):
            self.last_time = float(when)
            self.first_time = self.last_time if self.first_time is None else self.first_time

    # events ------------------------------------------------------------------------------------------------------
    def _take_start(self, event: dict[str, Any]) -> None:
        names = ("seed", "rounds", "tasks", "clients", "round")
        numbers = [int(event.get(name, 0)) for name in names]
        self.start = Start(str(event["method"]), str(event.get("recipe", "")), *numbers)
        # without a checkpoint a run that was killed begins anew
        self._drop_from(self.start.round + 1 if self._resumed else 0)
        self._resumed = False

    def _drop_from(self, first: int) -> None:
        """Forget the rounds from `first` on; they will be run again."""
        self.phases = {key: line for key, line in self.phases.items() if key[0] < first}
        self.evaluations = _before(first, self.evaluations)
        self.buffers = _before(first, self.buffers)
        self.shifts, self.shifts_by = _before(first, self.shifts), _before(first, self.shifts_by)
        self.measures = {name: _before(first, values) for name, values in self.measures.items()}
        lines = self.phases.values()
        self.rounds_done = self.start.round if self.start and first else 0
        self.skipped = sum(line.skipped for line in lines)
        self.bytes_up = sum(line.bytes_up for line in lines)
        self.bytes_down = sum(line.bytes_down for line in lines)

    def _take_phase(self, event: dict[str, Any]) -> None:
        line = self._phase_line(event)
        key = (line.round, line.phase, int(event.get("repeat", 0)))
        old = self.phases.get(key)
        self.phases[key] = line
        for sign, known in ((-1, old), (1, line)):
            if known is not None:
                self.skipped += sign * known.skipped
                self.bytes_up += sign * known.bytes_up
                self.bytes_down += sign * known.bytes_down
        if line.phase == TRAIN:
            self.rounds_done = line.round + 1
        self.loss = self.loss if line.loss is None else line.loss
        self.slowest = max(self.slowest, line.seconds)

    def _phase_line(self, event: dict[str, Any]) -> PhaseLine:
        clients, phase = event["clients"], str(event["phase"])
        named = None if isinstance(clients, int) else self._cohort(clients, from_spans)
        tasks = self._cohort(event["tasks"], from_repeats) if "tasks" in event else None
        return PhaseLine(
            round=int(event["round"]),
            task=int(event["task"]),
            phase=phase,
            clients=named,
            tasks=tasks if tasks and named and len(tasks) == len(named) else None,
            asked=len(named) if named is not None else int(clients),
            trained=int(event.get("trained", 0)) if phase == TRAIN else None,
            loss=_number(event.get("loss")),
            bytes_up=int(event["bytes_up"]),
            bytes_down=int(event["bytes_down"]),
            seconds=float(event["seconds"]),
            late=self._cohort(event.get("late", []), from_spans),
        )

    def _cohort(self, told: list[Any] | str, read: Callable[[str], tuple[int, ...]]) -> tuple[int, ...]:
        """A list of numbers, or many of them in short. Equal ones are kept once: with full participation every round
        has the same."""
        cohort = read(told) if isinstance(told, str) else tuple(int(number) for number in told)
        return self._cohorts.setdefault(cohort, cohort)

    def _take_evaluation(self, event: dict[str, Any]) -> None:
        accuracy = tuple(_number(value) for value in event["accuracy"])
        index = int(event["round"])
        self.score = str(event.get("score", "accuracy"))
        self.evaluations[index] = Evaluation(
            index, int(event["task"]), bool(event.get("task_end")), accuracy, _number(event.get("acc"))
        )

    def _take_buffer(self, event: dict[str, Any]) -> None:
        self.buffers[int(event["round"])] = tuple(int(count) for count in event["by_task"])
        looked, of = int(event.get("clients", 0)), int(event.get("of", 0))
        self.buffers_of = (looked, of) if looked < of else None

    def _take_measure(self, event: dict[str, Any]) -> None:
        for key, value in event.items():
            number = _number(value)
            if key not in ("time", "round", "task", "repeat") and number is not None:
                self.measures.setdefault(f"{event['part']}: {key}", {})[int(event["round"])] = number

    def _take_drift(self, event: dict[str, Any]) -> None:
        index = int(event["round"])
        self.shifts[index] = self._cohort(event["clients"], from_spans)
        by = event.get("by", {"loss": event["clients"]})
        self.shifts_by[index] = {str(signal): self._cohort(clients, from_spans) for signal, clients in by.items()}

    def _take_resume(self, event: dict[str, Any]) -> None:
        self._resumed = True
        self._note("resume", event, f"went on from round {int(event['round']) + 1}")

    def _take_said(self, event: dict[str, Any]) -> None:
        self._note(event["event"], event, str(event["message"]))

    def _take_quiet(self, event: dict[str, Any]) -> None:
        """Checkpoints and the end say nothing that is not known from elsewhere."""

    def _take_other(self, event: dict[str, Any]) -> None:
        """An event that this version does not know is shown as it is."""
        rest = {key: value for key, value in event.items() if key not in ("time", "event", "message")}
        said = event.get("message")
        self._note(str(event["event"]), event, str(said) if said else ", ".join(f"{k} {v}" for k, v in rest.items()))

    def _note(self, kind: str, event: dict[str, Any], message: str) -> None:
        self.notes.append(Note(kind, _number(event.get("time")), self.rounds_done, message))

    # what follows from it ----------------------------------------------------------------------------------------
    @property
    def faults(self) -> list[Note]:
        return [note for note in self.notes if note.kind == "fault" and not note.message.startswith(INTERRUPTION)]

    @property
    def interrupted(self) -> bool:
        """Was the last thing that happened an interruption by the user?"""
        return self.last_kind == "fault" and self.notes[-1].message.startswith(INTERRUPTION)

    @property
    def failed(self) -> bool:
        return self.last_kind == "fault" and not self.interrupted

    def rounds(self) -> list[int]:
        """The rounds that trained, ascending."""
        return sorted({index for index, phase, _ in self.phases if phase == TRAIN})

    def seconds_by_phase(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for line in self.phases.values():
            seconds[line.phase] = seconds.get(line.phase, 0.0) + line.seconds
        return seconds


def _before(first: int, values: dict[int, T]) -> dict[int, T]:
    """What belongs to rounds before `first`."""
    return {index: value for index, value in values.items() if index < first}


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if value - value == 0 else None


_TAKERS: dict[str, Callable[[Log, dict[str, Any]], None]] = {
    "start": Log._take_start,
    "phase": Log._take_phase,
    "evaluation": Log._take_evaluation,
    "buffer": Log._take_buffer,
    "drift": Log._take_drift,
    "measure": Log._take_measure,
    "resume": Log._take_resume,
    "warning": Log._take_said,
    "fault": Log._take_said,
    "checkpoint": Log._take_quiet,
    "end": Log._take_quiet,
}


class Tail:
    """Follows one events.jsonl by its byte offset; a file that was replaced or cut is read again from its start."""

    def __init__(self, path: Path) -> None:
        self.path, self.log = path, Log()
        self._offset, self._file_id = 0, (0, 0)

    def poll(self, limit: int | None = None, opener: Opener = open_file) -> bool:
        """Read what is new, at most `limit` bytes of it; True when something was. A missing file says nothing."""
        try:
            stat = os.stat(self.path)
            if (stat.st_dev, stat.st_ino) == self._file_id and stat.st_size == self._offset:
                return False
            with opener(self.path) as file:
                return self._read(file, limit)
        except FileNotFoundError:
            return False

    def _read(self, file: BinaryIO, limit: int | None) -> bool:
        stat = os.fstat(file.fileno())
        known = (stat.st_dev, stat.st_ino)
        if known != self._file_id or stat.st_size < self._offset:
            self.log, self._offset, self._file_id = Log(), 0, known
        file.seek(self._offset)
        before, left = self._offset, stat.st_size - self._offset if limit is None else limit
        while left > 0 and (data := file.read(min(CHUNK, left))):
            self.log.feed(data)
            self._offset, left = self._offset + len(data), left - len(data)
        return self._offset > before
