"""Runs of a table side by side: worker processes that take one cell after the other, and how many of them pay.

A worker stays alive over its cells, so that torch is imported once. It sends the events of its run to the command that
started it and ends when that is gone. A worker that dies or loses the GPU is replaced; its cell goes on from its last
checkpoint.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from everfed.errors import UserError, from_note, note_of

if TYPE_CHECKING:
    from everfed.comparison.cells import Cell, Outcome, Queue, Settings

Event = dict[str, Any]
Show = Callable[["Cell", Event], None]  # what is done with the events of a run
POLL = 0.5  # seconds between two looks at cells that other processes hold
START = 6.0  # seconds until a worker has imported torch and begins
DEATHS = 2  # a cell whose process died or lost the GPU so often is given up
MPS = "nvidia-cuda-mps-control"
GPU_MEMORY = 0.9  # of a GPU's memory, for all runs together: contexts and libraries need some, too


# how many ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """jobs: how many runs at a time. why: a sentence for the user; empty where there was nothing to choose. pinned: has
    every process a share of the cores for itself?"""

    jobs: int
    why: str = ""
    pinned: bool = True


def choose(cells: Sequence[Cell], settings: Settings) -> Choice:
    """How many cells to run side by side: what `--jobs` says, else what is expected to be fastest here."""
    unfinished = [cell for cell in cells if not cell.finished]
    if settings.jobs == 1 or not unfinished:
        return Choice(1)
    from everfed import engines

    section = unfinished[0].recipe.engine
    on_gpu = engines.device(section).type == "cuda"
    if settings.jobs:
        note = f"; {mps_note()}" if on_gpu else ""
        return Choice(settings.jobs, f"{settings.jobs} runs side by side{note}", pinned=not on_gpu)
    if on_gpu:
        more = f"; --jobs N runs several side by side ({mps_note()})" if len(unfinished) > 1 else ""
        return Choice(1, f"one run at a time on the GPU{more}")
    if section.kind in ("processes", "ranks") or engines.cores() < 2 or len(unfinished) < 2:
        return Choice(1)
    return _fastest(unfinished, settings, engines.cores())


def mps_note() -> str:
    """Can processes share the GPU at the same time here?"""
    if shutil.which(MPS) is None:
        return f"they take turns on the GPU: {MPS} is not installed"
    if _mps_runs():
        return "CUDA MPS is running: they share the GPU at the same time"
    return f"they take turns on the GPU; `{MPS} -d`, started before, lets them share it at the same time"


def _mps_runs() -> bool:
    try:
        asked = subprocess.run(
            [MPS], input="get_server_list\n", text=True, capture_output=True, check=False, timeout=10
        )
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0


def _fastest(cells: Sequence[Cell], settings: Settings, cores: int) -> Choice:
    """The number of runs at a time that gives the shortest expected time for all cells, from the time of one client's
    training, measured here on the first cell."""
    from everfed.engines import calibration

    with_clients = _measured(cells[0], settings)
    if with_clients is None:
        return Choice(1)
    one_client, clients, rounds = with_clients
    one_after_the_other = cells[0].recipe.engine.kind == "eager"
    work = one_client.seconds * clients * rounds * len(cells)

    def speedup(workers: int) -> float:
        """Of the clients of one run, on so many cores."""
        return 1.0 if one_after_the_other else calibration.speedup(one_client, clients, workers)

    def seconds(jobs: int) -> float:
        waves = -(-len(cells) // jobs)
        return (START if jobs > 1 else 0.0) + work * waves / len(cells) / speedup(cores // jobs)

    most = min(len(cells), cores, _fit_in_memory())
    jobs = min(range(1, most + 1), key=seconds)
    clients_so = f"its clients {'one after the other' if one_after_the_other else 'side by side'}"
    expected = f"on {cores} cores: about {seconds(jobs):.0f} s expected for {len(cells)} runs"
    another = "(--jobs N chooses another number)"
    if jobs > 1:
        alone = f"about {seconds(1):.0f} s with one run at a time and {clients_so}"
        return Choice(jobs, f"{jobs} runs side by side {expected}, {alone} {another}")
    if most == 1:
        return Choice(1, f"one run at a time, {clients_so}, {expected}; no second run fits into the memory")
    next_best = min(range(2, most + 1), key=seconds)
    several = f"about {seconds(next_best):.0f} s with {next_best} runs side by side"
    return Choice(1, f"one run at a time, {clients_so}, {expected}, {several} {another}")


def _measured(cell: Cell, settings: Settings) -> tuple[Any, int, int] | None:
    """(one client's training, clients of a round, rounds); None where it cannot be measured."""
    from everfed.engines import calibration
    from everfed.recipe import placed, scaled
    from everfed.session import assemble

    with placed(cell.places):
        data = None if settings.data is None else str(settings.data)
        assembly = assemble(scaled(cell.recipe, settings.scale), data, settings.scale, cell.stream)
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


# workers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What a worker may use of the machine. cores: None for all, where runs are on a GPU. gpu_memory: of 1."""

    cores: Sequence[int] | None
    gpu_memory: float = 1.0


class Worker:
    """A process that runs cells."""

    def __init__(self, settings: Settings, share: Share) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.share, self.since = share, 0.0
        self.cell: Cell | None = None
        # not daemonic: an engine inside may have processes of its own
        self.process = context.Process(target=_work, args=(theirs, settings, share), name="everfed-cell")
        # ctrl-C reaches all processes of a terminal, also those that cannot ignore it yet (`_work`)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()

    def begin(self, cell: Cell, was_held: bool) -> None:
        self.cell, self.since = cell, time.monotonic()
        with contextlib.suppress(OSError):  # a worker that died is noticed by what it does not answer
            self.pipe.send((cell, was_held))

    def stop(self) -> None:
        """End it at once: a run goes on from its last checkpoint."""
        self.pipe.close()
        self.process.kill()
        self.process.join()

    def leave(self) -> None:
        """Let an idle worker end by itself: it sees that the pipe is closed."""
        self.pipe.close()
        self.process.join()


def run(queue: Queue, settings: Settings, choice: Choice, show: Show) -> None:
    """Run the cells of a queue in processes until all have an outcome. Raises the error of a cell that should end the
    command."""
    shares, workers = _shares(choice), list[Worker]()
    try:
        while not queue.done:
            _hand_out(queue, workers, settings, shares)
            busy = {worker.pipe: worker for worker in workers if worker.cell is not None}
            for pipe in _ready(busy):
                _receive(busy[pipe], queue, workers, settings, show)
            _enforce_limit(queue, workers, settings)
    except BaseException:
        for worker in workers:
            worker.stop()
        raise
    for worker in workers:
        worker.leave()


def _ready(busy: Mapping[Connection, Worker]) -> list[Connection]:
    """The pipes with a message, after at most POLL seconds."""
    if not busy:
        time.sleep(POLL)
    return [pipe for pipe in wait(list(busy), timeout=POLL) if isinstance(pipe, Connection)] if busy else []


def _shares(choice: Choice) -> list[Share]:
    """An equal share for every worker, so that the engine inside chooses for it and none takes what others need."""
    if not choice.pinned or not hasattr(os, "sched_getaffinity"):
        return [Share(None, GPU_MEMORY / choice.jobs)] * choice.jobs
    cores = sorted(os.sched_getaffinity(0))
    return [Share(cores[number :: choice.jobs] or [cores[number % len(cores)]]) for number in range(choice.jobs)]


def _hand_out(queue: Queue, workers: list[Worker], settings: Settings, shares: Sequence[Share]) -> None:
    """Give cells to idle workers; a worker is started when there is a cell for it."""
    while sum(worker.cell is not None for worker in workers) < len(shares):
        cell = queue.take()
        if cell is None:
            return
        idle = [worker for worker in workers if worker.cell is None]
        if not idle:
            idle = [Worker(settings, shares[len(workers)])]
            workers += idle
        idle[0].begin(cell, queue.was_held(cell))


def _receive(worker: Worker, queue: Queue, workers: list[Worker], settings: Settings, show: Show) -> None:
    """Process one message of a busy worker: an event of its run, or how the run ended."""
    cell = worker.cell
    assert cell is not None
    try:
        kind, content = worker.pipe.recv()
    except (EOFError, OSError):
        _replace(worker, workers, settings)
        how = _death(worker)
        problem = f"the process of {cell.title} {how}, {DEATHS} times; is there memory enough?"
        _go_on_or_give_up(cell, f"its process {how}", problem, queue, settings)
        return
    if kind == "event":
        show(cell, content)
        return
    worker.cell = None
    if kind == "held":
        queue.hold(cell)
    elif kind == "outcome":
        queue.finish(content)
        if content.problem and worker.share.cores is None:
            # after an error on a GPU neither CUDA nor torch's allocator need be of use to the next run
            _replace(worker, workers, settings)
    elif kind == "lost":
        _replace(worker, workers, settings)
        _go_on_or_give_up(cell, content, f"{cell.title}, {DEATHS} times: {content}", queue, settings)
    else:
        raise _error(kind, content)


def _death(worker: Worker) -> str:
    code = worker.process.exitcode
    return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"


def _go_on_or_give_up(cell: Cell, why: str, problem: str, queue: Queue, settings: Settings) -> None:
    """The process of a cell, or the GPU under it, is gone. why: for the line about the cell that goes on; problem: the
    error where it happened too often."""
    from everfed.comparison.cells import Outcome

    if queue.died(cell) < DEATHS:
        queue.say(f"{cell.title}: {why}; another process resumes it from its last checkpoint")
        queue.again(cell)
        return
    if not settings.keep_going:
        raise UserError(problem)
    queue.finish(Outcome(cell, None, problem))


def _replace(worker: Worker, workers: list[Worker], settings: Settings) -> None:
    worker.stop()
    workers[workers.index(worker)] = Worker(settings, worker.share)


def _enforce_limit(queue: Queue, workers: list[Worker], settings: Settings) -> None:
    from everfed.comparison.cells import Outcome

    if not settings.limit:
        return
    now = time.monotonic()
    for worker in list(workers):
        if worker.cell is not None and now - worker.since > settings.limit:
            _replace(worker, workers, settings)
            queue.finish(Outcome(worker.cell, None, f"took longer than the limit of {settings.limit:g} s for a run"))


def _error(kind: str, content: Any) -> Exception:
    return from_note(content) if kind == "error" else RuntimeError(f"a run failed in its worker process:\n{content}")


# in the worker -------------------------------------------------------------------------------------------------


def _work(pipe: Connection, settings: Settings, share: Share) -> None:
    """Run the cells that come through the pipe until it is closed. Ctrl-C is the parent's: it ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if share.cores is not None:
        os.sched_setaffinity(0, share.cores)
        # runs on the CPU: where torch sees a GPU, the first backward pass starts threads that no fork survives, and the
        # next run's engine could not start processes
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _limit_gpu_memory(share.gpu_memory)
    from everfed.comparison import cells

    def observer(event: Event) -> None:
        pipe.send(("event", event))

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            cell, was_held = pipe.recv()
            pipe.send(_answer(partial(cells.attempt, cell, settings, [observer], was_held)))
            _release_gpu_memory()


def _limit_gpu_memory(share: float) -> None:
    """A run beyond its share fails alone; without a limit it would be whichever run asks next."""
    import torch

    for device in range(torch.cuda.device_count()):
        torch.cuda.set_per_process_memory_fraction(share, device)


def _release_gpu_memory() -> None:
    """What a run leaves in torch's cache is of no use to the next one, but other processes need it."""
    import torch

    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def _answer(attempt: Callable[[], Outcome | None]) -> tuple[str, Any]:
    """How a run ended, as a message: held by another process, its outcome, an error for the user, a traceback, or the
    error after which this process can do nothing more on the GPU."""
    try:
        outcome = attempt()
    except (BrokenPipeError, ConnectionResetError):  # the command is gone, and with it who wants this run
        raise
    except Exception as error:
        if _gpu_is_lost():
            return "lost", f"{type(error).__name__}: {error}"
        note = note_of(error)
        return ("error", note) if note is not None else ("bug", traceback.format_exc())
    if outcome is not None and outcome.problem and _gpu_is_lost():
        return "lost", outcome.problem
    return ("held", None) if outcome is None else ("outcome", outcome)


def _gpu_is_lost() -> bool:
    """Has an error ended all that this process can do on a GPU? It need not be its own: under CUDA MPS a fault of one
    process ends the others' work as well."""
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
