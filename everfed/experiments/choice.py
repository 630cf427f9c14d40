"""How many jobs of a table run at a time: what the user says, else what is expected or measured to be fastest."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everfed.experiments import mps

if TYPE_CHECKING:
    from everfed.experiments.jobs import GridJob, JobSettings

START = 6.0  # seconds until a worker has imported torch and begins
CORES_OF_A_RUN = 2  # that a run on a GPU keeps busy: threads that launch its graphs, and its data


@dataclass(frozen=True)
class Choice:
    """jobs: how many runs at a time. why: a sentence for the user; empty where there was nothing to choose. pinned: has
    every process a share of the cores for itself? measured: `jobs` is the most, and how many there are is measured
    while they run (pace.py)."""

    jobs: int
    why: str = ""
    pinned: bool = True
    measured: bool = False


def choose(found: Sequence[GridJob], settings: JobSettings) -> Choice:
    """How many jobs to run side by side: what `--jobs` says, else what is expected to be fastest here."""
    unfinished = [job for job in found if not job.finished]
    if settings.jobs == 1 or not unfinished:
        return Choice(1)
    from everfed import engines

    section = unfinished[0].recipe.engine
    on_gpu = engines.device(section).type == "cuda"
    if settings.jobs:
        note = f"; {mps.note()}" if on_gpu else ""
        return Choice(settings.jobs, f"{settings.jobs} runs side by side{note}", pinned=not on_gpu)
    if section.kind in ("processes", "ranks") or len(unfinished) < 2:
        return Choice(1, "one run at a time on the GPU" if on_gpu else "")
    if on_gpu:
        return _on_gpu(engines.cores())
    return Choice(1) if engines.cores() < 2 else _fastest(unfinished, settings, engines.cores())


def _on_gpu(cores: int) -> Choice:
    most = min(cores // CORES_OF_A_RUN, _fit_in_memory())
    if most < 2:
        why = f"one run at a time on the GPU: no second one on {cores} cores and in the memory that is free"
        return Choice(1, f"{why}; --jobs N runs several side by side ({mps.note()})")
    why = f"one run on the GPU at first, then more while all together become faster, at most {most} on {cores} cores"
    return Choice(most, f"{why} (--jobs N chooses a number)", pinned=False, measured=True)


def _fastest(unfinished: Sequence[GridJob], settings: JobSettings, cores: int) -> Choice:
    """The number of runs at a time that gives the shortest expected time for all jobs, from the time of one client's
    training, measured here on the first job."""
    from everfed.engines import calibration

    with_clients = _measured(unfinished[0], settings)
    if with_clients is None:
        return Choice(1)
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
        return Choice(jobs, f"{jobs} runs side by side {expected}, {alone} {another}")
    if most == 1:
        return Choice(1, f"one run at a time, {clients_so}, {expected}; no second run fits into the memory")
    next_best = min(range(2, most + 1), key=seconds)
    several = f"about {seconds(next_best):.0f} s with {next_best} runs side by side"
    return Choice(1, f"one run at a time, {clients_so}, {expected}, {several} {another}")


def _measured(job: GridJob, settings: JobSettings) -> tuple[Any, int, int] | None:
    """(one client's training, clients of a round, rounds); None where it cannot be measured."""
    from everfed.engines import calibration
    from everfed.recipe import placed, scaled
    from everfed.session import assemble

    with placed(job.places):
        data = None if settings.data is None else str(settings.data)
        assembly = assemble(scaled(job.recipe, settings.scale), data, settings.scale, job.stream)
    measured = calibration.one_client(assembly.setup, assembly.build_module)
    return None if measured is None else (measured, len(assembly.stream.round(0).participants), assembly.stream.rounds)


def _fit_in_memory() -> int:
    """How many processes as large as this one, which has assembled a run, fit into the memory that is free."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return os.cpu_count() or 1
    return max(1, free // own)
