"""How many runs go at a time on one GPU: closed forms with invented times, and a simulated GPU."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from everfed.experiments import concurrency
from everfed.experiments.concurrency import GRACE, ROUNDS, TRIES, WARM, Pace, Timed


class Bench:
    """Runs with invented rounds of one phase; all have the same clock."""

    def __init__(self, most: int = 8) -> None:
        self.lines: list[str] = []
        self.pace = Pace(most, self.lines.append)
        self.runs: list[str] = []
        self.now, self._round = 100.0, dict[str, int]()

    def under_way(self, *runs: str, waiting: bool = True) -> None:
        self.runs = list(runs)
        self.pace.update(self.runs, waiting, self.now)

    def rounds(self, run: str, count: int, seconds: float, task: int = 0, reserved: float = 0.0, free: float = 1.0):
        """Rounds one after the other, from the moment `now`, which stays where it is."""
        now = self.now
        for _ in range(count):
            number = self._round[run] = self._round.get(run, -1) + 1
            now += seconds
            self.pace.phase(run, Timed(number, task, seconds, now, reserved, free))
        return now

    def warm(self, *runs: str, seconds: float = 1.0, **more: float) -> None:
        """The last phase of the round WARM opens the next one, and so closes the last of the warm ones."""
        self.now = max(self.rounds(run, WARM + 1, seconds, **more) for run in runs)

    def window(self, **seconds: float | tuple[float, int]) -> None:
        """A window of every run: seconds of a round, or these and the task. The first round began before it, and a
        further one closes the last."""
        given = {run: one if isinstance(one, tuple) else (one, 0) for run, one in seconds.items()}
        self.now = max(self.rounds(run, ROUNDS + 2, one, task) for run, (one, task) in given.items())

    def stop_held(self) -> None:
        assert self.pace.held
        for run in self.pace.held:
            self.pace.waits(run, self.now)


@pytest.fixture
def two() -> Bench:
    """Two runs of which both are warm."""
    bench = Bench()
    bench.under_way("a")
    bench.warm("a")
    assert bench.pace.number == 2
    bench.under_way("a", "b")
    bench.warm("a", "b")
    return bench


def test_a_second_run_begins_when_the_first_is_warm() -> None:
    bench = Bench()
    bench.under_way("a")
    bench.rounds("a", WARM, 1.0)
    assert bench.pace.number == 1
    bench.rounds("a", 1, 1.0)
    assert bench.pace.number == 2 and not bench.lines


def test_the_gain_is_that_of_all_together(two: Bench) -> None:
    """A round of 1.25 s beside the other and of 1 s alone: 2 / 1 * (1 / 1.25) = 1.6."""
    two.window(a=1.25, b=3.0)
    assert two.pace.held == {"b"}
    two.stop_held()
    two.window(a=1.0)
    assert two.pace.gains == {(2, 1): pytest.approx(1.6)}
    assert two.pace.number == 4 and not two.pace.held and not two.pace.decided


def test_without_a_gain_the_number_goes_back(two: Bench) -> None:
    """Of 2 s beside the other and 1 s alone: as fast as one after the other."""
    two.window(a=2.0, b=2.0)
    two.stop_held()
    two.window(a=1.0)
    assert two.pace.number == 1 and two.pace.decided and not two.pace.held
    assert two.lines == [
        "one run at a time on the GPU: all together, 2 are 1.00 times as fast as 1 (--jobs N chooses another number)"
    ]
    two.window(a=2.0, b=2.0)
    assert two.pace.number == 1 and len(two.lines) == 1, "decided for the rest of the table"


@pytest.mark.parametrize(("beside", "number"), [(2 / 1.06, 4), (2 / 1.04, 1)])
def test_a_gain_of_five_per_cent_is_enough(two: Bench, beside: float, number: int) -> None:
    two.window(a=beside, b=beside)
    two.stop_held()
    two.window(a=1.0)
    assert two.pace.number == number


def test_runs_of_different_methods_are_compared_with_themselves() -> None:
    """The third makes a's rounds 1.2 and b's 1.4 times as long: 3 / 2 * (1 / 1.2 + 1 / 1.4) / 2 = 1.161."""
    bench = Bench(most=3)
    bench.pace.number, bench.pace.before = 3, 2
    bench.under_way("a", "b", "c")
    bench.warm("a", "b", "c")
    bench.window(a=1.2, b=14.0, c=5.0)
    bench.stop_held()
    bench.window(a=1.0, b=10.0)
    assert bench.pace.gains == {(3, 2): pytest.approx(1.5 * (1 / 1.2 + 1 / 1.4) / 2)}
    assert bench.lines == [
        "3 runs at a time on the GPU: all together, 3 are 1.16 times as fast as 2; more are not tried "
        "(--jobs N chooses another number)"
    ]


def test_rounds_that_capture_score_or_save_do_not_count(two: Bench) -> None:
    """Two of the five rounds of a window take 50 s."""
    for seconds in (1.25, 1.0):
        times = [seconds, 50.0, seconds, 50.0, seconds, seconds, seconds]
        for run in ("a", "b") if seconds == 1.25 else ("a",):
            start = two.now
            for one in times:
                two.now = two.rounds(run, 1, one)
            two.now = start
        two.now += sum(times)
        if seconds == 1.25:
            two.stop_held()
    assert two.pace.gains == {(2, 1): pytest.approx(1.6)}


def test_rounds_before_all_are_warm_do_not_count(two: Bench) -> None:
    """While the second run is read in and captures, the first is as fast as alone: no window may begin there."""
    bench = Bench()
    bench.under_way("a")
    bench.warm("a")
    bench.under_way("a", "b")
    bench.now = bench.rounds("a", 50, 1.0)
    bench.warm("b", seconds=0.1)
    assert not bench.pace.held
    bench.window(a=1.25, b=1.25)
    bench.stop_held()
    bench.window(a=1.0)
    assert bench.pace.gains == {(2, 1): pytest.approx(1.6)}


def test_rounds_before_the_held_run_has_stopped_do_not_count(two: Bench) -> None:
    two.window(a=1.25, b=1.25)
    two.window(a=1.25)
    assert not two.pace.gains
    two.stop_held()
    two.window(a=1.0)
    assert two.pace.gains == {(2, 1): pytest.approx(1.6)}


def test_a_run_whose_task_changed_does_not_count() -> None:
    """c's rounds are twice as long in its second task, which says nothing about the runs beside it."""
    bench = Bench()
    bench.pace.number, bench.pace.before = 3, 2
    bench.under_way("a", "c", "last")
    bench.warm("a", "c", "last")
    bench.window(a=1.25, c=1.25, last=1.25)
    bench.stop_held()
    bench.window(a=1.0, c=(2.0, 1))
    assert bench.pace.gains == {(3, 2): pytest.approx(1.5 / 1.25)}


def test_where_every_task_changed_both_windows_are_repeated(two: Bench) -> None:
    for task in range(TRIES - 1):
        two.window(a=(1.25 + task, task), b=1.25)
        two.stop_held()
        two.window(a=(2.0 + task, task + 1))
        assert not two.pace.gains and not two.pace.held and two.pace.number == 2
        two.rounds("a", 1, 1.0, task + 1)
    two.window(a=(1.25, 9), b=1.25)
    two.stop_held()
    two.window(a=(1.0, 9))
    assert two.pace.gains == {(2, 1): pytest.approx(1.6)}


def test_tasks_that_are_shorter_than_two_windows_are_compared_in_the_last_try(two: Bench) -> None:
    for task in range(TRIES):
        assert not two.pace.gains
        two.window(a=(1.25, 2 * task), b=1.25)
        two.stop_held()
        two.window(a=(1.0, 2 * task + 1))
    assert two.pace.gains == {(2, 1): pytest.approx(1.6)}


def test_a_run_that_ends_while_it_is_measured_starts_the_measurement_again(two: Bench) -> None:
    two.window(a=1.25, b=1.25)
    two.stop_held()
    two.under_way("c", "b")
    assert not two.pace.held, "b goes on"
    two.window(c=1.0, b=1.0)
    assert not two.pace.held and not two.pace.gains, "c is not warm"
    two.now = two.rounds("c", WARM + 1 - (ROUNDS + 2), 1.0)
    two.window(c=1.5, b=1.5)
    two.stop_held()
    two.window(c=1.0)
    assert two.pace.gains == {(2, 1): pytest.approx(2 / 1.5)}


def test_nothing_is_measured_where_no_run_is_waiting(two: Bench) -> None:
    two.under_way("a", "b", waiting=False)
    two.window(a=1.25, b=1.25)
    assert not two.pace.held
    two.under_way("a", "b", waiting=True)
    two.window(a=1.25, b=1.25)
    assert two.pace.held == {"b"}


def test_short_rounds_are_timed_for_a_second(two: Bench) -> None:
    two.window(a=0.01, b=0.01)
    assert not two.pace.held
    two.now = max(two.rounds(run, 100, 0.01) for run in "ab")
    assert two.pace.held == {"b"}


def test_no_run_waits_for_ever(two: Bench) -> None:
    for number in range(TRIES):
        begun = two.now
        two.window(a=1.0, b=1.0)
        two.stop_held()
        longest = 3 * (two.now - begun) + GRACE
        two.pace.update(two.runs, True, two.now + longest - 0.1)
        assert two.pace.held == {"b"}
        two.pace.update(two.runs, True, two.now + longest + 0.1)
        assert not two.pace.held
        assert two.pace.decided == (number == TRIES - 1)
        two.now = two.rounds("a", 1, 1.0)  # opens the next window
    assert two.pace.number == 1
    assert two.lines == [
        "one run at a time on the GPU: 2 could not be compared with 1 (--jobs N chooses another number)"
    ]


@pytest.mark.parametrize(
    ("reserved", "free", "number"),
    [(0.35, 0.6, 2), (0.37, 0.6, 1), (0.35, 0.43, 1)],  # 1.25 times as much must fit into 0.9 / 2 and into what is free
)
def test_another_run_must_fit_into_the_memory(reserved: float, free: float, number: int) -> None:
    bench = Bench()
    bench.under_way("a")
    bench.warm("a", reserved=reserved, free=free)
    assert bench.pace.number == number
    says = "one run at a time on the GPU: another one might not fit into its memory (--jobs N chooses another number)"
    assert bench.lines == ([says] if number == 1 else [])


@pytest.mark.parametrize(
    ("reserved", "free", "number"),
    [(0.1, 0.8, 4), (0.17, 0.66, 4), (0.19, 0.62, 3), (0.17, 0.4, 3), (0.17, 0.2, 2), (0.01, 0.52, 4), (0.01, 0.48, 3)],
)
def test_as_many_are_added_as_have_room(two: Bench, reserved: float, free: float, number: int) -> None:
    """1.25 times as much must fit into an equal share of 0.9, and that of all new ones into what is free, with their
    contexts: what is neither free nor reserved. The last two: contexts of 0.23 and 0.25, of two runs that reserve 0.01
    each."""
    two.window(a=1.25, b=1.25)
    two.stop_held()
    two.pace._runs["b"].last = Timed(99, 0, 1.0, two.now, reserved, free)
    two.now = two.rounds("a", ROUNDS + 2, 1.0, reserved=reserved, free=free)
    assert two.pace.number == number and two.pace.decided == (number == 2)


def test_windows_begin_when_the_last_of_several_has_stopped() -> None:
    """Four runs, of which two wait: a's rounds take 2 s beside three others and 1 s beside one, so do b's."""
    bench = Bench()
    bench.pace.number, bench.pace.before = 4, 2
    bench.under_way("a", "b", "c", "d")
    bench.warm("a", "b", "c", "d")
    bench.window(a=2.0, b=2.0, c=2.0, d=2.0)
    assert bench.pace.held == {"c", "d"}
    bench.pace.waits("d", bench.now)
    bench.window(a=1.5, b=1.5)
    assert not bench.pace.gains, "c has not stopped"
    bench.pace.waits("c", bench.now)
    bench.window(a=1.0, b=1.0)
    assert bench.pace.gains == {(4, 2): pytest.approx(1.0)} and bench.pace.number == 2 and not bench.pace.held


def test_a_run_that_fails_beside_others_makes_them_fewer_until_it_was_alone(two: Bench) -> None:
    two.window(a=1.25, b=1.25)
    assert two.pace.held == {"b"}
    assert two.pace.fewer()
    assert two.pace.number == 1 and two.pace.decided and not two.pace.held
    two.under_way("a")
    assert not two.pace.fewer()


def test_a_run_that_fails_while_more_are_tried_leads_back_to_the_number_before() -> None:
    bench = Bench()
    bench.pace.number, bench.pace.before = 8, 4
    bench.under_way(*"abcdefgh")
    assert bench.pace.fewer() and bench.pace.number == 4 and bench.pace.decided
    bench.under_way(*"abcd")
    assert bench.pace.fewer() and bench.pace.number == 3


# a simulated GPU -------------------------------------------------------------------------------------------------


@dataclass
class Simulated:
    """A run: seconds of a round alone, and its place."""

    base: float
    round: int = 0
    since: float = 0.0
    waits: bool = False


def simulate(
    total: Callable[[int], float], bases: Sequence[float], noise: float = 0.0, seed: int = 0, rounds: int = 400,
    most: int = 8, task_rounds: int = 60,
) -> tuple[Pace, list[str]]:  # fmt: skip
    """Runs on a GPU on which n of them together are total(n) times as fast as one. A run starts for 6 s, its first
    rounds capture, rounds of its second task are 1.5 times as long, and every tenth round is scored, which takes as
    long again. Every run ends after `rounds` rounds, and another one takes its place."""
    lines, chance, names = list[str](), random.Random(seed), itertools.count()
    pace, runs, ends = Pace(most, lines.append), dict[int, Simulated](), list[tuple[float, int, float]]()
    now = 0.0

    def begin_round(name: int) -> None:
        run = runs[name]
        together = max(1, sum(not one.waits and one.since <= now for one in runs.values()))
        factor = (3.0 if run.round < WARM // 2 else 1.0) * (1.5 if run.round >= task_rounds else 1.0)
        seconds = run.base * factor * together / total(together) * (1 + noise * chance.uniform(-1, 1))
        scoring = run.base if run.round % 10 == 9 else 0.0
        heapq.heappush(ends, (max(now, run.since) + seconds + scoring, name, seconds))

    while not pace.decided and now < 1e5:
        while len(runs) < pace.number:
            name = next(names)
            runs[name] = Simulated(bases[name % len(bases)], since=now + 6.0)
            begin_round(name)
        pace.update(list(runs), True, now)
        for name, run in runs.items():
            if run.waits and name not in pace.held:
                run.waits = False
                begin_round(name)
        now, name, seconds = heapq.heappop(ends)
        run = runs[name]
        pace.phase(name, Timed(run.round, run.round // task_rounds, seconds, now))
        run.round += 1
        if run.round == rounds:
            del runs[name]
        elif name in pace.held:
            run.waits = True
            pace.waits(name, now)
        else:
            begin_round(name)
    return pace, lines


def test_the_number_at_which_a_gpu_is_full_is_found() -> None:
    """Three fill it: the total is 1, 1.8, 2.3 and stays there, so that four are as good as three."""
    pace, lines = simulate(lambda runs: (1.0, 1.8, 2.3)[min(runs, 3) - 1], [0.3, 0.5, 0.2])
    assert pace.number == 4
    assert lines == [
        "4 runs at a time on the GPU: all together, 2 are 1.80 times as fast as 1, 4 are 1.28 times as fast as 2, "
        "8 are 1.00 times as fast as 4 (--jobs N chooses another number)"
    ]


def test_all_that_are_tried_where_each_run_needs_little() -> None:
    """The last step is a smaller one where twice as many are more than are allowed."""
    pace, lines = simulate(float, [0.3, 0.5, 0.2], most=7, rounds=4000)
    assert pace.number == 7 and "4 are 2.00 times as fast as 2, 7 are 1.75 times as fast as 4; more are not" in lines[0]


def test_tasks_of_a_few_rounds_and_runs_that_often_end() -> None:
    pace, _ = simulate(lambda runs: min(runs, 2.0), [0.3, 0.5, 0.2], rounds=90, task_rounds=5)
    assert pace.number == 2


@settings(max_examples=30, deadline=None)
@given(
    gains=st.lists(st.sampled_from([0.9, 1.0, 1.15, 1.3]), min_size=7, max_size=7),
    bases=st.lists(st.floats(0.05, 2.0), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_the_right_number_for_any_gpu_with_noise(gains: list[float], bases: list[float], seed: int) -> None:
    """Gains are far enough from GAIN for noise of 2 per cent; rounds of equal runs are as many as the measurement
    needs."""
    totals = list(itertools.accumulate([1.0, *gains], lambda total, gain: total * gain))
    doubled = [totals[2 * n - 1] / totals[n - 1] for n in (1, 2, 4)]
    assume(all(abs(gain - concurrency.GAIN) > 0.04 for gain in doubled))
    pace, _ = simulate(lambda runs: totals[runs - 1], bases, noise=0.02, seed=seed, rounds=10**6, task_rounds=10**5)
    paying = itertools.takewhile(lambda gain: gain >= concurrency.GAIN, doubled)
    assert pace.decided and pace.number == 2 ** sum(1 for _ in paying)
