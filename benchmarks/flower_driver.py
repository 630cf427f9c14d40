"""Flower's simulation, driven from here a round at a time: it lives in a process and an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import measure

HOW_TO_INSTALL = """\
Flower's simulation was left out: no environment for it at {folder}. It needs one of its own (its pins are narrow):
  {python} -m venv {folder}
  {folder}/bin/pip install torch==2.13.0
  {folder}/bin/pip install 'flwr[simulation]==1.41.0'"""


class Flower:
    """A simulation of `rounds` rounds that waits before each."""

    def __init__(self, folder: Path, case: str, workers: int, rounds: int) -> None:
        theirs, self._ask = os.pipe()
        answers, answer = os.pipe()
        arguments = [case, *map(str, (workers, rounds, theirs, answer))]
        self.process = subprocess.Popen(
            [interpreter(folder), "-m", "benchmarks.flower_rounds", *arguments],
            pass_fds=(theirs, answer),
            cwd=Path(__file__).parents[1],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(answer)
        self._answers = os.fdopen(answers)

    def ask(self, rounds: int = 1) -> None:
        os.write(self._ask, b"." * rounds)

    def answer(self) -> float:
        """Seconds of the round that was asked for, by Flower's own clock."""
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"Flower's simulation ended with code {self.process.wait()}")
        return float(line)

    def round(self) -> float:
        self.ask()
        return self.answer()

    def processes(self) -> list[int]:
        return [self.process.pid, *measure.descendants(self.process.pid)]

    def close(self) -> None:
        """Let it finish the rounds that are left over, or end it."""
        os.close(self._ask)
        self._answers.close()
        self.process.terminate()
        self.process.wait()


def interpreter(folder: Path) -> Path:
    return folder / "bin" / "python"


def installed(folder: Path) -> bool:
    """Is the simulation there? Its Python is asked, for it is not ours."""
    if not interpreter(folder).exists():
        return False
    return subprocess.run([interpreter(folder), "-c", "import flwr.simulation, ray, torch"]).returncode == 0


def how_to_install(folder: Path) -> str:
    return HOW_TO_INSTALL.format(folder=folder, python=sys.executable)
