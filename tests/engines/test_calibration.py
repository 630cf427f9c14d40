"""Whether processes pay is decided from what one client takes, remembered, and never in the way of a run."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
from torch import nn

from everfed.core.context import TrainOptions
from everfed.engines import calibration
from everfed.engines.calibration import BYTES_PER_SECOND, CALL_SECONDS, processes_pay
from everfed.methods import registry as methods
from tests.support.toy import Bench, Toy


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of each test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "everfed" / "engines.json"


class Stopwatch:
    """Instead of a measurement: what it says, and how often it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, moved: int = 0) -> None:
        self.asked = 0

        def measure(*_: object) -> tuple[float, int]:
            self.asked += 1
            return seconds, moved

        monkeypatch.setattr(calibration, "_measure", measure)


def pays(bench: Bench, workers: int = 2) -> bool:
    return processes_pay(bench.setup(), bench.build_module, workers)


def clients(count: int) -> Bench:
    return Bench(stream=Toy(clients=count))


# With n clients on w workers the busiest has b = ceil(n / w); they pay when b (c + h) < 0.9 n c: for n = 4 and w = 2
# when c > 2 h / 1.6, for n = 3 and w = 2 when c > 2 h / 0.7, for n = 1 never.
@pytest.mark.parametrize(("count", "workers", "threshold"), [(4, 2, 1.25), (3, 2, 2 / 0.7), (8, 8, 1 / 6.2)])
def test_they_pay_when_clients_take_longer_than_handing_them_over(
    monkeypatch: pytest.MonkeyPatch, count: int, workers: int, threshold: float
) -> None:
    Stopwatch(monkeypatch, CALL_SECONDS * threshold * 1.01)
    assert pays(clients(count), workers)
    Stopwatch(monkeypatch, CALL_SECONDS * threshold * 0.99)
    assert not pays(clients(count).change(train=TrainOptions(batch_size=7)), workers)


def test_one_client_is_never_worth_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch, 1000.0)
    assert not pays(clients(1))


def test_large_states_cost_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    Stopwatch(monkeypatch, 1.0, moved=int(0.5 * BYTES_PER_SECOND))
    assert pays(clients(4))
    Stopwatch(monkeypatch, 1.0, moved=int(0.9 * BYTES_PER_SECOND))
    assert not pays(clients(4).change(train=TrainOptions(batch_size=7)))


def test_the_answer_is_remembered(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    watch = Stopwatch(monkeypatch, 1.0)
    assert pays(clients(4)) and pays(clients(4))
    assert watch.asked == 1
    assert list(json.loads(cache.read_text()).values()) == [[1.0, 0]]


def test_an_entry_of_another_form_is_measured_again(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    watch = Stopwatch(monkeypatch, 1.0)
    pays(clients(4))
    cache.write_text(json.dumps(dict.fromkeys(json.loads(cache.read_text()), True)))
    assert pays(clients(4)) and watch.asked == 2


def test_the_speedup_of_processes_in_closed_form() -> None:
    """8 clients of 1 s and no bytes: 4 workers run 2 each, so 8 / (2 (1 + h)); one worker is never slower than none."""
    one = calibration.OneClient(1.0, 0)
    assert calibration.speedup(one, 8, 4) == pytest.approx(4 / (1 + CALL_SECONDS))
    assert calibration.speedup(one, 3, 2) == pytest.approx(1.5 / (1 + CALL_SECONDS))
    assert calibration.speedup(one, 8, 1) == 1.0


@pytest.mark.parametrize(
    "other",
    [
        Bench("fedprox", stream=Toy(clients=4)),
        Bench(stream=Toy(clients=5)),
        Bench(stream=Toy(clients=4, samples=13)),
        Bench(stream=Toy(clients=4), train=TrainOptions(3, 5)),
        Bench(stream=Toy(clients=4), train=TrainOptions(2, 6)),
        Bench(stream=Toy(clients=4), module=lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(16, classes))),
    ],
    ids=["method", "clients", "samples", "epochs", "batch", "model"],
)
def test_another_case_is_measured_anew(monkeypatch: pytest.MonkeyPatch, other: Bench) -> None:
    watch = Stopwatch(monkeypatch, 1.0)
    pays(clients(4))
    pays(other)
    assert watch.asked == 2


def test_another_machine_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch(monkeypatch, 1.0)
    pays(clients(4))
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    pays(clients(4))
    assert watch.asked == 2


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"text"'])
def test_a_damaged_cache_is_measured_again(monkeypatch: pytest.MonkeyPatch, cache: Path, content: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(content)
    watch = Stopwatch(monkeypatch, 1.0)
    assert pays(clients(4)) and watch.asked == 1
    assert pays(clients(4)) and watch.asked == 1


def test_a_cache_that_cannot_be_written_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    cache.parent.parent.mkdir(exist_ok=True)
    cache.parent.write_text("a file where the folder should be")
    watch = Stopwatch(monkeypatch, 1.0)
    assert pays(clients(4)) and pays(clients(4))
    assert watch.asked == 2


def test_a_fault_of_the_client_is_left_to_the_run(cache: Path) -> None:
    """It will say which client failed, where and why; here nothing is known, and nothing is remembered."""
    broken = clients(4).change(module=lambda shape, classes: nn.Linear(3, classes))
    assert not pays(broken)
    assert not cache.exists()


@pytest.mark.parametrize("method", ["fedavg", "fedgp+der", *[n for n in methods.names() if n in ("fedweit", "stamp")]])
def test_a_real_client_is_measured_and_nothing_is_kept(method: str) -> None:
    bench = Bench(method, stream=Toy(clients=3, sizes={(0, 0): 0}))
    setup = bench.setup()
    seconds, moved = calibration._measure(setup, bench.build_module)
    assert seconds > 0.0
    assert moved >= 4 * setup.facts.layout.shared, "the first client has no data, but another one trains"


@pytest.mark.parametrize(("seconds", "trainings"), [(0.5, 2), (2.0, 1)])
def test_a_long_training_is_not_repeated(monkeypatch: pytest.MonkeyPatch, seconds: float, trainings: int) -> None:
    """On a CPU one client of a large network takes minutes, in which a user sees nothing."""
    calls, clock = [], [0.0]

    def slow(*given: object) -> object:
        calls.append(given)
        clock[0] += seconds
        return real(*given)  # type: ignore[arg-type]

    real = calibration.call
    monkeypatch.setattr(calibration, "call", slow)
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: clock[0])
    bench = clients(2)
    measured = calibration.one_client(bench.setup(), bench.build_module)
    assert measured is not None and measured.seconds == seconds and len(calls) == trainings
