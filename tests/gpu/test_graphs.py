"""The graphs engine against the eager one on the same GPU, in fp32, for every preset."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from everfed.core.context import Setup, TrainOptions
from everfed.core.method import Method
from everfed.core.optimizer import Optimizer
from everfed.engines.eager import Eager
from everfed.methods.monitor import FeatureShift
from everfed.store.clients import ClientStore
from tests.streams.test_targets import of_images
from tests.support.presets import each_preset
from tests.support.toy import Bench, Norm, Outcome, Toy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# fp32, TF32 off: what is left is the order of sums inside kernels, amplified over the steps of the run
TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def bench(method: str, **changes: object) -> Bench:
    # sizes differ by client, so that last minibatches have several shapes
    stream = Toy(clients=5, samples=23, sizes={(1, 0): 7, (2, 1): 12, (3, 0): 0}, augmented=True)
    base = Bench(method, stream=stream, train=TrainOptions(2, 5, Optimizer(lr=0.1)), module=Norm)
    return base.change(**changes)


def on_gpu(case: Bench) -> Outcome:
    def eager(setup: Setup, store: ClientStore) -> Eager:
        return Eager(setup, store, case.build_module, "cuda", "fp32")

    return case.run(eager)


def captured(case: Bench, slots: int = 3, threads: int = 1) -> Outcome:
    from everfed.engines.graphs import Graphs

    def graphs(setup: Setup, store: ClientStore) -> Graphs:
        return Graphs(setup, store, case.build_module, "cuda", "fp32", slots=slots, host_threads=threads)

    return case.run(graphs)


def distance(a: Outcome, b: Outcome) -> float:
    """Of parameters and buffers: a method may have frozen all parameters."""
    ours, theirs = (torch.cat([one.params.cpu(), one.state.server["model"]["stats"].cpu()]) for one in (a, b))
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("method", each_preset())
def test_graphs_equal_eager(method: str) -> None:
    case = bench(method)
    reference, result = on_gpu(case), captured(case)
    assert distance(result, reference) < TOLERANCE
    assert result.state.rows.keys() == reference.state.rows.keys()
    assert result.state.traffic.as_dict() == reference.state.traffic.as_dict()


@pytest.mark.parametrize("targets", ["labels", "numbers"])
@pytest.mark.parametrize("method", ["fedavg", "fedgp+er", "der"])
def test_graphs_equal_eager_on_other_targets(method: str, targets: str) -> None:
    case = Bench(method, stream=of_images(targets), train=TrainOptions(2, 5, Optimizer(lr=0.01)))  # type: ignore[arg-type]
    assert distance(captured(case), on_gpu(case)) < TOLERANCE


@pytest.mark.parametrize("method", ["fedavg", "fedgp+der", "er"])
def test_the_number_of_slots_and_threads_does_not_matter(method: str) -> None:
    case = bench(method)
    one = captured(case, slots=1)
    for slots, threads in ((2, 1), (4, 1), (4, 4), (5, 2)):
        assert distance(captured(case, slots, threads), one) < TOLERANCE


def test_buffers_hold_the_same_samples() -> None:
    case = bench("fedgp+der")
    reference, result = on_gpu(case), captured(case)
    for client, state in reference.clients.items():
        ours = result.clients[client]["memory"]
        assert torch.equal(ours["x"].cpu(), state["memory"]["x"].cpu())
        assert torch.equal(ours["y"].cpu(), state["memory"]["y"].cpu())
        assert ours["host"]["n"] == state["memory"]["host"]["n"]


@pytest.mark.parametrize("optimizer", [Optimizer(lr=0.05, momentum=0.9), Optimizer("adam", lr=0.01, state="kept")])
def test_optimisers_with_state(optimizer: Optimizer) -> None:
    case = bench("der", train=TrainOptions(2, 5, optimizer))
    assert distance(captured(case), on_gpu(case)) < TOLERANCE


def test_a_restricted_head_and_equalised_traffic() -> None:
    case = bench("fedgp+der", train=TrainOptions(1, 5, Optimizer(lr=0.1), sync_every=2, logits="task"))
    assert distance(captured(case), on_gpu(case)) < TOLERANCE


def test_eager_on_the_gpu_draws_the_same_samples_as_on_the_cpu() -> None:
    # without dropout (whose masks differ by device) only rounding separates the devices
    case = bench("fedgp+der", module=None)
    assert distance(on_gpu(case), case.run()) < 1e-4


def test_a_monitor_sees_the_same_and_changes_nothing() -> None:
    known = bench("er").build_method()
    observed = bench("er").change(method=lambda: Method(known.name, (*known.parts, FeatureShift(samples=8))))
    plain, eager, graphs = captured(bench("er")), on_gpu(observed), captured(observed)
    assert distance(graphs, plain) <= TOLERANCE
    shifts = [[e for e in run.events if e["event"] == "measure"] for run in (eager, graphs)]
    assert shifts[0] and [e["mean shift"] for e in shifts[1]] == pytest.approx([e["mean shift"] for e in shifts[0]])


def test_a_later_run_takes_the_slots_that_an_earlier_one_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from everfed.engines.graphs import Graphs

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    case = Bench("fedavg", stream=Toy(clients=5, samples=23, rounds_per_task=20), module=Norm)
    made: list[Graphs] = []

    def graphs(setup: Setup, store: ClientStore) -> Graphs:
        made.append(Graphs(setup, store, case.build_module, "cuda", "fp32"))
        return made[-1]

    first = case.run(graphs)
    assert not made[0].tuner.searching and made[0].tuner.rates
    again = Graphs(case.setup(), ClientStore(), case.build_module, "cuda", "fp32")
    assert not again.tuner.searching and again.tuner.setting == made[0].tuner.setting
    monkeypatch.setattr(Graphs, "_is_alone", lambda self: False)
    beside = Graphs(case.setup(), ClientStore(), case.build_module, "cuda", "fp32")
    assert beside.tuner.searching, "beside other runs other numbers may be better"
    assert distance(first, case.run(graphs)) < TOLERANCE
