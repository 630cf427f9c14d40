"""CUDA's streams and graphs on the CPU, with the rules that PyTorch and CUDA put on them.

A graph records the operations of a capture (below autograd, so those of a backward pass too) with the tensors they
read and write, and replays them: Python code does not run again, and tensors stay where they were. The rules, each an
error here as on a GPU:

- A memory pool whose graphs are all gone is not used again. (PyTorch: "use_count > 0")
- A capture that could not begin leaves the generators in their capturing state; replays fail from then on.
- One capture at a time; never on the default stream; nothing is replayed while there is one.
- During a capture its thread does not wait for the device, nobody waits for the whole device, no graph is destroyed,
  and only generators draw that were registered. Any of these makes the capture invalid.
- A graph's own tensors live as long as it does. All others it reads must be kept alive elsewhere.

What is not imitated: that streams run at the same time, and memory that is used again.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from everfed.core.context import Setup
from everfed.engines.capture_thread import Capturing
from everfed.engines.captured_steps import CapturedTrainer
from everfed.engines.eager import Eager
from everfed.engines.graphs import Graphs
from everfed.store.clients import ClientStore
from tests.support.toy import Bench

GIB = 1 << 30
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim"}


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self._device, self.name = device, name

    def wait_stream(self, other: Stream) -> None:
        self._device.log.append((self.name, "waits for", other.name))

    def synchronize(self) -> None:
        self._device.check_waiting(whole=False)


class Event:
    """elapsed_time is what the test says that a step takes."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        self._device.check_waiting(whole=False)

    def elapsed_time(self, end: Event) -> float:
        return self._device.milliseconds


class Foreign:
    """A tensor that a graph reads or writes and does not own."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.dtype, self.place = tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride())

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise RuntimeError("this graph reads memory that was freed after its capture")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.place)


class Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.own: set[int] = set()  # storages made during the capture
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # other tensors' storages, and what they held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _WAITS:
            self.graph.invalidate(f"{name} waits for the device")
        generator = kwargs.get("generator")
        if generator is not None and not self._registered(generator):
            self.graph.invalidate("Attempt to increase offset for a CUDA generator not in capture mode.")
        if name == "lift_fresh":  # a number: it becomes part of the graph
            self.own.add(args[0].untyped_storage()._cdata)
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        given = {leaf.untyped_storage()._cdata for leaf in inputs}
        self._save(inputs)
        made = func(*args, **kwargs)
        leaves = [leaf for leaf in tree_flatten(made)[0] if isinstance(leaf, Tensor)]
        self.own |= {leaf.untyped_storage()._cdata for leaf in leaves} - given
        self.graph.operations.append(
            (func, self._held(args), self._held(kwargs), [self._hold(leaf) for leaf in leaves])
        )
        return made

    def _save(self, inputs: list[Tensor]) -> None:
        for leaf in inputs:
            storage = leaf.untyped_storage()._cdata
            if storage not in self.own and storage not in self.before:
                all_of_it = torch.empty(0, dtype=leaf.dtype).set_(leaf.untyped_storage())
                self.before[storage] = (all_of_it, all_of_it.clone())

    def restore(self) -> None:
        """A capture runs nothing; here it had to, for the shapes."""
        for tensor, before in self.before.values():
            tensor.copy_(before)

    def _registered(self, generator: torch.Generator) -> bool:
        """By the state: the object that arrives here is another one."""
        return any(torch.equal(known.get_state(), generator.get_state()) for known in self.graph.generators)

    def _held(self, tree: Any) -> Any:
        return tree_map(lambda leaf: self._hold(leaf) if isinstance(leaf, Tensor) else leaf, tree)

    def _hold(self, tensor: Tensor) -> Tensor | Foreign:
        return tensor.detach() if tensor.untyped_storage()._cdata in self.own else Foreign(tensor)


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.operations: list[tuple[Any, Any, Any, list[Tensor | Foreign]]] = []
        self.generators: list[torch.Generator] = [torch.default_generator]
        self.pool: object = None
        self.invalid = ""
        self.tuned = False
        self._recorder: Recorder | None = None
        self._ready = False

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        device = self._device
        if device.current() is device.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if device.capturing is not None or device.stuck:
            raise RuntimeError("a capture is under way already")
        assert capture_error_mode == "thread_local", "others would be held up by every wait of any thread"
        device.stuck = True
        self.pool = pool if pool is not None else object()
        if device.pools.get(self.pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        device.stuck, device.capturing = False, self
        device.pools[self.pool] += 1
        self.tuned = torch.backends.cudnn.benchmark
        device.captured_in.append(threading.get_ident())
        self._states = [generator.get_state() for generator in self.generators]
        self._recorder = Recorder(self)
        self._recorder.__enter__()

    def capture_end(self) -> None:
        assert self._recorder is not None
        self._recorder.__exit__(None, None, None)
        self._recorder.restore()
        self._recorder = None
        self._device.capturing = None
        for generator, state in zip(self.generators, self._states, strict=True):  # a capture draws nothing
            generator.set_state(state)
        if self.invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        self._ready, self._number = True, len(self._device.graphs)
        self._device.graphs.append((self.tuned, len(self.operations)))

    def invalidate(self, why: str) -> None:
        """For what the capturing thread itself must not do."""
        self.invalid = why
        raise RuntimeError(f"operation not permitted when stream is capturing: {why}")

    def replay(self) -> None:
        assert self._ready, "replay without a successful capture"
        if self._device.capturing is not None or self._device.stuck:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self._device.replays[self._number] += 1
        with torch.no_grad():
            for func, args, kwargs, places in self.operations:
                made = func(*_there(args), **_there(kwargs))
                leaves = [leaf for leaf in tree_flatten(made)[0] if isinstance(leaf, Tensor)]
                for place, new in zip(_there(places), leaves, strict=True):
                    if place.untyped_storage()._cdata != new.untyped_storage()._cdata:
                        place.copy_(new)

    def __del__(self) -> None:
        if not self._ready:
            return
        self._device.pools[self.pool] -= 1
        if self._device.capturing is not None:
            self._device.capturing.invalid = "a graph was destroyed during the capture"


def _one_hot(labels: Tensor, classes: int) -> Tensor:
    """As it is on a GPU: on the CPU PyTorch looks at the labels, for which a GPU would wait."""
    return labels.new_zeros((*labels.shape, classes)).scatter_(-1, labels.unsqueeze(-1), 1)


def _there(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.tensor() if isinstance(leaf, Foreign) else leaf, tree)


class Device:
    """What stands in for torch.cuda.

    milliseconds: how long a step takes, as events measure it. log: which stream waited for which. graphs: of every
    capture, were kernels searched for, and how many operations has it? replays: how often each of them was replayed,
    by its place in this list.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, milliseconds: float = 1.0) -> None:
        self.milliseconds = milliseconds
        self.default = Stream(self, "default")
        self.log: list[tuple[str, ...]] = []
        self.pools: Counter[object] = Counter()
        self.graphs: list[tuple[bool, int]] = []
        self.replays: Counter[int] = Counter()
        self.captured_in: list[int] = []
        self.capturing: Graph | None = None
        self.stuck = False  # a capture failed to begin
        self.slot_captures = Capturing()
        self._current = threading.local()
        names, handles = (f"stream {i}" for i in itertools.count()), ((0, i) for i in itertools.count(1))
        replaced = {
            "Stream": lambda device=None: Stream(self, next(names)),
            "stream": self._on,
            "current_stream": lambda device=None: self.current(),
            "graph_pool_handle": lambda: next(handles),
            "CUDAGraph": lambda: Graph(self),
            "Event": lambda enable_timing=False: Event(self),
            "synchronize": lambda device=None: self.check_waiting(whole=True),
            "empty_cache": lambda: None,
            "mem_get_info": lambda device=None: (80 * GIB, 100 * GIB),
            "memory_reserved": lambda device=None: GIB,
            "max_memory_allocated": lambda device=None: GIB,
            "get_per_process_memory_fraction": lambda device=None: 1.0,
            "current_device": lambda: 0,
            "get_device_name": lambda device=None: "stand-in",
        }
        for name, replacement in replaced.items():
            monkeypatch.setattr(torch.cuda, name, replacement)
        monkeypatch.setattr(torch.nn.functional, "one_hot", _one_hot)

    def current(self) -> Stream:
        return getattr(self._current, "stream", self.default)

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._current.stream = self.current(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def check_waiting(self, whole: bool) -> None:
        """Something waits: for a stream or an event, or for the `whole` device."""
        if self.capturing is not None and (whole or self.captured_in[-1] == threading.get_ident()):
            self.capturing.invalidate("a wait for the device")

    # trainers and engines on it ----------------------------------------------------------------------------------
    def slot(self, setup: Setup, case: Bench, largest: int = 0) -> CapturedTrainer:
        given = (setup.stream, setup.facts.layout, case.build_module, "cpu", "fp32", setup.method.owner("forward"))
        slot = CapturedTrainer(*given, capturing=self.slot_captures, on_eager=lambda part: None)
        slot.largest = largest
        return slot

    def run_in_one_slot(self, case: Bench, largest: int = 0) -> tuple[Tensor, CapturedTrainer]:
        """The shared model at the end, and the slot that trained every client."""
        slots: list[CapturedTrainer] = []

        def engine(setup: Setup, store: ClientStore) -> Eager:
            made = Eager(setup, store, case.build_module)
            made.trainer = self.slot(setup, case, largest)
            slots.append(made.trainer)
            return made

        return case.run(engine).params, slots[0]

    def run_in_slots(self, case: Bench, slots: int, threads: int) -> Tensor:
        """The shared model at the end, of the graphs engine itself."""

        def engine(setup: Setup, store: ClientStore) -> Graphs:
            return Graphs(setup, store, case.build_module, "cpu", "fp32", slots=slots, host_threads=threads)

        return case.run(engine).params
