"""Plants every bug of the lists beside this file, one at a time, and counts those that the tests notice.

    python tests/mutants/run.py [--check] [--workers N] [--cpu SECONDS] [--only TEXT] [--wide]

A list is a TOML file of entries

    [[mutant]]
    file = "everfed/core/optimizer.py"
    what = "Adam's eps under the root"
    old = "(v_hat.sqrt() + self.eps)"                       # occurs once in the file
    new = "(v_hat + self.eps).sqrt()"
    tests = ["tests/core/test_optimizer.py"]                # what pytest runs; by default the tests of the same folder

Every worker has a copy of the tree and changes one file of it at a time. Before that the tests must pass as they are.
A mutant is caught if a test fails with it, or needs more CPU time than `--cpu` allows. A text that is no longer in its
file, and tests that cannot be run, are errors of the list.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CAUGHT, SURVIVED, ERROR = "caught", "survived", "error"
_CONTEXT = multiprocessing.get_context("fork")
_WALL_SECONDS = 1800.0  # for a mutant that waits for ever and so uses no CPU time
_SHOWN = 3000  # characters of pytest's output


@dataclass(frozen=True)
class Mutant:
    """A bug: `old` in `file` becomes `new`. tests: what pytest is given. where: the list and the entry's number."""

    file: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]
    where: str

    @property
    def name(self) -> str:
        return f"{self.file}: {self.what}"


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. seconds: of the clock; output: the end of pytest's output."""

    mutant: Mutant
    outcome: str
    seconds: float
    output: str


def read_lists(folder: Path) -> list[Mutant]:
    """The mutants of all lists, in the order of their files. Raises SystemExit where an entry is incomplete."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        for number, entry in enumerate(tomllib.loads(path.read_text())["mutant"], start=1):
            where = f"{path.name} entry {number}"
            missing = {"file", "what", "old", "new"} - set(entry)
            if missing or set(entry) - {"file", "what", "old", "new", "tests"}:
                sys.exit(f"{where}: needs file, what, old and new, and may have tests; got {', '.join(entry)}")
            tests = tuple(entry.get("tests", ())) or folder_tests(entry["file"])
            found.append(Mutant(entry["file"], entry["what"], entry["old"], entry["new"], tests, where))
    return found


def folder_tests(file: str) -> tuple[str, ...]:
    """The tests of the folder that a file of everfed lies in: everfed/core/phase.py -> tests/core."""
    folder = Path("tests") / Path(file).parts[1]
    return (str(folder),) if (ROOT / folder).is_dir() else ("tests",)


def planted(mutant: Mutant, text: str) -> str:
    """The file's text with the bug in it. Raises ValueError where `old` does not occur exactly once."""
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.old!r} occurs {text.count(mutant.old)} times in {mutant.file}")
    return text.replace(mutant.old, mutant.new)


def misfits(mutants: Sequence[Mutant]) -> list[str]:
    """What is wrong with the entries that no longer fit their files."""
    found = []
    for mutant in mutants:
        try:
            planted(mutant, (ROOT / mutant.file).read_text())
        except (ValueError, OSError) as error:
            found.append(f"{mutant.where}: {error}")
    return found


# running tests -------------------------------------------------------------------------------------------------------
@contextmanager
def tree_copy() -> Iterator[Path]:
    """A copy of all files that git has or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    with tempfile.TemporaryDirectory(prefix="everfed-mutants-") as folder:
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name)
        yield Path(folder)


def run_tests(tree: Path, tests: Sequence[str], cpu: float) -> tuple[int, str]:
    """(pytest's exit code, or minus a signal; the end of what it printed). In a fork, which has torch already."""
    with tempfile.TemporaryFile("w+") as output:
        child = _CONTEXT.Process(target=_pytest, args=(tree, list(tests), cpu, output.fileno()))
        child.start()
        child.join(_WALL_SECONDS)
        if child.exitcode is None:
            child.kill()
            child.join()
        output.seek(0)
        return int(child.exitcode or 0), output.read()[-_SHOWN:]


def _pytest(tree: Path, tests: list[str], cpu: float, output: int) -> None:
    import pytest

    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_DATABASE_FILE": ""}
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(tree))
    # every process that the tests start has this limit, too, for itself
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu), int(cpu) + 5))
    # no limit by the clock: a machine that is busy with other things would count as a test that failed
    options = ["-x", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "--timeout=0"]
    code = pytest.main([*options, *tests])
    sys.stdout.flush()
    os._exit(int(code))


def judge(tree: Path, mutant: Mutant, cpu: float) -> Verdict:
    """Plant, run the tests, take the bug out again."""
    path, started = tree / mutant.file, time.monotonic()
    text = path.read_text()
    try:
        path.write_text(planted(mutant, text))
        code, output = run_tests(tree, mutant.tests, cpu)
    except (ValueError, OSError) as error:
        return Verdict(mutant, ERROR, 0.0, str(error))
    finally:
        path.write_text(text)
    # 0: all passed; 1: some failed; below 0: the limit was met; others: pytest could not run them
    outcome = {0: SURVIVED, 1: CAUGHT}.get(code, CAUGHT if code < 0 else ERROR)
    return Verdict(mutant, outcome, time.monotonic() - started, output)


def work(mutants: multiprocessing.Queue[Mutant | None], verdicts: multiprocessing.Queue[Verdict], cpu: float) -> None:
    """One worker: judges mutants until there are none left."""
    import torch

    torch.set_num_threads(1)
    with tree_copy() as tree:
        while (mutant := mutants.get()) is not None:
            verdicts.put(judge(tree, mutant, cpu))


def judged(mutants: Sequence[Mutant], workers: int, cpu: float) -> Iterator[Verdict]:
    """Verdicts as they come."""
    queue, verdicts = _CONTEXT.Queue(), _CONTEXT.Queue()
    for entry in (*mutants, *[None] * workers):
        queue.put(entry)
    crew = [_CONTEXT.Process(target=work, args=(queue, verdicts, cpu)) for _ in range(workers)]
    for worker in crew:
        worker.start()
    for _ in mutants:
        yield verdicts.get()
    for worker in crew:
        worker.join()


def passes_without(mutants: Sequence[Mutant], cpu: float) -> str | None:
    """None if the named tests pass on the tree as it is, else what pytest printed."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with tree_copy() as tree:
        code, output = run_tests(tree, tests, cpu * len(tests))
    return output if code else None


# the command ---------------------------------------------------------------------------------------------------------
def main() -> int:
    parser = argparse.ArgumentParser(description="Plants bugs and counts those that the tests notice.")
    parser.add_argument("--check", action="store_true", help="only say which entries no longer fit their files")
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time")
    parser.add_argument("--cpu", type=float, default=300.0, help="seconds of CPU time a process of the tests may use")
    parser.add_argument("--only", default="", help="only mutants whose file or description contains this text")
    parser.add_argument("--wide", action="store_true", help="run all tests of the file's folder for every mutant")
    arguments = parser.parse_args()
    os.nice(10)
    mutants = [mutant for mutant in read_lists(Path(__file__).parent) if arguments.only in mutant.name]
    if arguments.wide:
        mutants = [replace(mutant, tests=folder_tests(mutant.file)) for mutant in mutants]
    if not mutants:
        sys.exit(f"--only {arguments.only!r}: no mutant has this text in its file or description")
    if arguments.check:
        sys.exit("\n".join(misfits(mutants)) or 0)
    if (output := passes_without(mutants, arguments.cpu)) is not None:
        sys.exit(f"the tests fail without any mutant:\n{output}")
    return summarise(_shown(judged(mutants, arguments.workers, arguments.cpu)))


def _shown(verdicts: Iterator[Verdict]) -> list[Verdict]:
    found = []
    for verdict in verdicts:
        found.append(verdict)
        print(f"{verdict.outcome:8} {verdict.seconds:5.0f} s  {verdict.mutant.name}", flush=True)
        if verdict.outcome == ERROR:
            print(verdict.output, flush=True)
    return found


def summarise(verdicts: Sequence[Verdict]) -> int:
    """Print caught and planted by folder; 1 where a mutant survived or a list is wrong."""
    counts = Counter((Path(v.mutant.file).parts[1], v.outcome) for v in verdicts)
    print("\nfolder        caught  planted")
    for folder in sorted({folder for folder, _ in counts}):
        planted_here = sum(counts[folder, outcome] for outcome in (CAUGHT, SURVIVED, ERROR))
        print(f"{folder:12}  {counts[folder, CAUGHT]:6}  {planted_here:7}")
    totals = Counter(verdict.outcome for verdict in verdicts)
    share = totals[CAUGHT] / len(verdicts)
    print(f"{totals[CAUGHT]} of {len(verdicts)} caught ({share:.1%}), {totals[ERROR]} errors of the lists")
    return int(totals[CAUGHT] < len(verdicts))


if __name__ == "__main__":
    # imported once, in front of all forks; everfed itself is imported by each from its own tree
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401

    sys.exit(main())
