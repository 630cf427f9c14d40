"""A table as a queue: several processes work through one folder, cells run side by side, and nothing is lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everfed.commands.terminal import Beside, Terminal
from everfed.engines.calibration import CALL_SECONDS, OneClient
from everfed.errors import UserError
from everfed.experiments import concurrency, jobs, workers
from everfed.experiments.concurrency import Concurrency, choose
from everfed.experiments.grid import Shown
from everfed.experiments.jobs import GridJob, JobSettings, Outcome, Queue
from everfed.recipe import Places, read
from everfed.reports.progress import Several
from everfed.store.files import locked
from everfed.store.run import LOCK, RECIPE, RunFolder, SameRun
from tests.support.child import KILLED, Child, events, state_of, until
from tests.support.waiting import HANG

TABLE = """
[stream]
tasks = 3
clients = 4
max_train = 600
max_test = 60
[model]
kind = "mlp"
hidden = [32]
[train]
rounds_per_task = 6
[engine]
kind = "eager"
device = "cpu"
[method]
name = "fedavg"
"""
METHODS, SEEDS = ("fedavg", "er"), (0, 1)
FOLDERS = [f"{method}-{seed}" for method in METHODS for seed in SEEDS]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "table.toml").write_text(TABLE)
    return tmp_path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The numbers of one process, one cell after the other."""
    folder = tmp_path_factory.mktemp("alone")
    table = str(folder / "table.toml")
    Path(table).write_text(TABLE)
    grid = [
        jobs.new_job(method, str(folder / "table.toml"), folder / f"{method}-{seed}", method=method, seed=seed, sets=[])
        for method in METHODS
        for seed in SEEDS
    ]
    jobs.run_all(grid, settings(jobs=1))
    return numbers(folder)


def started(work: Path, *more: str) -> Child:
    named = ["--methods", ",".join(METHODS), "--seeds", ",".join(map(str, SEEDS)), "--out", "cells"]
    return Child(work, "compare", "table.toml", *named, "--checkpoint-every", "0", *more)


def ended(process: Child) -> str:
    done = process.wait()
    assert done.code == 0, done.stderr
    return done.stdout


def trained(log: list[dict[str, Any]]) -> list[int]:
    return [event["round"] for event in log if event["event"] == "phase" and event["phase"] == "train"]


def rounds(folder: Path) -> int:
    return len(trained(events(folder)))


def numbers(out: Path) -> dict[str, Any]:
    found = {name: json.loads((out / name / "result.json").read_text()) for name in FOLDERS}
    return {name: (one["metrics"], one["accuracy_matrix"], one["cost"]["bytes_up"]) for name, one in found.items()}


def test_two_processes_and_a_kill_give_what_one_process_gives(work: Path, alone: dict[str, Any]) -> None:
    """The second one takes the cells that the first does not hold, and the cell of the first after its death."""
    first = started(work, "--jobs", "1")
    until(lambda: rounds(work / "cells" / FOLDERS[0]) > 0, first)
    second = started(work, "--jobs", "1")
    until(lambda: any(rounds(work / "cells" / name) > 0 for name in FOLDERS[1:]), second)
    first.kill()
    first.wait()
    ended(second)
    assert numbers(work / "cells") == alone
    for name in FOLDERS:
        log = events(work / "cells" / name)
        begun = [index for index, event in enumerate(log) if event["event"] == "start"]
        assert len(begun) <= 2 and sorted(set(trained(log))) == list(range(18))
        for again in begun[1:]:
            # the last checkpoint may not have been finished when its cell was killed; the one before was
            saved = [event["round"] for event in log[:again] if event["event"] == "checkpoint"]
            assert log[again]["round"] >= (saved[-2] if len(saved) > 1 else 0)
            # nor does it train again what a checkpoint within its round holds
            rest = trained(log[again:])
            assert rest == list(range(18 - len(rest), 18))
            assert 18 - len(rest) in (log[again]["round"], log[again]["round"] + 1)
    table = json.loads((work / "cells" / "compare.json").read_text())
    assert all(run["metrics"] for row in table["rows"] for run in row["runs"])


@pytest.mark.slow
def test_both_of_two_processes_finish_and_nothing_is_computed_twice(work: Path) -> None:
    both = [started(work, "--jobs", "1"), started(work, "--jobs", "2")]
    texts = [ended(process) for process in both]
    for name in FOLDERS:
        log = events(work / "cells" / name)
        assert [event["event"] for event in log].count("start") == 1, log
        assert rounds(work / "cells" / name) == 18
    assert all("written to cells" in text for text in texts)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_and_its_cell_goes_on(work: Path, alone: dict[str, Any]) -> None:
    parent = started(work, "--jobs", "2")
    until(lambda: rounds(work / "cells" / FOLDERS[0]) > 0, parent)
    os.kill(_child(parent.pid), signal.SIGKILL)
    text = ended(parent)
    assert text.startswith("2 runs side by side\n")
    assert numbers(work / "cells") == alone


def test_workers_end_with_the_command_that_started_them(work: Path) -> None:
    last = work / "cells" / FOLDERS[-1]
    last.mkdir(parents=True)
    with locked(last / LOCK):  # as another process would: the command waits for this cell, however slow the test is
        parent = started(work, "--jobs", "2")
        until(lambda: rounds(work / "cells" / FOLDERS[0]) > 0, parent)
        workers = _children(parent.pid)
        assert len(workers) == 2
        parent.kill()
        assert parent.wait().code == KILLED
        until(lambda: all(state_of(pid) in ("", "Z") for pid in workers), None)
    ended(started(work, "--jobs", "1"))
    assert set(numbers(work / "cells")) == set(FOLDERS)


def _children(pid: int) -> list[int]:
    """The processes of this parent that run cells: those that were spawned, without the resource tracker."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def _child(pid: int) -> int:
    return _children(pid)[0]


# the queue -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cell(work: Path) -> Callable[[str], GridJob]:
    recipe = read(work / "table.toml", sets=["engine.kind=auto"])
    return lambda name: GridJob(name, recipe, work / name, Places("table.toml"))


def settings(**more: Any) -> JobSettings:
    return JobSettings(None, 1.0, 5.0, False, **more)


def test_a_held_cell_comes_after_all_others_and_comes_again(cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one, two = cell("one"), cell("two")
    queue = Queue([one, two])
    assert queue.take() is one and not queue.was_held(one)
    queue.hold(one)
    assert queue.take() is two
    assert queue.take() is None, "it was just looked at"
    now[0] += workers.POLL
    assert queue.take() is one and queue.was_held(one)
    queue.finish(Outcome(two, {}))
    assert not queue.done
    queue.finish(Outcome(one, {}))
    assert queue.done and [outcome.job for outcome in queue.in_order()] == [one, two]


def test_cells_may_follow_from_an_outcome(cell: Any) -> None:
    one, next_ = cell("one"), cell("next")
    queue = Queue([one], lambda outcome: [next_] if outcome.job is one else [])
    assert queue.take() is one
    queue.finish(Outcome(one, {}))
    assert not queue.done and queue.take() is next_
    queue.finish(Outcome(next_, {}))
    assert queue.done and queue.total == 2


def test_a_cell_that_follows_from_several_outcomes_is_one_cell(cell: Any) -> None:
    """Tries of a method that another process has finished meanwhile: each is the last one, and the tests come after."""
    one, two, test = cell("one"), cell("two"), cell("test")
    queue = Queue([one, two], lambda outcome: [] if outcome.job is test else [replace(test)])
    for tried in (queue.take(), queue.take()):
        queue.finish(Outcome(tried, {}))
    assert queue.total == 3
    assert queue.take() == test and queue.take() is None
    queue.finish(Outcome(test, {}))
    assert queue.done and [outcome.job for outcome in queue.in_order()] == [one, two, test]


def test_a_divergence_elsewhere_is_the_outcome_and_nothing_else_is(cell: Any) -> None:
    own = cell("diverged")
    own.folder.mkdir()
    log = own.folder / "events.jsonl"
    log.write_text('{"event": "start"}\n{"event": "fault", "message": "Diverged: the loss is not finite"}\n')
    outcome = jobs.attempt(own, settings(), [], was_held=True)
    assert outcome == Outcome(own, None, "the loss is not finite", diverged=True)
    with log.open("a") as file:
        file.write('{"event": "sta')  # another process has begun to go on with it
    assert jobs._ended_by(own, jobs.DIVERGED) == "the loss is not finite"
    log.write_text('{"event": "fault", "message": "KeyboardInterrupt: "}\n')
    assert jobs._ended_by(own, jobs.DIVERGED) is None


def test_a_run_that_another_process_begins_meanwhile_is_not_taken_for_something_else(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SameRun: the cell is left to the other process. Any other error would end the command."""
    exists, begun = Path.exists, list[Path]()

    def then_begun(path: Path) -> bool:
        found = exists(path)
        if path.name == RECIPE and not begun:
            begun.append(path)
            RunFolder.create(path.parent, "seed = 0", {})
        return found

    monkeypatch.setattr(Path, "exists", then_begun)
    with pytest.raises(SameRun, match="unfinished run of this recipe"), RunFolder.new(work / "one", "seed = 0", {}):
        pass
    assert begun


# what is checked and shown --------------------------------------------------------------------------------------


def test_before_the_first_run_one_cell_of_every_row_and_of_every_seed_is_checked(
    cell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the seeds 0, 1 and 2 in two rows: a-0 and b-0 for the rows, a-1 and a-2 for the other seeds."""
    checked = list[str]()
    monkeypatch.setattr(jobs, "check_run", lambda cell, settings: checked.append(cell.folder.name))
    table = [
        replace(cell(f"{row}-{seed}"), row=row, recipe=cell("any").recipe.model_copy(update={"seed": seed}))
        for row in "ab"
        for seed in range(3)
    ]
    jobs.check(table, settings())
    assert checked == ["a-0", "b-0", "a-1", "a-2"]


def test_the_time_left_in_all_is_of_the_runs_that_are_not_finished(cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three runs one is finished: the first of the others has a time left in all, the second is the last."""
    known = list[bool]()

    def shown(progress: bool | None, title: str, several: Several) -> AbstractContextManager[tuple[()]]:
        known.append(several.left(0.5) is not None)
        return nullcontext(())

    monkeypatch.setattr("everfed.experiments.jobs.shown", shown)
    before, one, two = cell("before"), cell("one"), cell("two")
    before.folder.mkdir()
    RunFolder(before.folder).result.write_text("{}")
    output = Shown(None, ())
    output.begin([before, one, two])
    for each in (before, one, two):
        with output.watch(each, each.title):
            pass
    assert known == [True, False]


def test_a_cell_that_another_process_holds_is_named_once_and_does_not_count_as_run(
    cell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three runs the first is held and the second took 10 s: another 20 s for the two that are left."""
    now, output = [0.0], Terminal(False)
    one, two, three = (cell(name) for name in ("one", "two", "three"))
    output.begin([one, two, three])
    output._several.clock = lambda: now[0]
    queue = Queue([one, two, three], say=output.say)
    with output.watch(one, one.title):
        pass
    output.held(one)
    queue.hold(one)
    queue.hold(one)
    with output.watch(two, two.title):
        now[0] = 10.0
    assert output._several.left(0.0) == 20.0
    said = "one seed 0: another process runs it; it is tried again after the others\n"
    assert capsys.readouterr().out.count(said) == 1


def test_runs_side_by_side_show_now_and_then_where_they_are(cell: Any) -> None:
    """Of four runs one is finished after 20 s, half and a quarter of two others: 1.75 of 4, so 25.7 s are left."""
    now = [0.0]
    several = Several(4, clock=lambda: now[0])
    several.begin()
    shown = Beside(several, lambda: now[0])
    for name in ("one", "two", "three"):
        shown.update(cell(name), {"event": "start", "method": "fedavg", "rounds": 4, "tasks": 2})
    shown.update(cell("one"), {"event": "end"})
    train = {"event": "phase", "phase": "train", "bytes_up": 0, "bytes_down": 0}
    shown.update(cell("two"), {**train, "task": 0, "round": 1})
    shown.update(cell("three"), {**train, "task": 0, "round": 0})
    now[0] = 14.0
    assert shown.line() == ""
    now[0] = 20.0
    assert shown.line() == "two seed 0 task 1/2, round 2/4; three seed 0 task 1/2, round 1/4; 0:26 left in all"
    assert shown.line() == "", "the last one was just printed"


def test_the_score_of_a_run_beside_others_has_the_unit_of_all_other_lines(
    cell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    end = {"event": "end", "metrics": {"acc": 0.599}, "seconds": 5.1}
    Terminal(False).event(cell("one"), end, "[1/6]")
    assert capsys.readouterr().out == "[1/6] one seed 0: acc 59.9 % after 5.1 s\n"


# the workers, with stand-ins for their processes ----------------------------------------------------------------


class Killed:
    """A process that was killed before it read anything: the other end of its pipe is closed at once."""

    exitcode = -signal.SIGKILL

    def __init__(self, **_: Any) -> None:
        pass

    def start(self, timeout: float | None = None) -> None:
        pass

    kill = join = start


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers whose processes were killed."""
    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Killed)
    monkeypatch.setattr(workers.multiprocessing, "get_context", lambda _: context)


class Recorded(Queue):
    """taken: the cells that were handed out."""

    def __init__(self, *cells: GridJob) -> None:
        super().__init__(cells)
        self.taken = list[GridJob]()

    def take(self) -> GridJob | None:
        found = super().take()
        self.taken += [found] if found else []
        return found


def unseen(cell: GridJob, event: dict[str, Any]) -> None:
    raise AssertionError(f"{cell.title} has no events: {event}")


@pytest.mark.usefixtures("killed")
def test_a_cell_whose_process_was_killed_twice_is_given_up(cell: Any) -> None:
    one, two = cell("one"), cell("two")
    queue = Recorded(one, two)
    workers.run(queue, settings(keep_going=True), Concurrency(1), unseen)
    assert queue.taken == [one, one, two, two]
    problems = [outcome.problem for outcome in queue.in_order()]
    assert problems == [
        f"the process of {name} seed 0 was killed by signal 9, 2 times; is there memory enough?"
        for name in ("one", "two")
    ]


@pytest.mark.usefixtures("killed")
def test_a_cell_whose_process_was_killed_twice_ends_the_command(cell: Any) -> None:
    queue = Recorded(cell("one"), cell("two"))
    with pytest.raises(UserError, match="the process of one seed 0 was killed by signal 9, 2 times"):
        workers.run(queue, settings(), Concurrency(1), unseen)
    assert [cell.row for cell in queue.taken] == ["one", "one"]


@pytest.mark.usefixtures("killed")
def test_the_death_of_a_process_is_printed(cell: Any) -> None:
    lines = list[str]()
    queue, pool = Queue([cell("one")], say=lines.append), list[workers.JobWorker]()
    workers._hand_out(queue, pool, settings(), [workers.Share([0])])
    workers._receive(pool[0], queue, pool, settings(), unseen)
    assert lines == [
        "one seed 0: its process was killed by signal 9; another process resumes it from its last checkpoint"
    ]


@pytest.mark.usefixtures("killed")
def test_a_worker_in_the_place_of_one_that_died_has_its_cores(cell: Any) -> None:
    queue, pool = Queue([cell("one"), cell("two"), cell("three")]), list[workers.JobWorker]()
    shares = [workers.Share([0, 3]), workers.Share([1, 4]), workers.Share([2])]
    workers._hand_out(queue, pool, settings(), shares)
    for dead in tuple(pool[1:]):
        workers._receive(dead, queue, pool, settings(), unseen)
        assert dead not in pool
    assert [worker.share for worker in pool] == shares


@pytest.mark.usefixtures("killed")
def test_the_limit_is_of_one_cell_however_long_its_worker_has_been_there(
    cell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of 10 s: the second cell begins 8 s after the first one and is given up after 18 s."""
    now = [100.0]
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    two, queue, limited = cell("two"), Queue([]), settings(limit=10.0)
    pool = [workers.JobWorker(limited, workers.Share([0]))]
    pool[0].begin(cell("one"), False)
    now[0] = 108.0
    pool[0].begin(two, False)
    now[0] = 118.0
    workers._enforce_limit(queue, pool, limited)
    assert not queue.outcomes
    now[0] = 118.5
    workers._enforce_limit(queue, pool, limited)
    assert list(queue.outcomes.values()) == [Outcome(two, None, "took longer than the limit of 10 s for a run")]


# the end of a worker, with real processes ------------------------------------------------------------------------


@pytest.fixture
def at_work(work: Path, request: pytest.FixtureRequest) -> workers.JobWorker:
    """A worker in the middle of a long run. Its parameter: the cores of its share."""
    sets = ["train.rounds_per_task=100000"]
    cell = jobs.new_job("fedavg", str(work / "table.toml"), work / "long", method="fedavg", seed=0, sets=sets)
    worker = workers.JobWorker(settings(), workers.Share(request.param))
    worker.begin(cell, False)
    while worker.pipe.recv()[1]["event"] != "phase":
        pass
    return worker


@pytest.mark.parametrize("at_work", [None], indirect=True)
def test_a_run_on_a_gpu_ends_by_itself(at_work: workers.JobWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, it would take the runs beside it along (CUDA MPS)."""
    monkeypatch.setattr(workers, "PATIENCE", HANG)
    at_work.stop()
    assert at_work.process.exitcode == 0


@pytest.mark.parametrize("at_work", [None], indirect=True)
def test_a_run_on_a_gpu_that_does_not_end_is_killed(
    at_work: workers.JobWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "PATIENCE", 0.1)
    assert at_work.process.pid is not None
    os.kill(at_work.process.pid, signal.SIGSTOP)
    at_work.stop()
    assert at_work.process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("at_work", [[0]], indirect=True)
def test_a_run_on_cores_is_killed_at_once(at_work: workers.JobWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    join, waited = at_work.process.join, list[float | None]()
    monkeypatch.setattr(at_work.process, "join", lambda timeout=None: waited.append(timeout))
    at_work.stop()
    join()
    assert waited == [None]


# how many at a time ----------------------------------------------------------------------------------------------


def chosen(
    cell: Any, monkeypatch: pytest.MonkeyPatch, seconds: float, runs: int = 16, cores: int = 8, clients: int = 10
) -> Concurrency:
    """For runs of 100 rounds whose clients take `seconds` each."""
    monkeypatch.setattr(concurrency, "_measured", lambda *_: (OneClient(seconds, 0), clients, 100))
    monkeypatch.setattr(concurrency, "_fit_in_memory", lambda: 1000)
    return concurrency._fastest([cell(str(number)) for number in range(runs)], settings(), cores)


def test_cells_side_by_side_where_clients_do_not_divide_among_the_cores(
    cell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 clients on 8 cores are two waves, 5 times as fast; 16 runs on 8 cores are two waves, 8 times as fast."""
    found = chosen(cell, monkeypatch, 1.0)
    assert found.jobs == 8
    assert "8 runs side by side on 8 cores: about 2006 s" in found.why
    assert f"about {16_000 / 5 * (1 + CALL_SECONDS):.0f} s with one run at a time" in found.why


def test_an_engine_that_runs_clients_one_after_the_other_leaves_the_cores_to_cells(
    cell: Any, monkeypatch: pytest.MonkeyPatch, work: Path
) -> None:
    eager = read(work / "table.toml")
    found = chosen(lambda name: replace(cell(name), recipe=eager), monkeypatch, 1.0, runs=2, clients=8)
    assert found.jobs == 2
    assert "about 806 s expected for 2 runs, about 1600 s with one run at a time" in found.why


def test_a_table_of_seconds_is_not_worth_the_start_of_processes(cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 runs of 1000 clients of 0.1 ms: 1.6 s in all."""
    assert chosen(cell, monkeypatch, 1e-4).jobs == 1


def test_one_run_at_a_time_is_a_choice_that_is_printed(cell: Any, monkeypatch: pytest.MonkeyPatch, work: Path) -> None:
    """Eager: 2 runs of 100 rounds of 8 clients of 1 ms take 1.6 s; side by side 0.8 s after the 6 s of a start."""
    eager = read(work / "table.toml")
    found = chosen(lambda name: replace(cell(name), recipe=eager), monkeypatch, 1e-3, runs=2, clients=8)
    assert found == Concurrency(
        1,
        "one run at a time, its clients one after the other, on 8 cores: about 2 s expected for 2 runs, about 7 s with "
        "2 runs side by side (--jobs N chooses another number)",
    )
    monkeypatch.setattr(concurrency, "_fit_in_memory", lambda: 1)
    assert concurrency._fastest([cell("one"), cell("two")], settings(), 8).why.endswith(
        "no second run fits into the memory"
    )


def test_one_run_has_its_clients_side_by_side(cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(cell, monkeypatch, 1.0, runs=1).jobs == 1


def test_few_runs_share_the_cores(cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs on 8 cores with 8 clients: 2 x 4 cores is as fast as 8 for one after the other, apart from the start."""
    assert chosen(cell, monkeypatch, 1.0, runs=2, clients=8).jobs == 1
    assert chosen(cell, monkeypatch, 1.0, runs=2, clients=4).jobs == 2


def test_what_the_command_line_says_is_done(cell: Any) -> None:
    assert choose([cell("one"), cell("two")], settings(jobs=3)) == Concurrency(3, "3 runs side by side")
    assert choose([cell("one"), cell("two")], settings(jobs=1)) == Concurrency(1)


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    assert [share.cores for share in workers._shares(Concurrency(2))] == [[0, 2, 4], [1, 3]]
    assert [share.cores for share in workers._shares(Concurrency(6))] == [[0], [1], [2], [3], [4], [0]]
    assert [share.cores for share in workers._shares(Concurrency(2, pinned=False))] == [None, None]
