"""Local training whose step is captured once per shape as a CUDA graph and then replayed.

The step is the same `train_step` that every engine runs. What it reads and writes lies in fixed places (a `Workspace`):
a client is loaded by copying into them, trained by replaying, and read out by copying. Nothing waits for the device.

Graphs are keyed by shape: the last, smaller minibatch of an epoch and a buffer that is still filling have graphs of
their own; nothing is padded. Where clients differ in size there are many such shapes, so a capture has to be cheap.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.context import Context
from everfed.core.data import device_memory
from everfed.core.message import Model
from everfed.core.part import EAGER, Part, Tables, changing
from everfed.core.random import global_generators, seed_global
from everfed.core.step import Training, train_step
from everfed.core.trainer import Fitted, Job, Trainer
from everfed.core.tree import Tree, leaves, map_tensors
from everfed.engines.capture_thread import Capturing

SEVERAL = 8  # short steps in one graph
OFTEN = 64  # replays of a step before it is captured several times in one graph
_SHORT = 0.5  # milliseconds: below, the host needs a good part of a step's time to launch it
WARM_UPS = 2  # eager runs before a capture: libraries choose their kernels and allocate their workspaces
_SLACK = 1.25  # room for clients a little larger than those known when a workspace was made
_TUNED_SHARE = 0.25  # of a client's steps: shapes that are less frequent are captured with the kernels cuDNN proposes
_FREE_SHARE = 0.2  # of the process's memory on the device: below it, cached memory is released before a capture


class CapturedTrainer(Trainer):
    """One slot: a replica on its own CUDA stream.

    capturing: runs the captures of all slots, one at a time. draws_globally: the network has random layers of its own,
    so there must be no other slot. largest: the size of the largest client known so far. shapes: the
    sizes of last minibatches that this slot has met, for dealing clients to slots.
    """

    def __init__(
        self,
        *args: Any,
        capturing: Capturing,
        compiled: bool = False,
        on_eager: Callable[[Part], None],
        draws_globally: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.draws_globally = draws_globally
        self.cuda_stream = torch.cuda.Stream(self.device)
        self.captures, self.capture_seconds = 0, 0.0
        self.largest, self.shapes = 0, set[int]()
        self._capturing = capturing
        self._on_eager = on_eager
        self._pool = torch.cuda.graph_pool_handle()
        self._workspaces: dict[Hashable, Workspace] = {}
        self._gradients: dict[Hashable, CapturedGradient] = {}
        if compiled:
            self.network = torch.compile(self.replica.module)
            self.replica.normalises_apart = False  # the compiler does not see the sizes of minibatches

    def _steps(self, job: Job) -> Fitted:
        if not self.stream.capturable:
            return super()._steps(job)
        for part in job.parts:
            if EAGER in part.needs():
                self._on_eager(part)
                return super()._steps(job)
        workspace = self._workspace(job)
        workspace.load(job)
        with self.seeding():
            index = 0
            while index < job.schedule.steps:
                self._capturing.pause()
                index += workspace.replay(job.plans, index)
        return workspace.read(job)

    @property
    def kinds(self) -> int:
        """How many kinds of local training it has met that share no graphs."""
        return len(self._workspaces)

    def seeding(self) -> contextlib.AbstractContextManager[None]:
        return global_generators(self.device) if self.draws_globally else contextlib.nullcontext()

    def seed(self, seed: int, step: int = 0) -> None:
        """Seed torch's global generators before a replay, where the network draws from them."""
        if self.draws_globally:
            seed_global(self.device, seed, step)

    def gradient(self, ctx: Context, model: Model, x: Tensor, y: Tensor, *, mode: str = "train", tag: str) -> Tensor:
        key = (x.shape, x.dtype, y.shape, mode, ctx.allowed_labels)
        if key not in self._gradients:
            self._gradients[key] = CapturedGradient(self, ctx, x, y, mode)
        return self._gradients[key](model, x, y, ctx.key(f"{tag}/dropout"))

    def capture(self, body: Callable[[], None], prepare: Callable[[], None], tuned: bool) -> torch.cuda.CUDAGraph:
        """Capture `body`. It is run for real first, so `prepare` must be able to restore what it changes. tuned: let
        cuDNN try several kernels for every convolution of a new shape; worth its time only for what is replayed often.
        """
        started = time.monotonic()
        graph = self._capturing.run(self._capture, body, prepare, tuned)
        self.captures += 1
        self.capture_seconds += time.monotonic() - started  # waiting for other slots' captures included
        return graph

    def _capture(self, body: Callable[[], None], prepare: Callable[[], None], tuned: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.cuda_stream), kernel_search(tuned):
            for _ in range(WARM_UPS if tuned else 1):  # a rare shape has no kernels to be tried
                prepare()
                body()
            prepare()  # what is replayed first, to time it, is the step itself: behind a client's last one is no other
            self.cuda_stream.synchronize()
            release_memory(self.device)
            graph.register_generator_state(self.replica.generator)
            # not by torch.cuda.graph, which waits for all slots and gives their cached memory back, each time
            with no_garbage_collection(), self._capturing.alone():
                try:
                    graph.capture_begin(self._pool, capture_error_mode="thread_local")
                    record(body, graph)
                except BaseException:
                    self._pool = torch.cuda.graph_pool_handle()  # the other one may have no graph now
                    raise
        return graph

    def _workspace(self, job: Job) -> Workspace:
        key = signature(job)
        found = self._workspaces.get(key)
        if found is None or not found.holds(job):
            larger = self._workspaces[key] = Workspace(self, job, found)
            if found is not None:
                self._capturing.run(found.free)  # not in the middle of another slot's capture
                self._pool = torch.cuda.graph_pool_handle()  # a pool without graphs cannot be used again
            found = larger
        return found


class Workspace:
    """The fixed places of one kind of local training, and its graphs by shape."""

    def __init__(self, trainer: CapturedTrainer, job: Job, smaller: Workspace | None) -> None:
        self.trainer = trainer
        device = trainer.device
        # for the largest client, not for the first one: a workspace that is too small is replaced, with all its graphs
        larger = max(1.0, trainer.largest / max(1, len(job.data)))
        self.capacity: int = _room(len(job.data) * larger, smaller.capacity if smaller else 0)
        self.rounds: int = _room(job.schedule.steps * larger, smaller.rounds if smaller else 0)
        self.x = torch.zeros((self.capacity, *job.data.x.shape[1:]), dtype=job.data.x.dtype, device=device)
        self.y = torch.zeros((self.capacity, *job.data.y.shape[1:]), dtype=job.data.y.dtype, device=device)
        least = job.context.options.batch_size + 1  # a last sample joins the minibatch before
        self.width: int = max(least, _width(job), smaller.width if smaller else 0)
        self.columns = self._columns(job.plans)
        self.table = torch.zeros((self.rounds, self._total), dtype=torch.int64, device=device)
        self.state = {name: _places(slots) for name, slots in job.state.items() if name in _names(job)}
        self.message = {name: _places(slots) for name, slots in job.message.items()}
        self.received = torch.empty_like(job.received, device=device)
        self.moments = {name: torch.empty_like(tensor, device=device) for name, tensor in job.moments.items()}
        self.mask = trainer.label_mask(job.context)
        self.total = torch.zeros((), device=device)
        self.index = torch.zeros(1, dtype=torch.int64, device=device)
        self.training: Training | None = None
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.several: dict[Hashable, torch.cuda.CUDAGraph] = {}  # of the same, SEVERAL steps
        self.short: set[Hashable] = set()
        self.replays: Counter[Hashable] = Counter()

    def _columns(self, plans: dict[str, Tables]) -> dict[str, dict[str, Columns]]:
        """The tables side by side in one: a client's are copied at once, and a step reads its row of all of them. The
        first column is the learning rate, a float32 number and 4 bytes of nothing."""
        places: dict[str, dict[str, Columns]] = {}
        self._total = 1
        for part, own in plans.items():
            places[part] = {}
            for name, table in own.items():
                places[part][name] = Columns(self._total, table.values.shape[2:])
                self._total += self.width * places[part][name].each
        return places

    def holds(self, job: Job) -> bool:
        """Does this client fit into the places?"""
        fits = len(job.data) <= self.capacity and job.schedule.steps <= self.rounds
        return fits and _width(job) <= self.width

    def free(self) -> None:
        """Let go of the graphs and their memory: the step refers back to this object, so it would stay for a while."""
        self.graphs.clear()
        self.several.clear()
        self.training = None

    def load(self, job: Job) -> None:
        """Copy a client in; all copies are queued on the slot's stream."""
        self.job = job
        self.x[: len(job.data)].copy_(job.data.x, non_blocking=True)
        self.y[: len(job.data)].copy_(job.data.y, non_blocking=True)
        host = np.zeros((job.schedule.steps, self._total), dtype=np.int64)
        host.view(np.float32)[:, 0] = job.rates
        for part, own in job.plans.items():
            for name, table in own.items():
                self.columns[part][name].write(host, table.values)
        self.table[: job.schedule.steps].copy_(torch.from_numpy(host), non_blocking=True)
        for name, slots in self.message.items():
            _fill(slots, job.message[name])
        self.received.copy_(job.received, non_blocking=True)
        mask = self.trainer.label_mask(job.context)
        if self.mask is not None and mask is not None:
            self.mask.copy_(mask)
        self.reset()

    def reset(self) -> None:
        """Put what a step changes back to where the client starts."""
        job, replica = self.job, self.trainer.replica
        replica.load(job.model)
        replica.generator.manual_seed(job.seed)
        for name, slots in self.state.items():
            _fill(slots, job.state[name])
        for name, tensor in self.moments.items():
            tensor.copy_(job.moments[name], non_blocking=True)
        self.total.zero_()
        self.index.zero_()

    def replay(self, plans: dict[str, Tables], index: int) -> int:
        """One step, or several of equal shapes at once, by a graph that is captured if it is new. Returns how many."""
        key = self._key(plans, index)
        if self._at_once(plans, index, key):
            if key not in self.several:
                self.several[key] = self._capture(plans, index, SEVERAL)
            self.several[key].replay()
            return SEVERAL
        if key not in self.graphs:
            self.graphs[key] = self._capture(plans, index)
        self.trainer.seed(self.job.seed, index)
        self.graphs[key].replay()
        self.replays[key] += 1
        return 1

    def _key(self, plans: dict[str, Tables], index: int) -> Hashable:
        return tuple(int(table.lengths[index]) for own in plans.values() for table in own.values())

    def _at_once(self, plans: dict[str, Tables], index: int, key: Hashable) -> bool:
        """Do the next steps have equal shapes, and is one graph for them worth its capture?"""
        return (
            key in self.short
            and (self.replays[key] >= OFTEN or key in self.several)
            and not self.trainer.draws_globally  # seeded before every step
            and index + SEVERAL <= self.job.schedule.steps
            and all(self._key(plans, i) == key for i in range(index + 1, index + SEVERAL))
        )

    def _capture(self, plans: dict[str, Tables], index: int, steps: int = 1) -> torch.cuda.CUDAGraph:
        """Captures at whatever step the shape first appears; what that costs the client's progress is put back."""
        lengths = {part: {name: int(t.lengths[index]) for name, t in own.items()} for part, own in plans.items()}
        saved = self._snapshot()
        self.trainer.replica.module.train()  # the mode is part of what is captured
        tuned = share_of_steps(plans, index) > _TUNED_SHARE

        def body() -> None:
            for _ in range(steps):
                self._body(lengths)

        graph = self.trainer.capture(body, lambda: self._restore(saved), tuned)
        if steps == 1 and _milliseconds(graph) < _SHORT:
            self.short.add(self._key(plans, index))
        self._restore(saved)
        return graph

    def _body(self, lengths: dict[str, dict[str, int]]) -> None:
        if self.training is None:
            self.training = self._new_training()
        row = self.table.index_select(0, self.index)[0]
        rows = {
            part: {name: columns.read(row, lengths[part][name]) for name, columns in own.items()}
            for part, own in self.columns.items()
        }
        self.trainer.load_batch(self.training, self.x, self.y, rows)
        rate = row[:1].view(torch.float32)[0]
        loss = train_step(self.training, rate)
        self.total.add_(loss)
        self.index.add_(1)

    def _new_training(self) -> Training:
        trainer, job = self.trainer, self.job

        def forward(x: Tensor) -> Tensor:
            return trainer.forward(x, self.state, self.message)

        return Training(
            job.context,
            trainer.replica,
            job.parts,
            job.optimizer,
            self.moments,
            forward,
            trainer.masked_loss(self.mask),
            self.state,
            self.message,
            self.received,
        )

    def _changed(self) -> list[Tensor]:
        replica = self.trainer.replica
        slots = [leaf for _, leaf in leaves(changing(self.job.parts, self.state)) if isinstance(leaf, Tensor)]
        return [replica.params, replica.stats, replica.counters, *slots, *self.moments.values(), self.total, self.index]

    def _snapshot(self) -> tuple[list[Tensor], Tensor]:
        return [tensor.clone() for tensor in self._changed()], self.trainer.replica.generator.get_state()

    def _restore(self, saved: tuple[list[Tensor], Tensor]) -> None:
        for tensor, old in zip(self._changed(), saved[0], strict=True):
            tensor.copy_(old)
        self.trainer.replica.refresh()
        self.trainer.replica.generator.set_state(saved[1])

    def read(self, job: Job) -> Fitted:
        """Copy the trained client out."""
        changed = map_tensors(torch.clone, changing(job.parts, self.state))
        state = {name: {**slots, **changed.get(name, {})} for name, slots in job.state.items()}
        moments = {name: tensor.clone() for name, tensor in self.moments.items()}
        model = self.trainer.replica.model()
        return Fitted(job.model, model, state, moments, self.total.clone(), len(job.data), job.schedule.steps)


@dataclass(frozen=True)
class Columns:
    """Where a table's rows lie in the rows of a wide one. tail: the shape of an entry."""

    start: int
    tail: tuple[int, ...]

    @property
    def each(self) -> int:
        return math.prod(self.tail)

    def write(self, wide: np.ndarray, values: np.ndarray) -> None:
        """values: (steps, entries, *tail)."""
        wide[:, self.start : self.start + values.shape[1] * self.each] = values.reshape(len(values), -1)

    def read(self, row: Tensor, length: int) -> Tensor:
        """(length, *tail), of one row."""
        return row[self.start : self.start + length * self.each].view(length, *self.tail)


class CapturedGradient:
    """The gradient of the task loss on samples of one shape, captured."""

    def __init__(self, trainer: CapturedTrainer, ctx: Context, x: Tensor, y: Tensor, mode: str) -> None:
        self.trainer, self.mode = trainer, mode
        self.x = torch.zeros_like(x, device=trainer.device)
        self.y = torch.zeros_like(y, device=trainer.device)
        self.out = torch.zeros(trainer.replica.layout.size, device=trainer.device)
        self.loss = trainer.task_loss(ctx)
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, model: Model, x: Tensor, y: Tensor, seed: int) -> Tensor:
        def prepare() -> None:
            self.trainer.replica.load(model)
            self.trainer.replica.generator.manual_seed(seed)
            self.trainer.replica.module.train(self.mode == "train")

        self.x.copy_(x, non_blocking=True)
        self.y.copy_(y, non_blocking=True)
        if self.graph is None:
            self.graph = self.trainer.capture(self._body, prepare, tuned=False)  # a few times a round, not every step
        prepare()
        with self.trainer.seeding():
            self.trainer.seed(seed)
            self.graph.replay()
        return self.out.clone()

    def _body(self) -> None:
        loss = self.loss(self.trainer.forward(self.x), self.y)
        self.out.copy_(self.trainer.replica.gradient(loss))


def record(body: Callable[[], None], graph: torch.cuda.CUDAGraph) -> None:
    """Run `body` between the beginning of a capture and its end. What it raises is the error, not the capture that it
    has made invalid."""
    try:
        body()
    except BaseException:
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        raise
    graph.capture_end()


def share_of_steps(plans: Mapping[str, Tables], index: int) -> float:
    """The share of a client's steps that have the shapes of step `index`."""
    lengths = np.stack([table.lengths for own in plans.values() for table in own.values()])
    return float((lengths == lengths[:, [index]]).all(0).mean())


def release_memory(device: torch.device) -> None:
    """Give cached memory back to the device where little is free: during a capture the allocator cannot do it."""
    free, total = device_memory(device)
    if free < _FREE_SHARE * total:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def kernel_search(wanted: bool) -> Iterator[None]:
    """Where cuDNN tries kernels (cudnn.benchmark), it does so inside only if it is `wanted`."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before and wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Freeing old graphs or tensors in the middle of a capture would invalidate it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def signature(job: Job) -> Hashable:
    """What must be equal for two local trainings to share their graphs (sizes of data and schedules apart)."""
    return (
        tuple(job.parts),
        job.optimizer,
        job.context.allowed_labels is None,  # which labels are allowed is loaded like data
        (job.data.x.shape[1:], job.data.x.dtype, job.data.y.shape[1:], job.data.y.dtype),
        tuple((name, _shape(slots)) for name, slots in job.state.items() if name in _names(job)),
        tuple((name, _shape(slots)) for name, slots in job.message.items()),
        tuple((part, name, t.values.shape[2:]) for part, own in job.plans.items() for name, t in own.items()),
        tuple(job.moments),
    )


def _names(job: Job) -> set[str]:
    return {part.name for part in job.parts}


def _width(job: Job) -> int:
    """The largest number of entries that a step has in any table."""
    return max(table.values.shape[1] for own in job.plans.values() for table in own.values())


def _milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """How long a replay takes now."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _room(needed: float, before: int) -> int:
    return max(int(needed * _SLACK) + 1, 4, before)


def _device_slots(slots: Tree) -> Tree:
    return {name: value for name, value in slots.items() if name != "host"}


def _shape(slots: Tree) -> Hashable:
    return tuple((path, v.shape, v.dtype) for path, v in leaves(_device_slots(slots)) if isinstance(v, Tensor))


def _places(slots: Tree) -> Tree:
    return map_tensors(torch.empty_like, _device_slots(slots))


def _fill(places: Tree, slots: Tree) -> None:
    for name, place in places.items():
        if isinstance(place, dict):
            _fill(place, slots[name])
        elif isinstance(place, Tensor):
            place.copy_(slots[name], non_blocking=True)
        else:
            places[name] = slots[name]


# loops of the server's own training -----------------------------------------------------------------------------------
class LoopingTrainer(Trainer):
    """A trainer on a CUDA device whose loops are captured."""

    def loop(
        self, body: Callable[[], None], changed: Sequence[Tensor], generator: torch.Generator
    ) -> Callable[[int], None]:
        return CapturedLoop(self.device, body, changed, generator)


class CapturedLoop:
    """Captures when it is first run. Trial runs come before, on copies as it were: what they change is put back."""

    def __init__(
        self, device: torch.device, body: Callable[[], None], changed: Sequence[Tensor], generator: torch.Generator
    ) -> None:
        self.device, self.body, self.changed, self.generator = device, body, list(changed), generator
        self.stream = torch.cuda.Stream(device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, times: int) -> None:
        """Run the body `times` times, queued on the current stream."""
        if times and self.graph is None:
            self.graph = self._capture()
        for _ in range(times):
            assert self.graph is not None
            self.graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            saved = [tensor.clone() for tensor in self.changed]
            state = self.generator.get_state()
            for _ in range(WARM_UPS):
                self.body()
            self._restore(saved, state)
            self.stream.synchronize()
        graph.register_generator_state(self.generator)
        gc.collect()  # the loop of the task before may be held by a cycle, with its memory
        torch.cuda.empty_cache()
        with torch.cuda.stream(self.stream):
            with no_garbage_collection():
                graph.capture_begin(capture_error_mode="thread_local")
                record(self.body, graph)
            self._restore(saved, state)
        current.wait_stream(self.stream)
        return graph

    def _restore(self, saved: Sequence[Tensor], state: Tensor) -> None:
        for tensor, old in zip(self.changed, saved, strict=True):
            tensor.copy_(old)
        self.generator.set_state(state)
