"""Runs of a table side by side: worker processes that take one job after the other.

A worker stays alive over its jobs, so that torch is imported once. It sends the events of its run to the command that
started it and ends when that is gone. A worker that dies or loses the GPU is replaced; its job goes on from its last
checkpoint.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from everfed.errors import UserError, from_note, note_of
from everfed.experiments import mps
from everfed.experiments.concurrency import GPU_MEMORY, Pace, Timed

if TYPE_CHECKING:
    from everfed.experiments.concurrency import Concurrency
    from everfed.experiments.jobs import GridJob, JobSettings, Outcome, Queue

Event = dict[str, Any]
Show = Callable[["GridJob", Event], None]  # what is done with the events of a run
POLL = 0.5  # seconds between two looks at jobs that other processes hold
DEATHS = 2  # a job whose process died or lost the GPU so often is given up
PATIENCE = 10.0  # seconds in which a run on a GPU may end by itself before its process is killed


# workers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What a worker may use of the machine. cores: None for all, where runs are on a GPU. gpu_memory: of 1.
    environment: variables of its process. timed: it sends the times of phases, for `Pace`."""

    cores: Sequence[int] | None
    gpu_memory: float = 1.0
    environment: Mapping[str, str] = field(default_factory=dict)
    timed: bool = False


@dataclass(frozen=True)
class WorkerLimits:
    """Sent to a worker at any time. waits: its run has to wait between two phases until that is taken back."""

    gpu_memory: float
    waits: bool


class JobWorker:
    """A process that runs jobs."""

    def __init__(self, settings: JobSettings, share: Share) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.share, self.since = share, 0.0
        self.limits = WorkerLimits(share.gpu_memory, waits=False)
        self.job: GridJob | None = None
        # not daemonic: an engine inside may have processes of its own
        self.process = context.Process(target=_work, args=(theirs, settings, share), name="everfed-job")
        # ctrl-C reaches all processes of a terminal, also those that cannot ignore it yet (`_work`)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()

    def begin(self, job: GridJob, was_held: bool) -> None:
        self.job, self.since = job, time.monotonic()
        with suppress(OSError):  # a worker that died is noticed by what it does not answer
            self.pipe.send((job, was_held))

    @property
    def run(self) -> Hashable:
        """What it runs; another one if it runs the same job again."""
        return None if self.job is None else (self.job.folder, self.since)

    def limit(self, limits: WorkerLimits) -> None:
        if limits != self.limits:
            self.limits, self.share = limits, replace(self.share, gpu_memory=limits.gpu_memory)
            with suppress(OSError):
                self.pipe.send(limits)

    def close(self) -> None:
        """Let its run end at the next event, when it finds the pipe closed."""
        self.pipe.close()

    def stop(self) -> None:
        """End it: a run goes on from its last checkpoint. A process that uses a GPU is killed only if it does not end
        by itself: under CUDA MPS the runs beside a killed one may end, too."""
        self.close()
        if self.share.cores is None:
            self.process.join(PATIENCE)
        self.process.kill()
        self.process.join()

    def leave(self) -> None:
        """Let an idle worker end by itself: it sees that the pipe is closed."""
        self.pipe.close()
        self.process.join()


def run(queue: Queue, settings: JobSettings, choice: Concurrency, show: Show) -> None:
    """Run the jobs of a queue in processes until all have an outcome. Raises the error of a job that should end the
    command."""
    pace = Pace(choice.jobs, queue.say) if choice.measured else None
    none: Mapping[str, str] = {}
    with nullcontext(none) if pace is None else mps.shared(queue.say) as environment:
        workers = list[JobWorker]()
        try:
            while not queue.done:
                _hand_out(queue, workers, settings, _shares(choice, pace, environment))
                if pace is not None:
                    _follow(pace, queue, workers)
                busy = {worker.pipe: worker for worker in workers if worker.job is not None}
                for pipe in _ready(busy):
                    _receive(busy[pipe], queue, workers, settings, show, pace)
                _enforce_limit(queue, workers, settings)
        except BaseException:
            for worker in workers:
                worker.close()  # all of them before the first is waited for
            for worker in workers:
                worker.stop()
            raise
        for worker in workers:
            worker.leave()


def _ready(busy: Mapping[Connection, JobWorker]) -> list[Connection]:
    """The pipes with a message, after at most POLL seconds."""
    if not busy:
        time.sleep(POLL)
    return [pipe for pipe in wait(list(busy), timeout=POLL) if isinstance(pipe, Connection)] if busy else []


def _shares(choice: Concurrency, pace: Pace | None = None, environment: Mapping[str, str] | None = None) -> list[Share]:
    """An equal share for every worker, so that the engine inside chooses for it and none takes what others need."""
    if not choice.pinned or not hasattr(os, "sched_getaffinity"):
        jobs = choice.jobs if pace is None else pace.number
        return [Share(None, GPU_MEMORY / jobs, environment or {}, timed=pace is not None)] * jobs
    cores = sorted(os.sched_getaffinity(0))
    return [Share(cores[number :: choice.jobs] or [cores[number % len(cores)]]) for number in range(choice.jobs)]


def _follow(pace: Pace, queue: Queue, workers: list[JobWorker]) -> None:
    """Do what `pace` has found: equal shares of the memory for as many runs as there may be, some wait while the
    others are measured, and no idle worker stays beyond their number."""
    for idle in [worker for worker in workers if worker.job is None][: max(0, len(workers) - pace.number)]:
        idle.leave()
        workers.remove(idle)
    busy = [worker for worker in workers if worker.job is not None]
    pace.update([worker.run for worker in busy], queue.waiting, time.monotonic())
    share = GPU_MEMORY / max(pace.number, len(busy))
    for worker in workers:
        worker.limit(WorkerLimits(share, waits=worker.job is not None and worker.run in pace.held))


def _hand_out(queue: Queue, workers: list[JobWorker], settings: JobSettings, shares: Sequence[Share]) -> None:
    """Give jobs to idle workers; a worker is started when there is a job for it."""
    while sum(worker.job is not None for worker in workers) < len(shares):
        job = queue.take()
        if job is None:
            return
        idle = [worker for worker in workers if worker.job is None]
        if not idle:
            idle = [JobWorker(settings, shares[len(workers)])]
            workers += idle
        idle[0].begin(job, queue.was_held(job))


def _receive(
    worker: JobWorker,
    queue: Queue,
    workers: list[JobWorker],
    settings: JobSettings,
    show: Show,
    pace: Pace | None = None,
) -> None:
    """Process one message of a busy worker: an event or a time of its run, or how the run ended."""
    job = worker.job
    assert job is not None
    try:
        kind, content = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join(1.0)  # so that its own exit code is named, not that of being stopped
        worker.stop()
        how = _death(worker)
        if _with_fewer(worker, f"its process {how}", queue, workers, pace):
            return
        _replace(worker, workers, settings)
        problem = f"the process of {job.title} {how}, {DEATHS} times; is there memory enough?"
        _go_on_or_give_up(job, f"its process {how}", problem, queue, settings)
        return
    if kind == "event":
        show(job, content)
        return
    if kind in ("phase", "waits"):
        if pace is not None:
            (pace.phase if kind == "phase" else pace.waits)(worker.run, content)
        return
    why = content if kind == "lost" else "the GPU's memory is full" if _no_memory(kind, content) else ""
    if why and _with_fewer(worker, why, queue, workers, pace):
        return
    worker.job = None
    if kind == "held":
        queue.hold(job)
    elif kind == "outcome":
        queue.finish(content)
        if content.problem and worker.share.cores is None:
            # after an error on a GPU neither CUDA nor torch's allocator need be of use to the next run
            _replace(worker, workers, settings)
    elif kind == "lost":
        _replace(worker, workers, settings)
        _go_on_or_give_up(job, content, f"{job.title}, {DEATHS} times: {content}", queue, settings)
    else:
        raise _error(kind, content)


def _with_fewer(worker: JobWorker, why: str, queue: Queue, workers: list[JobWorker], pace: Pace | None) -> bool:
    """A run failed, maybe for those beside it: where their number is this command's own choice, it goes on later, with
    fewer. False where it was alone or the user chose the number."""
    if pace is None or worker.job is None or not pace.fewer():
        return False
    worker.stop()
    workers.remove(worker)
    most = "one run" if pace.number == 1 else f"{pace.number} runs"
    again = f"at most {most} at a time from now on, and another process resumes it from its last checkpoint"
    queue.say(f"{worker.job.title}: {why}; {again}")
    queue.again(worker.job)
    return True


def _no_memory(kind: str, content: Any) -> bool:
    """Did a run end because it found no memory?"""
    return "out of memory" in str(content.problem if kind == "outcome" else content)


def _death(worker: JobWorker) -> str:
    code = worker.process.exitcode
    return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"


def _go_on_or_give_up(job: GridJob, why: str, problem: str, queue: Queue, settings: JobSettings) -> None:
    """The process of a job, or the GPU under it, is gone. why: for the line about the job that goes on; problem: the
    error where it happened too often."""
    from everfed.experiments.jobs import Outcome

    if queue.died(job) < DEATHS:
        queue.say(f"{job.title}: {why}; another process resumes it from its last checkpoint")
        queue.again(job)
        return
    if not settings.keep_going:
        raise UserError(problem)
    queue.finish(Outcome(job, None, problem))


def _replace(worker: JobWorker, workers: list[JobWorker], settings: JobSettings) -> None:
    worker.stop()
    workers[workers.index(worker)] = JobWorker(settings, worker.share)


def _enforce_limit(queue: Queue, workers: list[JobWorker], settings: JobSettings) -> None:
    from everfed.experiments.jobs import Outcome

    if not settings.limit:
        return
    now = time.monotonic()
    for worker in list(workers):
        if worker.job is not None and now - worker.since > settings.limit:
            _replace(worker, workers, settings)
            queue.finish(Outcome(worker.job, None, f"took longer than the limit of {settings.limit:g} s for a run"))


def _error(kind: str, content: Any) -> Exception:
    return from_note(content) if kind == "error" else RuntimeError(f"a run failed in its worker process:\n{content}")


# in the worker -------------------------------------------------------------------------------------------------


def _work(pipe: Connection, settings: JobSettings, share: Share) -> None:
    """Run the jobs that come through the pipe until it is closed. Ctrl-C is the parent's: it ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from everfed.engines.slots import choose_queues

    os.environ.update(share.environment)
    choose_queues()
    if share.cores is not None:
        os.sched_setaffinity(0, share.cores)
        # runs on the CPU: where torch sees a GPU, the first backward pass starts threads that no fork survives, and the
        # next run's engine could not start processes
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _limit_gpu_memory(share.gpu_memory)
    from everfed.experiments import jobs

    def observer(event: Event) -> None:
        pipe.send(("event", event))
        if share.timed and event["event"] == "phase":
            now = time.monotonic()
            memory = _gpu_memory(int(now))
            pipe.send(("phase", Timed(event["round"], event["task"], event["seconds"], now, *memory)))
            _heed(pipe)

    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            content = pipe.recv()
            if isinstance(content, WorkerLimits):  # to wait was for the run that has ended
                _limit_gpu_memory(content.gpu_memory)
                continue
            job, was_held = content
            pipe.send(_answer(partial(jobs.attempt, job, settings, [observer], was_held)))
            _release_gpu_memory()


def _heed(pipe: Connection) -> None:
    """Between two phases: apply the limits that were sent meanwhile, and wait as long as they say so."""
    waits = False
    while waits or pipe.poll():
        try:
            limits = pipe.recv()
        except EOFError as error:
            raise BrokenPipeError from error  # the command is gone
        _limit_gpu_memory(limits.gpu_memory)
        if limits.waits and not waits:
            pipe.send(("waits", time.monotonic()))
        waits = limits.waits


@lru_cache(maxsize=1)
def _gpu_memory(second: int) -> tuple[float, float]:
    """(the most that this process has had for its run, what is free on the GPU), of 1; looked up once a second."""
    import torch

    if not torch.cuda.is_initialized():
        return 0.0, 1.0
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.max_memory_reserved() / total, free / total


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
        torch.cuda.reset_peak_memory_stats()


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
