"""events.jsonl of a run: its one writer and its one reader.

`Log` is the state of a run after the lines read so far, `events` are the lines themselves. Bytes may arrive in pieces
of any size, so the same code reads a finished file and follows one that is being written. After a resume the rounds
since the checkpoint are run again: their new lines replace the old ones, and old lines of rounds that were not reached
again are dropped, so that what is read is always one consistent run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from everfed.core.spans import from_repeats, from_spans
from everfed.store.files import Opener, open_file, private
from everfed.store.run import EVENTS, writing

TRAIN = "train"
INTERRUPTION = "KeyboardInterrupt"
STOPPED = "StoppedEarly"  # of a run that a sweep ended, because it was behind the others
CHUNK = 1 << 20  # bytes read at a time
LAST_BYTES = 1 << 17  # of a file, in which its last events are looked for
LONGEST_LINE = 16 << 20  # bytes; a longer line is dropped

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PhaseLine:
    """One phase of one round. clients: of the phase, None where the log has only their number, `count`. tasks: the task
    of each of them, None where all were in the round's. trained: how many of them trained, None for phases that do not
    train. late: sampled clients that were dropped for being too late."""

    round: int
    task: int
    phase: str
    clients: tuple[int, ...] | None
    tasks: tuple[int, ...] | None
    count: int
    trained: int | None
    loss: float | None
    bytes_up: int
    bytes_down: int
    seconds: float
    late: tuple[int, ...] = ()

    @property
    def skipped(self) -> int:
        """Clients of the phase that did not train: no data, or no reply."""
        return 0 if self.trained is None else max(0, self.count - self.trained)


@dataclass(frozen=True, slots=True)
class ScoredRound:
    """Scores after a round. accuracy[i]: on task i, None where not measured. score: their mean over tasks seen."""

    round: int
    task: int
    task_end: bool
    accuracy: tuple[float | None, ...]
    score: float | None


@dataclass(frozen=True, slots=True)
class Happening:
    """A fault, a warning, a resume, or an event that this version does not know."""

    kind: str
    time: float | None
    round: int
    message: str


@dataclass(frozen=True, slots=True)
class Start:
    """The first event of a run, repeated at each resume. round: where it began or went on."""

    method: str
    recipe: str
    seed: int
    rounds: int
    tasks: int
    clients: int
    round: int


@dataclass
class Log:
    """The state of a run after the lines read so far."""

    start: Start | None = None
    phases: dict[tuple[int, str, int], PhaseLine] = field(default_factory=dict)  # by (round, phase, repeat)
    evaluations: dict[int, ScoredRound] = field(default_factory=dict)  # by round
    buffers: dict[int, tuple[int, ...]] = field(default_factory=dict)  # round -> samples in buffers, by task
    shifts: dict[int, tuple[int, ...]] = field(default_factory=dict)  # round -> clients whose data may have changed
    shifts_by: dict[int, dict[str, tuple[int, ...]]] = field(default_factory=dict)  # the same by signal
    measures: dict[str, dict[int, float]] = field(default_factory=dict)  # "part: what" -> round -> last value
    buffers_of: tuple[int, int] | None = None  # (clients whose buffers were counted, all), where they differ
    notes: list[Happening] = field(default_factory=list)
    lines: int = 0
    unreadable: int = 0
    first_time: float | None = None
    started: float | None = None  # time of the last start or resume
    last_time: float | None = None
    last_kind: str = ""
    rounds_done: int = 0
    skipped: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    loss: float | None = None
    score: str = ""  # what evaluations measure; empty before the first
    slowest: float = 0.0  # seconds of the longest phase or scoring
    _half: bytes = b""
    _resumed: bool = False
    _cohorts: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    # reading -----------------------------------------------------------------------------------------------------
    def feed(self, data: bytes) -> None:
        """Process further bytes of the file. An incomplete line waits for its rest."""
        *lines, self._half = (self._half + data).split(b"\n")
        for line in lines:
            if line.strip():
                self._line(line)
        if len(self._half) > LONGEST_LINE:
            self._half = b"?"  # no JSON begins like this, so the rest of the line is counted as unreadable

    def _line(self, line: bytes) -> None:
        self.lines += 1
        try:
            self._process(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            self.unreadable += 1

    def _process(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        _HANDLERS.get(kind, Log._on_other)(self, event)
        self.last_kind = kind
        when = event.get("time")
        if isinstance(when, int | float):
            self.last_time = float(when)
            self.first_time = self.last_time if self.first_time is None else self.first_time

    # events ------------------------------------------------------------------------------------------------------
    def _on_start(self, event: dict[str, Any]) -> None:
        names = ("seed", "rounds", "tasks", "clients", "round")
        numbers = [int(event.get(name, 0)) for name in names]
        self.start = Start(str(event["method"]), str(event.get("recipe", "")), *numbers)
        self.started = _number(event.get("time"))
        # without a checkpoint a run that was killed begins anew
        self._drop_from(self.start.round + 1 if self._resumed else 0)
        self._resumed = False

    def _drop_from(self, first: int) -> None:
        """Drop the rounds from `first` on; they will be run again."""
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

    def _on_phase(self, event: dict[str, Any]) -> None:
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
            count=len(named) if named is not None else int(clients),
            trained=int(event.get("trained", 0)) if phase == TRAIN else None,
            loss=_number(event.get("loss")),
            bytes_up=int(event["bytes_up"]),
            bytes_down=int(event["bytes_down"]),
            seconds=float(event["seconds"]),
            late=self._cohort(event.get("late", []), from_spans),
        )

    def _cohort(self, listed: list[Any] | str, read: Callable[[str], tuple[int, ...]]) -> tuple[int, ...]:
        """The numbers of a list, or of its short form in a string. Equal tuples are stored once: with full
        participation every round has the same."""
        cohort = read(listed) if isinstance(listed, str) else tuple(int(number) for number in listed)
        return self._cohorts.setdefault(cohort, cohort)

    def _on_evaluation(self, event: dict[str, Any]) -> None:
        accuracy = tuple(_number(value) for value in event["accuracy"])
        index = int(event["round"])
        self.score = str(event.get("score", "accuracy"))
        when = _number(event.get("time"))
        if self.last_kind == "scoring" and self.last_time is not None and when is not None:
            self.slowest = max(self.slowest, when - self.last_time)
        self.evaluations[index] = ScoredRound(
            index, int(event["task"]), bool(event.get("task_end")), accuracy, _number(event.get("acc"))
        )

    def _on_buffer(self, event: dict[str, Any]) -> None:
        self.buffers[int(event["round"])] = tuple(int(count) for count in event["by_task"])
        looked, of = int(event.get("clients", 0)), int(event.get("of", 0))
        self.buffers_of = (looked, of) if looked < of else None

    def _on_measure(self, event: dict[str, Any]) -> None:
        for key, value in event.items():
            number = _number(value)
            if key not in ("time", "round", "task", "repeat") and number is not None:
                self.measures.setdefault(f"{event['part']}: {key}", {})[int(event["round"])] = number

    def _on_drift(self, event: dict[str, Any]) -> None:
        index = int(event["round"])
        self.shifts[index] = self._cohort(event["clients"], from_spans)
        by = event.get("by", {"loss": event["clients"]})
        self.shifts_by[index] = {str(signal): self._cohort(clients, from_spans) for signal, clients in by.items()}

    def _on_resume(self, event: dict[str, Any]) -> None:
        self._resumed = True
        self._note("resume", event, f"went on from round {int(event['round']) + 1}")

    def _on_message(self, event: dict[str, Any]) -> None:
        self._note(event["event"], event, str(event["message"]))

    def _ignore(self, event: dict[str, Any]) -> None:
        """Checkpoints, the beginning of scoring and the end add nothing."""

    def _on_other(self, event: dict[str, Any]) -> None:
        """An event that this version does not know is shown as it is."""
        rest = ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("time", "event", "message"))
        self._note(str(event["event"]), event, str(event.get("message") or rest))

    def _note(self, kind: str, event: dict[str, Any], message: str) -> None:
        self.notes.append(Happening(kind, _number(event.get("time")), self.rounds_done, message))

    # derived -----------------------------------------------------------------------------------------------------
    @property
    def faults(self) -> list[Happening]:
        no_faults = (INTERRUPTION, STOPPED)
        return [note for note in self.notes if note.kind == "fault" and not note.message.startswith(no_faults)]

    @property
    def interrupted(self) -> bool:
        """Was the last event an interruption by the user?"""
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
    """The values of rounds before `first`."""
    return {index: value for index, value in values.items() if index < first}


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if value - value == 0 else None


_HANDLERS: dict[str, Callable[[Log, dict[str, Any]], None]] = {
    "start": Log._on_start,
    "phase": Log._on_phase,
    "scoring": Log._ignore,
    "evaluation": Log._on_evaluation,
    "buffer": Log._on_buffer,
    "drift": Log._on_drift,
    "measure": Log._on_measure,
    "resume": Log._on_resume,
    "warning": Log._on_message,
    "fault": Log._on_message,
    "checkpoint": Log._ignore,
    "end": Log._ignore,
}


class Tail:
    """Follows the events of one run folder by byte offset; a file that was replaced or cut is read from its start."""

    def __init__(self, folder: Path) -> None:
        self.path, self.log = folder / EVENTS, Log()
        self._offset, self._file_id = 0, (0, 0)

    def poll(self, limit: int | None = None, opener: Opener = open_file) -> bool:
        """Read new bytes, at most `limit`; True when there were any. A missing file counts as empty."""
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


def read_log(folder: Path, opener: Opener = open_file) -> Log:
    """The state of the run in `folder`; without a file, that of one that has not begun. Raises OSError."""
    tail = Tail(folder)
    tail.poll(opener=opener)
    return tail.log


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """The events of these kinds, or all, of the run in `folder`: one of each place in the run (round, phase, repeat,
    part), the last. Lines that cannot be read, and half a line at the end, are left out."""
    path = folder / EVENTS
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    resumed = False
    for number, line in enumerate(lines):
        try:
            event = json.loads(line)
            kind, index = event["event"], event.get("round")
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if kind == "start":
            first = event.get("round", 0) + 1 if resumed else 0
            kept = {place: one for place, one in kept.items() if place[1] is None or place[1] < first}
        resumed = kind == "resume" or (resumed and kind != "start")
        placed = index is not None and kind not in ("start", "resume")
        place = (
            (kind, index, *(event.get(key) for key in ("phase", "repeat", "part"))) if placed else (kind, None, number)
        )
        kept[place] = event
    return [event for place, event in kept.items() if not kinds or place[0] in kinds]


def last_events(folder: Path, most: int, opener: Opener = open_file) -> list[dict[str, Any] | str]:
    """The last events as they stand in the file, at most so many; of a line that is none its text."""
    with opener(folder / EVENTS) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[1 if size > LAST_BYTES else 0 :][-most:]
    return [_event_or_text(line) for line in lines]


def _event_or_text(line: str) -> dict[str, Any] | str:
    try:
        event = json.loads(line)
    except ValueError:
        return line
    return event if isinstance(event, dict) and "event" in event else line


def clients_of(event: dict[str, Any]) -> tuple[int, ...]:
    """The clients that an event names, however many; none where it has only their number."""
    found = event["clients"]
    return () if isinstance(found, int) else from_spans(found) if isinstance(found, str) else tuple(map(int, found))


class EventLog:
    """events.jsonl: append-only, one JSON object per line. After a resume, later lines of a round supersede earlier.

    Every line is one unbuffered write: an event is in the file even if the process is killed right after it.
    """

    def __init__(self, path: Path) -> None:
        self._folder = path.parent
        with writing(self._folder):
            _cut_half_line(path)
            self._file = open(path, "ab", buffering=0, opener=private)  # noqa: SIM115 - closed by close()

    def __call__(self, event: dict[str, Any]) -> None:
        line = json.dumps({"time": round(time.time(), 3), **event}).encode() + b"\n"
        with writing(self._folder):
            while line:  # on a disk that becomes full only a part may be written
                line = line[self._file.write(line) :]

    def close(self) -> None:
        self._file.close()


def _cut_half_line(path: Path) -> None:
    """Remove the half line that a killed run may have left, so that the next event starts there."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        keep = end = file.seek(0, os.SEEK_END)
        while keep and not _ends_line(file, keep):
            keep -= 1
        if keep < end:
            file.truncate(keep)


def _ends_line(file: Any, position: int) -> bool:
    file.seek(position - 1)
    return bool(file.read(1) == b"\n")
