"""Tables on a GPU with `--jobs 0`: CUDA MPS for their processes, how many there are, and what workers are sent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from everfed import engines
from everfed.experiments import concurrency, jobs, mps, workers
from everfed.experiments.concurrency import Concurrency, Pace, Timed, choose
from everfed.experiments.jobs import GridJob, JobSettings, Outcome, Queue
from everfed.experiments.workers import Share, WorkerLimits
from everfed.recipe import Places, read
from tests.support.waiting import HANG

# CUDA MPS ----------------------------------------------------------------------------------------------------------

CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then
    echo "start $CUDA_MPS_PIPE_DIRECTORY visible:$CUDA_VISIBLE_DEVICES" >> "$MPS_STUB"
    [ -e "$MPS_STUB.fails" ] && exit 1
    touch "$CUDA_MPS_PIPE_DIRECTORY/control"
    exit 0
fi
read command
echo "$command $CUDA_MPS_PIPE_DIRECTORY" >> "$MPS_STUB"
[ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ]
"""
SHARED = "runs at a time: CUDA MPS was started for them: they share the GPU at the same time"


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A stand-in for nvidia-cuda-mps-control whose clients can compute; the answer has what it was asked so far."""
    program, log = tmp_path / mps.CONTROL, tmp_path / "asked"
    program.write_text(CONTROL)
    program.chmod(0o755)
    log.touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("MPS_STUB", str(log))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr(mps, "_serves", lambda environment: environment["CUDA_VISIBLE_DEVICES"] == "1")
    return lambda: log.read_text().splitlines()


def test_a_daemon_is_there_for_these_processes_alone(control: Callable[[], list[str]]) -> None:
    lines: list[str] = []
    with mps.shared(lines.append) as environment:
        pipes = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert os.path.isdir(pipes) and os.path.isdir(environment["CUDA_MPS_LOG_DIRECTORY"])
        assert control() == ["get_server_list ", f"start {pipes} visible:"], "it sees all GPUs; its clients choose"
        assert mps.CONTROL not in os.environ and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert control()[2:] == [f"quit {pipes}"]
    assert not os.path.exists(pipes)
    assert lines == [SHARED]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_it_ends_with_an_error_and_with_ctrl_c(
    control: Callable[[], list[str]], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error), mps.shared(lambda line: None):
        raise error
    assert [line.split()[0] for line in control()] == ["get_server_list", "start", "quit"]

    def interrupted(environment: object) -> bool:
        raise error

    monkeypatch.setattr(mps, "_serves", interrupted)  # the daemon runs when ctrl-C comes
    with pytest.raises(error), mps.shared(lambda line: None):
        pass
    assert [line.split()[0] for line in control()[3:]] == ["get_server_list", "start", "quit"]


@pytest.mark.parametrize("fails", ["start", "client"])
def test_a_daemon_that_does_not_start_or_serve_is_done_without(
    control: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    lines: list[str] = []
    if fails == "start":
        (tmp_path / "asked.fails").touch()
    else:
        monkeypatch.setattr(mps, "_serves", lambda environment: False)
    with mps.shared(lines.append) as environment:
        assert environment == {}
    assert len(lines) == 1 and lines[0].startswith("no CUDA MPS, processes take turns on the GPU: ")
    assert control()[-1].startswith("quit ")


def test_a_daemon_that_runs_already_is_used(
    control: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    (tmp_path / "control").touch()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    with mps.shared(lines.append) as environment:
        assert environment == {}
    assert lines == ["runs at a time: CUDA MPS is running: they share the GPU at the same time"]
    assert {line.split()[0] for line in control()} == {"get_server_list"}


def test_a_process_without_a_gpu_is_not_served() -> None:
    assert not mps._serves({"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(
    ("installed", "answer", "note"),
    [
        (None, 0, "is not installed"),
        ("/usr/bin/it", 0, "CUDA MPS is running"),
        ("/usr/bin/it", 1, "`nvidia-cuda-mps-control -d`, started before"),
    ],
)
def test_the_note_about_mps(monkeypatch: pytest.MonkeyPatch, installed: str | None, answer: int, note: str) -> None:
    monkeypatch.setattr(mps.shutil, "which", lambda _: installed)
    monkeypatch.setattr(mps.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=answer))
    assert note in mps.note()


# the choice --------------------------------------------------------------------------------------------------------

TABLE = """
[stream]
tasks = 2
clients = 2
max_train = 60
max_test = 60
[model]
kind = "mlp"
hidden = [8]
[train]
rounds_per_task = 6
[engine]
device = "cpu"
kind = "eager"
[method]
name = "fedavg"
"""


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., list[GridJob]]:
    def new(*seeds: int, sets: Sequence[str] = (), folder: str = "runs") -> list[GridJob]:
        (tmp_path / "table.toml").write_text(TABLE)
        recipes = {seed: read(tmp_path / "table.toml", seed=seed, sets=sets) for seed in seeds}
        return [GridJob("fedavg", recipes[seed], tmp_path / folder / str(seed), Places("table.toml")) for seed in seeds]

    return new


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 cores and a GPU without CUDA MPS."""
    monkeypatch.setattr(engines, "device", lambda section: torch.device("cuda"))
    monkeypatch.setattr(engines, "cores", lambda: 16)
    monkeypatch.setattr(concurrency, "_fit_in_memory", lambda: 100)
    monkeypatch.setattr(mps.shutil, "which", lambda _: None)


@pytest.mark.usefixtures("gpu")
def test_several_cells_on_a_gpu_are_measured(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "one run on the GPU at first, then more while all together become faster, at most 8 on 16 cores"
    assert choose(table(0, 1), JobSettings()) == Concurrency(8, f"{why} (--jobs N chooses a number)", False, True)
    assert choose(table(0), JobSettings()) == Concurrency(1, "one run at a time on the GPU")
    assert choose(table(0, 1, sets=["engine.kind=ranks"]), JobSettings()) == Concurrency(
        1, "one run at a time on the GPU"
    )
    note = "they take turns on the GPU: nvidia-cuda-mps-control is not installed"
    assert choose(table(0, 1), JobSettings(jobs=3)) == Concurrency(3, f"3 runs side by side; {note}", False)
    monkeypatch.setattr(concurrency, "_fit_in_memory", lambda: 3)
    assert choose(table(0, 1), JobSettings()).jobs == 3
    monkeypatch.setattr(engines, "cores", lambda: 3)
    assert choose(table(0, 1), JobSettings()) == Concurrency(
        1, "one run at a time on the GPU: no second one on 3 cores and in the memory that is free; "
        f"--jobs N runs several side by side ({note})",
    )  # fmt: skip


@pytest.mark.usefixtures("gpu")
def test_a_table_on_a_gpu_runs_in_processes_as_many_as_are_measured(
    table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, said = list[Concurrency](), list[str]()

    def run(queue: Queue, settings: JobSettings, choice: Concurrency, show: workers.Show) -> None:
        ran.append(choice)
        while cell := queue.take():
            queue.finish(Outcome(cell, {}))

    output = jobs.Output()
    monkeypatch.setattr(workers, "run", run)
    monkeypatch.setattr(output, "say", said.append)
    assert len(jobs.run_all(table(0, 1), JobSettings(), output=output)) == 2
    assert ran[0].measured and said == [ran[0].why]


# workers -----------------------------------------------------------------------------------------------------------


class Pipes:
    """Both ends of a worker's pipe, and the shares that it set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parent, self.worker = multiprocessing.Pipe()
        self.shares: list[float] = []
        monkeypatch.setattr(workers, "_limit_gpu_memory", self.shares.append)


@pytest.fixture
def pipes(monkeypatch: pytest.MonkeyPatch) -> Pipes:
    return Pipes(monkeypatch)


def test_a_run_waits_between_two_phases_until_it_may_go_on(pipes: Pipes) -> None:
    pipes.parent.send(WorkerLimits(0.45, waits=True))
    waiting = threading.Thread(target=workers._heed, args=(pipes.worker,), daemon=True)
    waiting.start()
    assert pipes.parent.poll(HANG) and pipes.parent.recv()[0] == "waits"
    pipes.parent.send(WorkerLimits(0.3, waits=True))
    waiting.join(0.05)
    assert waiting.is_alive() and not pipes.parent.poll()
    pipes.parent.send(WorkerLimits(0.3, waits=False))
    waiting.join(HANG)
    assert not waiting.is_alive() and pipes.shares == [0.45, 0.3, 0.3]
    workers._heed(pipes.worker)  # nothing was sent: it goes on at once


def test_a_run_that_waits_ends_with_its_command(pipes: Pipes) -> None:
    """As BrokenPipeError, which is no outcome of a cell."""
    pipes.parent.send(WorkerLimits(0.45, waits=True))
    pipes.parent.close()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        workers._heed(pipes.worker)


@pytest.mark.parametrize("timed", [True, False])
def test_a_worker_sends_times_and_memory_where_they_are_wanted(
    pipes: Pipes, monkeypatch: pytest.MonkeyPatch, timed: bool
) -> None:
    """Its process has the environment of its share, and limits before the first cell are no cell."""
    phase = {"event": "phase", "round": 3, "task": 1, "seconds": 0.5}

    def attempt(cell: str, settings: JobSettings, observers: Sequence[Any], was_held: bool) -> Outcome | None:
        observers[0]({"event": "start"})
        observers[0](phase)
        pipes.parent.close()
        return None

    sent: list[Any] = []
    monkeypatch.setattr(jobs, "attempt", attempt)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(workers, "_gpu_memory", lambda second: (0.2, 0.7))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "before")
    pipes.parent.send(WorkerLimits(0.45, waits=True))
    pipes.parent.send(("cell", False))
    worker = SimpleNamespace(recv=pipes.worker.recv, send=sent.append, poll=lambda: False)
    workers._work(worker, JobSettings(), Share(None, 0.9, {"CUDA_MPS_PIPE_DIRECTORY": "own"}, timed))  # type: ignore[arg-type]
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "own" and pipes.shares == [0.9, 0.45]
    times = [content for kind, content in sent if kind == "phase"]
    assert times == [Timed(3, 1, 0.5, times[0].ended, 0.2, 0.7)] * timed if timed else not times
    assert [kind for kind, _ in sent] == ["event", "event", *["phase"] * timed, "held"]


def test_the_memory_of_a_process_and_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    workers._gpu_memory.cache_clear()
    assert workers._gpu_memory(1) == (0.0, 1.0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60, 80))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 10)
    assert workers._gpu_memory(1) == (0.0, 1.0) and workers._gpu_memory(2) == (0.125, 0.75)
    workers._gpu_memory.cache_clear()


class Process:
    """Stands in for a worker: keeps what it is sent, and answers what a test gives it."""

    made: list[Process]

    def __init__(self, settings: JobSettings, share: Share) -> None:
        self.share, self.limits, self.job, self.since = share, WorkerLimits(share.gpu_memory, False), None, 0.0
        self.sent: list[Any] = []
        self.ended = ""
        self.answers: list[tuple[str, Any]] = []
        self.pipe = SimpleNamespace(send=self.sent.append, recv=self.receive)
        self.process = SimpleNamespace(exitcode=-signal.SIGKILL, join=lambda seconds: None)
        Process.made.append(self)

    begin, limit, run = workers.JobWorker.begin, workers.JobWorker.limit, workers.JobWorker.run

    def receive(self) -> tuple[str, Any]:
        if not self.answers:
            raise EOFError
        return self.answers.pop(0)

    def close(self) -> None:
        self.ended = "closed"

    def stop(self) -> None:
        self.ended = "stopped"

    def leave(self) -> None:
        self.ended = "left"


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    Process.made = []
    monkeypatch.setattr(workers, "JobWorker", Process)
    return Process.made


def handed_out(queue: Queue, fleet: list[Any], pace: Pace) -> None:
    workers._hand_out(queue, fleet, JobSettings(), workers._shares(Concurrency(8, "", False, True), pace, {"A": "b"}))
    workers._follow(pace, queue, fleet)


def test_runs_are_added_held_and_given_less_memory(table: Any, processes: list[Process]) -> None:
    queue, pace, fleet = Queue(table(0, 1, 2)), Pace(8, lambda line: None), list[Any]()
    handed_out(queue, fleet, pace)
    assert len(processes) == 1 and processes[0].share == Share(None, 0.9, {"A": "b"}, timed=True)
    pace.number = 2
    handed_out(queue, fleet, pace)
    assert [process.share.gpu_memory for process in processes] == [0.45, 0.45]
    assert processes[0].sent[1:] == [WorkerLimits(0.45, waits=False)] and len(processes[1].sent) == 1
    pace.held = frozenset({processes[1].run})
    handed_out(queue, fleet, pace)
    handed_out(queue, fleet, pace)
    assert processes[1].sent[1:] == [WorkerLimits(0.45, waits=True)] and len(processes[0].sent) == 2


def test_a_run_that_waited_goes_on(table: Any, processes: list[Process]) -> None:
    """After a measurement, and where the run that took its place in the worker was never to wait."""
    queue, pace, fleet = Queue(table(0, 1)), Pace(8, lambda line: None), list[Any]()
    pace.number = 2
    handed_out(queue, fleet, pace)
    for held in ({processes[0].run}, set()):
        pace.held = frozenset(held)
        handed_out(queue, fleet, pace)
    assert processes[0].sent[1:] == [WorkerLimits(0.45, waits=True), WorkerLimits(0.45, waits=False)]
    assert len(processes[1].sent) == 1


def test_no_place_above_the_number_is_given_to_another_run(table: Any, processes: list[Process]) -> None:
    """Three runs, and one at a time from now on: none is ended, and the fourth begins when all three have ended."""
    queue, pace, fleet = Queue(table(*range(6))), Pace(8, lambda line: None), list[Any]()
    pace.number = 3
    handed_out(queue, fleet, pace)
    assert [process.share.gpu_memory for process in processes] == [pytest.approx(0.3)] * 3
    pace.number = 1
    for running in (3, 2, 1, 1):
        handed_out(queue, fleet, pace)
        assert sum(worker.job is not None for worker in fleet) == len(fleet) == running
        assert all(worker.limits.gpu_memory == pytest.approx(0.9 / running) for worker in fleet)
        fleet[0].answers = [("held", None)]
        workers._receive(fleet[0], SimpleNamespace(hold=lambda cell: None), fleet, JobSettings(), unseen, pace)  # type: ignore[arg-type]
    assert [process.ended for process in processes] == ["left", "left", ""]


def unseen(cell: GridJob, event: dict[str, Any]) -> None:
    raise AssertionError(event)


FAULT = "RuntimeError: CUDA error: device-side assert triggered"
OUT = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.mark.parametrize(("kind", "text"), [("outcome", OUT), ("bug", OUT), ("lost", FAULT), ("", "")])
def test_a_run_that_may_have_failed_for_the_others_has_another_try(
    table: Any, processes: list[Process], kind: str, text: str
) -> None:
    """Without memory, killed, or under CUDA MPS with a fault that may be another's. Alone it is an outcome or error,
    as with one run at a time; what happened before does not count."""
    lines: list[str] = []
    queue = Queue(table(0, 1), say=lines.append)
    pace, fleet = Pace(8, lines.append), list[Any]()
    pace.number = 2
    handed_out(queue, fleet, pace)
    first, second = processes
    cell: Any = second.job
    second.answers = [(kind, Outcome(cell, None, text) if kind == "outcome" else text)] if kind else []
    workers._receive(second, queue, fleet, JobSettings(keep_going=True), unseen, pace)  # type: ignore[arg-type]
    assert fleet == [first] and second.ended == "stopped" and not queue.outcomes and pace.number == 1
    why = {"lost": FAULT, "": "its process was killed by signal 9"}.get(kind, "the GPU's memory is full")
    assert lines == [
        f"fedavg seed 1: {why}; at most one run at a time from now on, and another process resumes it from its last "
        "checkpoint"
    ]
    handed_out(queue, fleet, pace)
    assert len(processes) == 2 and queue.waiting
    first.job = None
    handed_out(queue, fleet, pace)
    assert first.job is cell and first.limits.gpu_memory == 0.9
    first.answers = [("outcome", Outcome(cell, None, OUT))]
    workers._receive(first, queue, fleet, JobSettings(keep_going=True), unseen, pace)  # type: ignore[arg-type]
    assert queue.outcomes[cell.folder].problem == OUT and queue.died(cell) == 1


def test_times_reach_the_pace_and_are_ignored_where_there_is_none(table: Any, processes: list[Process]) -> None:
    queue, pace, fleet = Queue(table(0, 1)), Pace(8, lambda line: None), list[Any]()
    handed_out(queue, fleet, pace)
    for number in range(12):
        processes[0].answers = [("phase", Timed(number, 0, 1.0, float(number)))] * 2
        workers._receive(fleet[0], queue, fleet, JobSettings(), unseen)
        assert pace.number == (2 if number > 10 else 1)
        workers._receive(fleet[0], queue, fleet, JobSettings(), unseen, pace)


# processes -----------------------------------------------------------------------------------------------------------


class Holding(Pace):
    """Two runs at a time; the first one waits after its first phase until three phases of others have passed."""

    made: list[Holding]

    def __init__(self, most: int, say: Callable[[str], None]) -> None:
        super().__init__(most, say)
        self.number, self.decided = 2, True
        self.stopped, self.others = False, 0
        Holding.made = [self]

    def update(self, runs: Sequence[Hashable], waiting: bool, now: float) -> None:
        super().update(runs, waiting, now)
        self.held = frozenset(runs[:1] if len(runs) == 2 and self.others < 3 else ())

    def phase(self, run: Hashable, phase: Timed) -> None:
        assert not (self.stopped and run in self.held), "it goes on while it has to wait"
        self.others += self.stopped and run not in self.held

    def waits(self, run: Hashable, since: float) -> None:
        self.stopped = True


def numbers(table: Sequence[GridJob]) -> list[Any]:
    found = [outcome.result or {} for outcome in jobs.run_all(table, JobSettings(jobs=1))]
    return [(result["metrics"], result["accuracy_matrix"]) for result in found]


@pytest.mark.usefixtures("control")
def test_runs_that_were_added_and_held_have_the_numbers_of_one_process(
    table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes, on the CPU; their CUDA MPS is the stand-in."""
    monkeypatch.setattr(workers, "Pace", Holding)
    lines: list[str] = []
    side_by_side, events = table(0, 1, 2), list[str]()
    queue = Queue(side_by_side, say=lines.append)
    workers.run(
        queue, JobSettings(), Concurrency(8, "", False, True), lambda cell, event: events.append(event["event"])
    )
    assert Holding.made[0].stopped and Holding.made[0].others >= 3
    assert lines == [SHARED] and events.count("end") == 3 and set(events) >= {"start", "phase", "evaluation"}
    assert all(cell.finished for cell in side_by_side)
    assert numbers(side_by_side) == numbers(table(0, 1, 2, folder="alone"))


def test_real_runs_are_measured(table: Any, monkeypatch: pytest.MonkeyPatch, control: Callable[[], list[str]]) -> None:
    """Two runs that would take minutes; the table is stopped as soon as the number is found."""
    for name, value in {"SECONDS": 0.0, "GAIN": 0.0, "GRACE": HANG}.items():
        monkeypatch.setattr(concurrency, name, value)
    lines: list[str] = []

    class Found(Exception):
        pass

    def say(line: str) -> None:
        lines.append(line)
        if "at a time on the GPU: all together" in line:
            raise Found

    queue = Queue(table(0, 1, 2, sets=["train.rounds_per_task=100000"]), say=say)
    with pytest.raises(Found):
        workers.run(queue, JobSettings(), Concurrency(2, "", False, True), lambda cell, event: None)
    assert lines[1].startswith("2 runs at a time on the GPU: all together, 2 are ")
    assert lines[1].endswith(" times as fast as 1; more are not tried (--jobs N chooses another number)")
    assert control()[-1].startswith("quit ")
