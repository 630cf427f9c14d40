"""How the benchmarks take time: interleaved, with the CPU time spent, and with what else kept the machine busy.

On a shared machine a second is not a second. So every timing carries the CPU seconds of this process and its children,
and how many cores other processes kept busy meanwhile; what is compared alternates within one run, and what is reported
are medians of ratios with their spread.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Work = Callable[[], Any]
Processes = Callable[[], Iterable[int]]
_TICK = os.sysconf("SC_CLK_TCK")
QUIET = 0.2  # cores that others may use in a timing that counts as quiet


@dataclass(frozen=True)
class Contender:
    """run: one round. processes: the ids of those that work for it, beside this process and what it has waited for."""

    run: Work
    processes: Processes = tuple


@dataclass(frozen=True)
class Timing:
    """seconds: by the clock. cpu: of the contender's processes. others: cores that everyone else kept busy."""

    seconds: float
    cpu: float
    others: float

    @property
    def quiet(self) -> bool:
        return self.others < QUIET


def timed(contender: Contender, repeat: int = 1) -> Timing:
    """One timing, per round, of `repeat` rounds in a row."""
    before = _Reading.of(contender.processes())
    for _ in range(repeat):
        contender.run()
    after = _Reading.of(contender.processes())
    seconds, cpu = after.clock - before.clock, after.own - before.own
    others = max(0.0, (after.machine - before.machine - cpu) / seconds)
    return Timing(seconds / repeat, cpu / repeat, others)


def interleave(
    contenders: Mapping[str, Contender], rounds: int, repeat: int = 1, wait: float = 0.0
) -> dict[str, list[Timing]]:
    """`rounds` timings of each, one of each in turn; the first of each warms up and is not kept.

    wait: before each timing, wait at most so many seconds for others to leave the machine alone.
    """
    timings: dict[str, list[Timing]] = {name: [] for name in contenders}
    for index in range(rounds + 1):
        for name, contender in contenders.items():
            if index:
                wait_for_quiet(wait)
            timing = timed(contender, repeat)
            if index:
                timings[name].append(timing)
    return timings


def wait_for_quiet(seconds: float, window: float = 0.5) -> None:
    """Until others used hardly any CPU time for `window` seconds, but no longer than `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not timed(Contender(lambda: time.sleep(window))).quiet:
        pass


def repeats(contenders: Mapping[str, Contender], seconds: float = 0.5) -> int:
    """How many rounds make a timing of `seconds`: CPU clocks tick in hundredths."""
    return max(1, round(seconds / min(timed(contender).seconds for contender in contenders.values())))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "q1": low, "q3": high, "min": min(values), "max": max(values), "n": len(values)}


def ratios(over: Sequence[Timing], under: Sequence[Timing], of: str = "seconds") -> dict[str, float]:
    """The spread of over/under, timing by timing: neighbours in time share their noise."""
    return spread([getattr(a, of) / getattr(b, of) for a, b in zip(over, under, strict=True)])


def summary(timings: Sequence[Timing]) -> dict[str, Any]:
    """What a result file says of one contender."""
    found: dict[str, Any] = {
        "seconds": spread([t.seconds for t in timings]),
        "cpu_seconds": spread([t.cpu for t in timings]),
        "cores_used_by_others": spread([t.others for t in timings]),
    }
    quiet = [t.seconds for t in timings if t.quiet]
    return {**found, "quiet_seconds": spread(quiet)} if quiet else found


def machine() -> dict[str, Any]:
    """The hardware and how busy it was, for a result file."""
    load = os.getloadavg()
    facts = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_average": [round(value, 2) for value in load],
    }
    with suppress(ImportError):
        import torch

        facts["torch"] = torch.__version__
    return facts


def write(result: Mapping[str, Any], path: Path | None) -> None:
    """The result as JSON, when a file is named."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


@dataclass(frozen=True)
class _Reading:
    clock: float
    own: float
    machine: float

    @classmethod
    def of(cls, processes: Iterable[int]) -> _Reading:
        ended = os.times()
        own = time.process_time() + ended.children_user + ended.children_system
        own += sum(_cpu_of(pid) for pid in processes)
        return cls(time.perf_counter(), own, _machine_cpu())


def descendants(root: int) -> list[int]:
    """The processes that `root` started, and those that these started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _fields(int(entry.name))
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        new = children.get(queue.pop(), [])
        found.extend(new)
        queue.extend(new)
    return found


def resident(pid: int) -> int:
    """Bytes of memory that process `pid` holds now, what it shares with others included."""
    fields = _fields(pid)
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def _fields(pid: int) -> list[str]:
    """/proc/PID/stat from its third field on (the second is a name that may hold spaces)."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _cpu_of(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended."""
    fields = _fields(pid)
    return sum(map(int, fields[11:15])) / _TICK if fields else 0.0


def _machine_cpu() -> float:
    """CPU seconds that all processes together have used; idle time and waiting for disks are not use."""
    with suppress(OSError):
        user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
        return (user + nice + system + sum(rest)) / _TICK
    return 0.0


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
