"""What the graphs engine does around its CUDA graphs, on the CPU: see tests/support/cuda.py for the graphs."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from everfed import kernels
from everfed.core.context import Setup, TrainOptions
from everfed.core.data import Table
from everfed.core.engine import ClientError
from everfed.core.optimizer import Optimizer
from everfed.engines.captured_steps import Columns, Workspace, kernel_search, share_of_steps
from everfed.engines.graphs import Graphs
from everfed.engines.slots import Tuner
from everfed.store.clients import ClientStore
from tests.support.cuda import Device, Stream
from tests.support.presets import each_kind
from tests.support.toy import Bench, Norm, Toy
from tests.support.waiting import HANG

# with minibatches of 4: a ninth sample joins the minibatch before it, 3 and 1 are less than a minibatch
SIZES = {(0, 0): 9, (1, 0): 14, (2, 0): 3, (3, 0): 0, (0, 1): 30, (1, 1): 6, (2, 1): 4, (3, 1): 1}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    return Device(monkeypatch)


def bench(method: str) -> Bench:
    stream = Toy(clients=4, sizes=SIZES, augmented=True)
    return Bench(method, stream=stream, train=TrainOptions(2, 4, Optimizer(lr=0.1)), module=Norm)


@pytest.mark.parametrize("method", ["fedavg", "fedgp+der", "agem", "fedssi"])  # more below, in several slots
def test_steps_from_fixed_places_equal_steps_as_they_come(method: str, device: Device) -> None:
    case = bench(method)
    assert torch.equal(device.run_in_one_slot(case)[0], case.run().params)
    assert device.replays


def test_a_rate_that_moves_with_every_step_is_read_at_every_step(device: Device) -> None:
    optimizer = Optimizer(lr=0.3, schedule="linear", by="step")
    case = bench("fedgp+der").change(train=TrainOptions(2, 4, optimizer))
    assert torch.equal(device.run_in_one_slot(case)[0], case.run().params)


def test_a_shape_is_captured_once_whatever_the_sizes_of_clients(device: Device) -> None:
    _, slot = device.run_in_one_slot(bench("fedavg"), largest=30)
    (workspace,) = slot._workspaces.values()
    # minibatches of 4, a last one of 1, 2 or 3, and one that a fifth sample joined; with the draws of augmentation
    assert sorted(workspace.graphs) == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]
    assert slot.captures == len(device.graphs) == 5


def test_a_step_reads_its_rows_of_all_tables_at_once(device: Device) -> None:
    """One row of all tables and the rate; samples and targets of the data; samples, targets, outputs of the buffer."""
    _, slot = device.run_in_one_slot(bench("fedgp+der"), largest=30)
    steps = [graph for workspace in slot._workspaces.values() for graph in workspace.graphs.values()]
    largest = max(steps, key=lambda graph: len(graph.operations))
    names = Counter(function.overloadpacket.__name__ for function, *_ in largest.operations)
    assert names["index_select"] == 1 + 2 + 3


def test_tables_side_by_side_keep_their_entries() -> None:
    """Two tables with room for 3 entries: numbers, and pairs, of which these have 2 and 3."""
    numbers, pairs = Columns(0, ()), Columns(3, (2,))
    wide = np.zeros((2, 9), dtype=np.int64)
    numbers.write(wide, np.array([[1, 2], [3, 4]]))
    pairs.write(wide, 10 + np.arange(12).reshape(2, 3, 2))
    assert wide.tolist() == [[1, 2, 0, 10, 11, 12, 13, 14, 15], [3, 4, 0, 16, 17, 18, 19, 20, 21]]
    row = torch.from_numpy(wide[1])
    assert numbers.read(row, 1).tolist() == [3] and numbers.read(row, 0).shape == (0,)
    assert pairs.read(row, 2).tolist() == [[16, 17], [18, 19]]


def test_a_workspace_that_becomes_too_small_is_replaced_and_freed(device: Device) -> None:
    made: list[Workspace] = []
    case, plain = bench("fedavg"), Workspace.__init__

    def noted(self: Workspace, *args: Any) -> None:
        plain(self, *args)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "__init__", noted)
        params, slot = device.run_in_one_slot(case)
    *replaced, last = made
    assert [one.capacity for one in made] == [12, 18, 38]  # 9, 14 and 30 samples, a quarter more, and one
    assert all(not one.graphs and one.training is None for one in replaced)
    assert list(slot._workspaces.values()) == [last]
    assert torch.equal(params, case.run().params)


def test_all_slots_capture_in_one_thread_and_errors_reach_the_caller(device: Device) -> None:
    case = bench("fedavg")
    for _ in range(2):
        device.run_in_one_slot(case)
    assert len(set(device.captured_in)) == 1
    assert threading.get_ident() not in device.captured_in
    slot = device.run_in_one_slot(case)[1]
    with pytest.raises(ZeroDivisionError):
        slot.capture(lambda: print(1 // 0), lambda: None, tuned=False)


def test_a_capture_that_fails_names_its_cause_and_the_next_one_succeeds(device: Device) -> None:
    """A wait makes the capture invalid, so that ending it fails, too. An error of Python leaves a graph without use,
    the only one of its memory pool."""
    case = bench("fedavg")
    slot = device.slot(case.setup(), case)
    place = torch.zeros(1)

    def wait() -> None:
        if device.capturing is not None:
            place.item()

    def fail() -> None:
        if device.capturing is not None:
            raise ZeroDivisionError

    for body, error, message in ((wait, RuntimeError, "waits for the device"), (fail, ZeroDivisionError, "")):
        with pytest.raises(error, match=message):
            slot.capture(body, lambda: None, tuned=False)
    slot.capture(lambda: place.add_(1), lambda: place.zero_(), tuned=False).replay()
    assert place.item() == 1  # of the trial runs nothing is left


@pytest.mark.parametrize("method", each_kind())
def test_the_engine_equals_the_eager_one(method: str, device: Device) -> None:
    case = bench(method)
    assert torch.equal(device.run_in_slots(case, slots=2, threads=2), case.run().params)
    assert device.replays


def test_an_error_that_leaves_the_device_unusable_is_the_one_shown(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a device-side assert every wait raises: of the streams at the end of a phase, of the engine at its own."""

    def fail(*given: Any) -> None:
        monkeypatch.setattr(Stream, "wait_stream", unusable)
        monkeypatch.setattr(torch.cuda, "synchronize", unusable)
        raise ClientError(1, "train", 0, RuntimeError("the cause"))

    def unusable(*given: Any) -> None:
        raise RuntimeError("CUDA error")

    case = bench("fedavg")
    monkeypatch.setattr(Graphs, "_client", fail)
    with pytest.raises(ClientError, match="the cause"):
        device.run_in_slots(case, slots=2, threads=1)
    Graphs(case.setup(), ClientStore(), case.build_module, "cpu", "fp32", slots=2).close()


def test_the_first_run_of_a_machine_says_once_that_it_compiles(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case, said = bench("fedavg"), list[dict[str, Any]]()

    def engine(setup: Setup, store: ClientStore) -> Graphs:
        how = {"slots": 2, "host_threads": 1, "notify": said.append}
        return Graphs(setup, store, case.build_module, "cpu", "fp32", **how)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    case.run(engine)
    assert said == []  # no Triton for this device
    monkeypatch.setattr(kernels, "_available", lambda: True)
    case.run(engine)
    assert [event["event"] for event in said] == ["warning"] and str(tmp_path / "cache") in said[0]["message"]
    (tmp_path / "cache").mkdir()
    case.run(engine)
    assert len(said) == 2  # nothing has been compiled yet
    (tmp_path / "cache" / "kernel").touch()
    case.run(engine)
    assert len(said) == 2


@pytest.fixture
def searched(device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Graphs]:
    """Runs a method with a search for its number of slots; returns the engine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(method: str = "fedavg", tasks: int = 1, rounds: int = 16, **changes: Any) -> Graphs:
        stream = Toy(clients=6, samples=4, tasks=tasks, rounds_per_task=rounds)
        case = Bench(method, stream=stream, train=TrainOptions(1, 4, Optimizer(lr=0.1)), module=Norm).change(**changes)
        made: list[Graphs] = []

        def engine(setup: Setup, store: ClientStore) -> Graphs:
            made.append(Graphs(setup, store, case.build_module, "cpu", "fp32"))
            return made[-1]

        case.run(engine)
        return made[-1]

    return run


def test_a_later_run_of_the_same_kind_takes_the_slots_that_were_found(searched: Callable[..., Graphs]) -> None:
    first = searched()
    assert not first.tuner.searching and first.tuner.rates
    again = searched()
    assert again.tuner.setting == first.tuner.setting and not again.tuner.rates, "nothing was searched for"
    other = searched(train=TrainOptions(1, 2, Optimizer(lr=0.1)))
    assert other.tuner.rates, "minibatches of another size are another kind"


def test_beside_others_slots_are_searched_for_and_not_remembered(
    searched: Callable[..., Graphs], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: 0.25)
    assert searched().tuner.rates and not (tmp_path / "everfed").exists()
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: 1.0)
    assert searched().tuner.rates and (tmp_path / "everfed" / "slots.json").exists()
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: 0.25)
    assert searched().tuner.rates


@pytest.mark.parametrize("change", [lambda kept: [0, 0, kept[2]], lambda kept: [*kept[:2], 1e15]])
def test_slots_without_sense_or_without_room_are_searched_for(
    searched: Callable[..., Graphs], tmp_path: Path, change: Callable[[list[float]], list[float]]
) -> None:
    """A file that was edited by hand, and a GPU on which another program has taken the memory since."""
    searched()
    file = tmp_path / "everfed" / "slots.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps({key: change(numbers) for key, numbers in kept.items()}))
    assert searched().tuner.rates


def test_slots_are_searched_for_again_when_a_teacher_comes(
    searched: Callable[..., Graphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    plain = Tuner.restart

    def noted(self: Tuner) -> None:
        begun.append(1)
        plain(self)

    monkeypatch.setattr(Tuner, "restart", noted)
    assert (
        searched("lwf", tasks=2, rounds=2).slots[0].kinds == 2 and len(begun) == 2
    )  # the first is the engine's own beginning
    begun.clear()
    assert searched("fedavg", tasks=2, rounds=2).slots[0].kinds == 1 and len(begun) == 1


def test_states_reach_the_store_when_all_streams_are_done(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may write them to disk, from the default stream."""
    put = ClientStore.put

    def noted(self: ClientStore, client: int, state: Any) -> None:
        device.log.append(("put", str(client)))
        put(self, client, state)

    monkeypatch.setattr(ClientStore, "put", noted)
    device.run_in_slots(bench("der"), slots=2, threads=2)
    fork, join = (("stream {}", "waits for", "default"), ("default", "waits for", "stream {}"))
    used = {entry[0] for entry in device.log if entry[1:] == fork[1:]}
    unfinished = set[str]()
    for entry in device.log:
        if entry[1:] == fork[1:]:
            unfinished.add(entry[0])
        elif entry[:2] == join[:2]:
            unfinished.discard(entry[2])
        elif entry[0] == "put":
            assert not unfinished
    assert len(used) == 2 and ("put", "3") in device.log


def test_when_a_client_fails_all_threads_stop_before_the_error_arrives(device: Device, monkeypatch) -> None:
    case, working, began = bench("fedavg"), set[int](), threading.Event()

    def client(self: Graphs, slot: Any, phase: Any, number: int, *args: Any) -> Any:
        working.add(number)
        if number == 1:  # the largest, of the first slot
            began.wait(HANG)
            working.discard(number)
            raise ClientError(1, phase.name, 0, "lost")
        began.set()
        time.sleep(0.2)
        working.discard(number)
        return {}, None

    monkeypatch.setattr(Graphs, "_client", client)
    with pytest.raises(ClientError, match="lost"):
        device.run_in_slots(case, slots=4, threads=4)
    assert not working


def test_a_graph_whose_inputs_are_gone_is_an_error_of_the_stand_in(device: Device) -> None:
    """So that the tests above would notice it: on a GPU it would read what lies there now."""
    place, out = torch.ones(3), torch.zeros(3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        out.copy_(place * 2)
        graph.capture_end()
    place.fill_(4)
    graph.replay()
    assert out.tolist() == [8, 8, 8]
    del place
    with pytest.raises(RuntimeError, match="freed after its capture"):
        graph.replay()


def test_kernels_are_searched_only_for_shapes_that_are_frequent(device: Device) -> None:
    stream = Toy(clients=1, tasks=1, rounds_per_task=1, sizes={(0, 0): 27})
    device.run_in_one_slot(Bench("fedavg", stream=stream, train=TrainOptions(1, 4)))
    assert [tuned for tuned, _ in device.graphs] == [True, False]  # six minibatches of 4, one of 3


def test_the_share_of_steps_counts_the_shapes_of_all_tables() -> None:
    four, three, one = np.arange(4), np.arange(3), np.arange(1)
    core = {"rows": Table.of([four] * 5 + [three])}
    assert [share_of_steps({"core": core}, index) for index in (0, 4, 5)] == [5 / 6, 5 / 6, 1 / 6]
    both = {"core": core, "der": {"rows": Table.of([four] * 2 + [one] * 4)}}
    assert [share_of_steps(both, index) for index in (0, 2, 5)] == [2 / 6, 3 / 6, 1 / 6]


def test_slots_remember_the_last_minibatches_that_they_met() -> None:
    slots: list[Any] = [SimpleNamespace(shapes=set()) for _ in range(3)]
    engine: Any = SimpleNamespace(setup=SimpleNamespace(options=TrainOptions(batch_size=32)))
    first = Graphs._deal(engine, slots, {0: 64 + 5, 1: 32 + 9, 2: 7})
    met = {min(slot.shapes): hand for slot, hand in zip(slots, first, strict=True)}
    assert met == {5: [0], 9: [1], 7: [2]}
    second = Graphs._deal(engine, slots, {0: 96 + 7, 1: 64 + 5, 2: 32 + 9})  # the largest has the shape of the smallest
    assert {min(slot.shapes): hand for slot, hand in zip(slots, second, strict=True)} == {7: [0], 5: [1], 9: [2]}


@pytest.mark.parametrize(
    ("before", "wanted", "inside"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_kernel_search_is_never_switched_on_where_it_is_off(
    before: bool, wanted: bool, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    with pytest.raises(KeyError), kernel_search(wanted):
        assert torch.backends.cudnn.benchmark is inside
        raise KeyError
    assert torch.backends.cudnn.benchmark is before
