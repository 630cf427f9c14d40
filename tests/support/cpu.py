"""CPU time of tests, with all processes that they start: `make times` runs the default suite and prints it by folder.

The clock depends on what else a machine does, CPU time hardly. With EVERFED_CPU_TIMES=FILE every test appends a line
"seconds <tab> test" to FILE (tests/conftest.py); `python tests/support/cpu.py FILE` adds them up.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def used() -> float:
    """CPU seconds of this process, of children that ended, and of all processes below it that are alive."""
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + sum(_ticks(child) for child in _descendants(os.getpid())) / _TICKS


def _descendants(pid: int) -> list[int]:
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _text(listed).split()):
            found += [child, *_descendants(child)]
    return found


def _ticks(pid: int) -> int:
    """Clock ticks of a process and of its children that ended: fields 14 to 17 of /proc/PID/stat."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it ended meanwhile
        return ""


def by_place(lines: list[str], depth: int) -> Counter[str]:
    """Seconds by folder (depth 2) or by file (depth 3) of "seconds <tab> tests/folder/file.py::test"."""
    seconds: Counter[str] = Counter()
    for line in lines:
        spent, _, test = line.partition("\t")
        parts = Path(test.split("::")[0]).parts
        seconds["/".join(parts[:depth] if len(parts) > 2 or depth > 2 else parts[:1])] += float(spent)
    return seconds


def main() -> None:
    lines = Path(sys.argv[1]).read_text().splitlines()
    for depth, shown in ((2, None), (3, 20)):
        for place, seconds in by_place(lines, depth).most_common(shown):
            print(f"{seconds:7.1f} s  {place}")
        print()
    print(f"{sum(by_place(lines, 2).values()):7.1f} s  in {len(lines)} tests")


if __name__ == "__main__":
    main()
