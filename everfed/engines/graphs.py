"""Many clients at once on one GPU: S slots, each a model replica with captured training steps on its own stream.

A small model leaves most of a GPU idle; several clients side by side fill it, and replayed steps keep the host out of
the way. Clients of a phase are dealt to the slots by size, so that no slot waits long.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor, nn

from everfed.core.client import Reply
from everfed.core.context import Place, Setup
from everfed.core.data import Data, DataCache, device_memory
from everfed.core.engine import ClientError
from everfed.core.events import Observer
from everfed.core.message import Message, State
from everfed.core.part import Part
from everfed.core.phase import EVALUATE, TRAIN, Phase
from everfed.core.random import adopt_dropout
from everfed.core.tree import leaves
from everfed.engines.calibration import Remembered, key_of
from everfed.engines.capture_thread import Capturing
from everfed.engines.captured_steps import CapturedTrainer, LoopingTrainer, release_memory
from everfed.engines.eager import CLIENT_FAULTS, BuildModule, ClientStore, OneTrainer, call, new_trainer
from everfed.engines.slots import Setting, Tuner, deal, seat
from everfed.kernels import to_be_compiled

_SETTINGS = Remembered("slots.json")
_KERNELS = 2  # raised where new kernels change how many slots are fastest: what was found before is looked for again
WAVE_BYTES = 8 << 30  # of replies on the device before they are reduced


class Graphs(OneTrainer):
    """One CUDA device. slots: 0 chooses their number from memory and measured throughput."""

    name = "graphs"

    def __init__(
        self,
        setup: Setup,
        store: ClientStore,
        build_module: BuildModule,
        device: str = "cuda",
        precision: str = "bf16",
        slots: int = 0,
        compiled: bool = False,
        host_threads: int = 0,
        notify: Observer = lambda event: None,
    ) -> None:
        self.setup, self.store, self.notify = setup, store, notify
        self._build_module, self._precision, self._compiled = build_module, precision, compiled
        self.device = torch.device(device)
        # for scoring and for the server's own phases, on the default stream
        self.trainer = new_trainer(setup, build_module, device, precision, LoopingTrainer)
        self.data = DeviceData(self.device)
        # the graphs of several streams would share the state of torch's global generator
        self._draws_globally = draws_globally(build_module(), setup)
        self.tuner = Tuner(1, 1, self.device) if self._draws_globally else Tuner(slots, host_threads, self.device)
        self.slots: list[CapturedTrainer] = []
        self._capturing = Capturing()
        self._recall(0)
        self._warned: set[str] = set()
        self._executor: ThreadPoolExecutor | None = None

    # phases ------------------------------------------------------------------------------------------------------
    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply]]:
        per_wave = max(1, WAVE_BYTES // (4 * self.setup.facts.layout.size + 1))
        for start in range(0, len(clients), per_wave):
            yield from self._wave(phase, clients[start : start + per_wave], message, place)

    def _wave(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply]]:
        """Run some clients on all slots, wait for them on the device, and yield their replies in order."""
        data = {client: self.data.get(self.setup, client, phase, place) for client in clients}
        setting = self.tuner.choose(len(clients))
        slots = self._use_slots(setting.slots, max(map(len, data.values())))
        captures, kinds = sum(slot.captures for slot in slots), slots[0].kinds
        started = time.monotonic()
        hands = self._deal(slots, {client: len(own) for client, own in data.items()})
        states: dict[int, State] = {}
        replies: dict[int, Reply] = {}
        failed = threading.Event()

        def work(thread: int) -> None:
            try:
                for client, slot in _in_turn(hands, slots, thread, setting.threads):
                    if failed.is_set():
                        return
                    with self._capturing.working():
                        given = (slot, phase, client, message, place, data[client])
                        states[client], replies[client] = self._client(*given)
            except BaseException:
                failed.set()
                raise

        self._fork(slots)
        try:
            self._in_threads(work, setting.threads)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the device may be of no use any more; that is not the cause
                self._join(slots)
            raise
        self._join(slots)
        for client in clients:  # now, as the store may write states to disk: they are complete for this stream only
            self.store.put(client, states.pop(client))
        if phase.name == TRAIN and slots[0].kinds > kinds > 0:
            self.tuner.restart()  # a step reads or computes more than before
            self._recall(slots[0].kinds)
        if captures != sum(slot.captures for slot in slots):
            release_memory(self.device)  # of the trial runs before captures, once for all of them
        elif phase.name == TRAIN and self.tuner.searching:
            torch.cuda.synchronize(self.device)
            samples = sum(reply.samples for reply in replies.values())
            self.tuner.measured(samples, time.monotonic() - started)
            self._remember(slots[0].kinds)
        for client in clients:
            yield client, replies.pop(client)

    def _deal(self, slots: Sequence[CapturedTrainer], sizes: Mapping[int, int]) -> list[list[int]]:
        """The clients of every slot: balanced, and where slots have graphs for their last minibatches already."""
        shapes = {client: size % self.setup.options.batch_size for client, size in sizes.items()}
        hands = seat(deal(sizes, len(slots)), shapes, [slot.shapes for slot in slots])
        for slot, hand in zip(slots, hands, strict=True):
            slot.shapes.update(shapes[client] for client in hand)
        return hands

    def _in_threads(self, work: Callable[[int], None], threads: int) -> None:
        """Call `work` with the number of each thread; when it returns or raises, no thread works any more."""
        if threads == 1:
            work(0)
            return
        running = [self._pool(threads).submit(work, thread) for thread in range(threads)]
        wait(running)
        for one in running:
            one.result()

    def _pool(self, threads: int) -> ThreadPoolExecutor:
        if self._executor is None or threads > self._executor._max_workers:
            if self._executor is not None:
                self._executor.shutdown()
            self._executor = ThreadPoolExecutor(threads, thread_name_prefix="slot")
        return self._executor

    def _client(
        self, slot: CapturedTrainer, phase: Phase, client: int, message: Message | None, place: Place, data: Data
    ) -> tuple[State, Reply]:
        state: State | None = self.store.get(client)
        _used_on(slot.cuda_stream, state or {})
        try:
            with torch.cuda.stream(slot.cuda_stream):
                return call(self.setup, slot, phase, client, state, message, place, data)
        except CLIENT_FAULTS as error:
            raise ClientError(client, phase.name, place.round, error) from error

    # how many slots -------------------------------------------------------------------------------------------------
    def _recall(self, kinds: int) -> None:
        """Take the setting that an earlier run of this kind found on this GPU, if there is memory for it now."""
        found = _SETTINGS.find(self._key(kinds), 3) if self.tuner.searching and self._is_alone() else None
        if found is not None:
            slots, threads, each = map(int, found)
            if min(slots, threads) > 0 and self.tuner.has_room(slots * each):
                self.tuner.settle(Setting(slots, threads))

    def _remember(self, kinds: int) -> None:
        """Keep what was found, and the bytes that a slot takes."""
        if not self.tuner.searching and self._is_alone():
            each = torch.cuda.memory_reserved(self.device) / len(self.slots)
            _SETTINGS.put(self._key(kinds), (*self.tuner.setting, each))

    def _is_alone(self) -> bool:
        """Has this process the GPU for itself, as far as it knows? Beside others the best numbers are others."""
        number = torch.cuda.current_device() if self.device.index is None else self.device.index
        return torch.cuda.get_per_process_memory_fraction(number) == 1.0

    def _key(self, kinds: int) -> str:
        """kinds: of local training met so far; the first is the run's beginning."""
        options, facts = self.setup.options, self.setup.facts
        what = (self.setup.method.name, facts.layout.size, *facts.input_shape, options.batch_size, self._precision)
        clients = len(self.setup.stream.round(0).participants)
        fixed = (self.tuner.fixed_slots, self.tuner.fixed_threads, self._compiled)
        return key_of(*what, clients, max(1, kinds), *fixed, torch.cuda.get_device_name(self.device), _KERNELS)

    def _fork(self, slots: Sequence[CapturedTrainer]) -> None:
        for slot in slots:
            slot.cuda_stream.wait_stream(torch.cuda.current_stream(self.device))

    def _join(self, slots: Sequence[CapturedTrainer]) -> None:
        for slot in slots:
            torch.cuda.current_stream(self.device).wait_stream(slot.cuda_stream)

    def _use_slots(self, number: int, largest: int) -> list[CapturedTrainer]:
        if not self.slots and (message := to_be_compiled()):
            self.notify({"event": "warning", "message": message})
        while len(self.slots) < number:
            self.slots.append(
                CapturedTrainer(
                    self.setup.stream,
                    self.setup.facts.layout,
                    self._build_module,
                    self.device,
                    self._precision,
                    self.setup.method.owner("forward"),
                    capturing=self._capturing,
                    compiled=self._compiled,
                    on_eager=self._warn_eager,
                    draws_globally=self._draws_globally,
                )
            )
        for slot in self.slots:
            slot.largest = max(slot.largest, largest)
        return self.slots[:number]

    def _warn_eager(self, part: Part) -> None:
        """Warn once that a part cannot be captured."""
        if part.name not in self._warned:
            self._warned.add(part.name)
            message = f"part {part.name!r} cannot be captured; its steps run eagerly"
            self.notify({"event": "warning", "message": message})

    # the rest ----------------------------------------------------------------------------------------------------
    def describe(self) -> dict[str, Any]:
        return {
            "engine": self.name,
            "device": str(self.device),
            "device_name": torch.cuda.get_device_name(self.device),
            "precision": self._precision,
            "slots": self.tuner.used.slots,
            "host_threads": self.tuner.used.threads,
            "compiled": self._compiled,
            "captures": sum(slot.captures for slot in self.slots),
            "capture_seconds": round(sum(slot.capture_seconds for slot in self.slots), 3),
            "threads": torch.get_num_threads(),
            "peak_device_bytes": torch.cuda.max_memory_allocated(self.device),
        }

    def close(self) -> None:
        """Let go of graphs and replicas."""
        with contextlib.suppress(RuntimeError):  # of an earlier error, which left the device unusable
            torch.cuda.synchronize(self.device)
        self._capturing.close()
        self.slots.clear()
        if self._executor is not None:
            self._executor.shutdown()


def draws_globally(module: nn.Module, setup: Setup) -> bool:
    """Does the network, in training, draw from torch's global generator (attention's dropout, DropPath)?"""
    adopt_dropout(module, torch.Generator())
    blank = setup.facts.blank.x
    inputs = setup.stream.inputs(torch.zeros((2, *blank.shape[1:]), dtype=blank.dtype))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        module.train()(inputs)
        return not torch.equal(before, torch.get_rng_state())


def _used_on(stream: torch.cuda.Stream, state: State) -> None:
    """Tell the allocator that `stream` reads these tensors, made on another slot's stream: their memory must not be
    given away before it has. (The message and the data outlive the phase, so they need no such care.)"""
    for _, leaf in leaves(state):
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            leaf.record_stream(stream)


def _in_turn(
    hands: list[list[int]], slots: Sequence[CapturedTrainer], thread: int, threads: int
) -> Iterator[tuple[int, CapturedTrainer]]:
    """The clients of the slots this thread serves, one of each slot in turn."""
    own = [(list(hand), slot) for hand, slot in zip(hands, slots, strict=True)][thread::threads]
    while any(hand for hand, _ in own):
        for hand, slot in own:
            if hand:
                yield hand.pop(0), slot


# clients' data on the device ------------------------------------------------------------------------------------------
_SHARE = 0.3  # of the memory that is free at the start


class DeviceData:
    """What (client, task) sees, on the device; where tasks mix, what it sees in a round."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept = DataCache(int(device_memory(device)[0] * _SHARE))

    def get(self, setup: Setup, client: int, phase: Phase, place: Place) -> Data:
        task = None if phase.name == EVALUATE else place.plan.tasks.get(client)
        key = (client, task, place.round if client in place.plan.drifting else None)
        return self._kept.get(key, lambda: setup.data(client, phase, place).to(self.device))
