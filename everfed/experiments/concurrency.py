"""How many runs go at a time: what the user says, else what is expected (CPU) or measured (GPU) to be fastest."""

from __future__ import annotations

import math
import os
import resource
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from everfed.experiments import mps

if TYPE_CHECKING:
    from everfed.experiments.jobs import GridJob, JobSettings


START = 6.0  # seconds until a worker has imported torch and begins
CORES_OF_A_RUN = 2  # that a run on a GPU keeps busy: threads that launch its graphs, and its data


@dataclass(frozen=True)
class Concurrency:
    """jobs: how many runs at a time. why: a sentence for the user; empty where there was nothing to choose. pinned: has
    every process a share of the cores for itself? measured: `jobs` is the most, and how many there are is measured
    while they run (`Pace`)."""

    jobs: int
    why: str = ""
    pinned: bool = True
    measured: bool = False


def choose(found: Sequence[GridJob], settings: JobSettings) -> Concurrency:
    """How many jobs to run side by side: what `--jobs` says, else what is expected to be fastest here."""
    unfinished = [job for job in found if not job.finished]
    if settings.jobs == 1 or not unfinished:
        return Concurrency(1)
    from everfed import engines

    section = unfinished[0].recipe.engine
    on_gpu = engines.device(section).type == "cuda"
    if settings.jobs:
        note = f"; {mps.note()}" if on_gpu else ""
        return Concurrency(settings.jobs, f"{settings.jobs} runs side by side{note}", pinned=not on_gpu)
    if section.kind in ("processes", "ranks") or len(unfinished) < 2:
        return Concurrency(1, "one run at a time on the GPU" if on_gpu else "")
    if on_gpu:
        return _on_gpu(engines.cores())
    return Concurrency(1) if engines.cores() < 2 else _fastest(unfinished, settings, engines.cores())


def _on_gpu(cores: int) -> Concurrency:
    most = min(cores // CORES_OF_A_RUN, _fit_in_memory())
    if most < 2:
        why = f"one run at a time on the GPU: no second one on {cores} cores and in the memory that is free"
        return Concurrency(1, f"{why}; --jobs N runs several side by side ({mps.note()})")
    why = f"one run on the GPU at first, then more while all together become faster, at most {most} on {cores} cores"
    return Concurrency(most, f"{why} (--jobs N chooses a number)", pinned=False, measured=True)


def _fastest(unfinished: Sequence[GridJob], settings: JobSettings, cores: int) -> Concurrency:
    """The number of runs at a time that gives the shortest expected time for all jobs, from the time of one client's
    training, measured here on the first job."""
    from everfed.engines import calibration

    with_clients = _measured(unfinished[0], settings)
    if with_clients is None:
        return Concurrency(1)
    one_client, clients, rounds = with_clients
    one_after_the_other = unfinished[0].recipe.engine.kind == "eager"
    work = one_client.seconds * clients * rounds * len(unfinished)

    def speedup(workers: int) -> float:
        """Of the clients of one run, on so many cores."""
        return 1.0 if one_after_the_other else calibration.speedup(one_client, clients, workers)

    def seconds(jobs: int) -> float:
        waves = -(-len(unfinished) // jobs)
        return (START if jobs > 1 else 0.0) + work * waves / len(unfinished) / speedup(cores // jobs)

    most = min(len(unfinished), cores, _fit_in_memory())
    jobs = min(range(1, most + 1), key=seconds)
    clients_so = f"its clients {'one after the other' if one_after_the_other else 'side by side'}"
    expected = f"on {cores} cores: about {seconds(jobs):.0f} s expected for {len(unfinished)} runs"
    another = "(--jobs N chooses another number)"
    if jobs > 1:
        alone = f"about {seconds(1):.0f} s with one run at a time and {clients_so}"
        return Concurrency(jobs, f"{jobs} runs side by side {expected}, {alone} {another}")
    if most == 1:
        return Concurrency(1, f"one run at a time, {clients_so}, {expected}; no second run fits into the memory")
    next_best = min(range(2, most + 1), key=seconds)
    several = f"about {seconds(next_best):.0f} s with {next_best} runs side by side"
    return Concurrency(1, f"one run at a time, {clients_so}, {expected}, {several} {another}")


def _measured(job: GridJob, settings: JobSettings) -> tuple[Any, int, int] | None:
    """(one client's training, clients of a round, rounds); None where it cannot be measured."""
    from everfed.engines import calibration
    from everfed.recipe import placed, scaled
    from everfed.session import assemble

    with placed(job.places):
        data = None if settings.data is None else str(settings.data)
        run = assemble(scaled(job.recipe, settings.scale), data, settings.scale, job.stream)
    measured = calibration.one_client(run.setup, run.build_module)
    return None if measured is None else (measured, len(run.stream.round(0).participants), run.stream.rounds)


def _fit_in_memory() -> int:
    """How many processes as large as this one, which has assembled a run, fit into the memory that is free."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return os.cpu_count() or 1
    return max(1, free // own)


# found by measuring the runs themselves ----------------------------------------------------------------------------

GPU_MEMORY = 0.9  # of a GPU's memory, for all runs together: contexts and libraries need some, too
WARM = 10  # rounds of a run after which its graphs are captured and its number of slots is found
ROUNDS, SECONDS = 5, 1.0  # a window has at least so many rounds of every run, and so many seconds
GAIN = 1.05  # all together must be so much faster than without those that were added last
MARGIN = 1.25  # a run may need so much more memory later than it had until now
TRIES = 3  # measurements of one number of runs
GRACE = 10.0  # seconds that runs wait at most, beside three times the window with all runs


@dataclass(frozen=True)
class Timed:
    """A phase of a run. ended: by a clock that all processes have in common. reserved: the most GPU memory that its
    process has had, free: what is free on the GPU, both of 1."""

    round: int
    task: int
    seconds: float
    ended: float
    reserved: float = 0.0
    free: float = 1.0

    @property
    def begun(self) -> float:
        return self.ended - self.seconds


@dataclass(frozen=True)
class Round:
    task: int
    seconds: float


@dataclass
class _Rounds:
    """The rounds of one run. A round lasts until the next one begins. window: those that began after `since`."""

    count: int = 0
    since: float = math.inf
    window: list[Round] = field(default_factory=list)
    first: Timed | None = None  # phase of the present round
    last: Timed | None = None

    def add(self, phase: Timed) -> None:
        if self.first is None:
            self.first = phase
        elif phase.round != self.first.round:
            if self.first.begun >= self.since:
                self.window.append(Round(self.first.task, phase.begun - self.first.begun))
            self.count, self.first = self.count + 1, phase
        self.last = phase

    def open_window(self, since: float) -> None:
        self.window, self.since = [], since


class Pace:
    """How many runs go at a time on one GPU, found by measuring the runs themselves.

    One run begins. When it is warm (its graphs are captured, its number of slots is found) and its memory leaves room,
    a second one begins beside it. When all are warm, their rounds are timed twice: with all runs, then while those that
    were added last wait between two phases. From these two times follows how much faster n runs together are than the
    m before:

        gain = n / m * mean over the m others of (seconds of a round without the new runs / with them)

    While that is at least GAIN, their number is doubled; otherwise the number before is the one for the rest of the
    table. No run is ended for it: the place of a run that ends is not given to another one.

    Rounds of a later task may be longer (more data, the beginning of replay). The two windows follow each other
    directly, so that most lie in one task, and a run whose task changed does not count. Where that is so for more than
    half of the runs, both windows are repeated; the last try counts them all, for streams whose tasks are shorter than
    two windows. A run that begins or ends starts the measurement again.

    number: how many runs may be under way. held: the runs that have to wait, so that the others are timed without
    them. most: no more are tried. say: takes the line for the user when the number is found.
    """

    def __init__(self, most: int, say: Callable[[str], None]) -> None:
        self.number, self.most, self.say = 1, most, say
        self.before = 0  # the number that was tried before
        self.held: frozenset[Hashable] = frozenset()
        self.decided = False
        self.gains: dict[tuple[int, int], float] = {}  # of so many runs over so many
        self._runs: dict[Hashable, _Rounds] = {}
        self._stopped: dict[Hashable, float] = {}  # of those that have to wait, and since when
        self._waiting = False
        self._tries = 0
        self._now, self._deadline = 0.0, math.inf
        self._begun: float | None = None  # the present window
        self._with: Mapping[Hashable, list[Round]] = {}  # the windows with all runs

    def update(self, runs: Sequence[Hashable], waiting: bool, now: float) -> None:
        """Which runs are under way, in the order of their workers, and whether a further one is waiting to begin."""
        if list(runs) != list(self._runs) or waiting != self._waiting:
            self._runs = {run: self._runs.get(run) or _Rounds() for run in runs}
            self._waiting = waiting
            self._restart()
        elif self.held and now > self._deadline:
            self._fail()

    def phase(self, run: Hashable, phase: Timed) -> None:
        """A phase of a run has ended."""
        if run not in self._runs:
            return
        self._runs[run].add(phase)
        self._now = max(self._now, phase.ended)
        if self.decided or not self._waiting or len(self._runs) != self.number:
            return
        if all(rounds.count >= WARM for rounds in self._runs.values()):
            self._measure()

    def waits(self, run: Hashable, since: float) -> None:
        """A run that has to wait has stopped."""
        if run in self.held and self._begun is None:
            self._stopped[run] = since
            if self.held <= self._stopped.keys():
                self._open_windows(max(self._stopped.values()))

    def fewer(self) -> bool:
        """A run failed, maybe for the runs beside it (no memory, a fault under CUDA MPS): fewer at a time from now on.
        False where it was alone."""
        under_way = max(self.number, len(self._runs))
        if under_way == 1:
            return False
        known = self.number if self.decided else self.before or 1  # that went well
        self.number, self.decided = min(known, under_way - 1), True
        self._restart()
        return True

    def _restart(self) -> None:
        """Measure from the beginning."""
        self.held, self._stopped, self._begun = frozenset(), {}, None
        self._now, self._deadline = 0.0, math.inf

    def _open_windows(self, since: float) -> None:
        self._begun = since
        for rounds in self._runs.values():
            rounds.open_window(since)

    def _measure(self) -> None:
        if self.number == 1:
            self._add()
            return
        if self._begun is None:
            if not self.held:
                self._open_windows(self._now)
            return
        windows = {run: rounds.window for run, rounds in self._runs.items() if run not in self.held}
        if not all(_long_enough(window) for window in windows.values()):
            return
        if self.held:
            self._compare(windows)
            return
        self._with, self.held = windows, frozenset(list(self._runs)[self.before :])
        self._deadline = self._now + 3 * (self._now - self._begun) + GRACE
        self._begun = None  # until they have stopped

    def _compare(self, without: Mapping[Hashable, list[Round]]) -> None:
        same_task = [run for run in without if _tasks(self._with[run]) == _tasks(without[run])]
        if 2 * len(same_task) < len(without):
            if self._tries + 1 < TRIES:
                self._fail()
                return
            same_task = list(without)
        slower = [_median(without[run]) / _median(self._with[run]) for run in same_task]
        gain = self.number / self.before * statistics.fmean(slower)
        self.gains[self.number, self.before] = gain
        if gain >= GAIN:
            self._add()
        else:
            self.number = self.before
            self._decide()

    def _add(self) -> None:
        """Twice as many runs, or as many as are allowed and have room."""
        if self.number == self.most:
            self._decide("more are not tried")
            return
        wanted = range(min(2 * self.number, self.most), self.number, -1)
        number = next((number for number in wanted if self._has_room(number)), None)
        if number is None:
            self._decide("another one might not fit into its memory")
            return
        self.before, self.number, self._tries = self.number, number, 0
        self._restart()

    def _has_room(self, number: int) -> bool:
        """Is there memory for so many runs like those under way, and for their contexts? What is taken and not reserved
        by a run counts as contexts, though it may be other programs'."""
        phases = [rounds.last for rounds in self._runs.values() if rounds.last is not None]
        needed, free = MARGIN * max(phase.reserved for phase in phases), min(phase.free for phase in phases)
        context = max(0.0, 1.0 - free - sum(phase.reserved for phase in phases)) / len(phases)
        return needed <= GPU_MEMORY / number and (number - self.number) * (needed + context) <= free

    def _fail(self) -> None:
        """The windows could not be compared."""
        self._tries += 1
        if self._tries == TRIES:
            tried, self.number = self.number, self.before
            self._decide(f"{tried} could not be compared with {self.before}")
        else:
            self._restart()

    def _decide(self, reason: str = "") -> None:
        self.decided = True
        self._restart()
        gains = [f"{n} are {gain:.2f} times as fast as {m}" for (n, m), gain in self.gains.items()]
        found = [f"all together, {', '.join(gains)}"] * bool(gains) + [reason] * bool(reason)
        runs = "one run" if self.number == 1 else f"{self.number} runs"
        self.say(f"{runs} at a time on the GPU: {'; '.join(found)} (--jobs N chooses another number)")


def _long_enough(window: Sequence[Round]) -> bool:
    return len(window) >= ROUNDS and sum(one.seconds for one in window) >= SECONDS


def _tasks(window: Sequence[Round]) -> set[int]:
    return {one.task for one in window}


def _median(window: Sequence[Round]) -> float:
    """Of the seconds of a round: not changed by a few that also score, save or capture."""
    return statistics.median(one.seconds for one in window)
