"""Are worker processes faster than a plain loop for this model? Measured once on one client, and remembered.

Only speed hangs on the answer, never a result.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from everfed.core import random
from everfed.core.context import Place, Setup
from everfed.core.message import MODEL
from everfed.core.stream import RoundPlan
from everfed.core.tree import tensor_bytes
from everfed.engines.eager import CLIENT_FAULTS, BuildModule, call, new_trainer
from everfed.engines.forking import gpu, in_fork
from everfed.store.files import write_atomic


# what was measured ----------------------------------------------------------------------------------------------------
class Remembered:
    """Lists of numbers by key, in a file of the user's cache folder; one that cannot be read is as good as none."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def path(self) -> Path:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everfed" / self.name

    def find(self, key: str, count: int) -> list[float] | None:
        """The `count` numbers under `key`; None where there are none, or something else."""
        found = self._read().get(key)
        return found if found is not None and len(found) == count and all(map(math.isfinite, found)) else None

    def put(self, key: str, numbers: Iterable[float]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps({**self._read(), key: list(numbers)}).encode())
        except OSError:
            return

    def _read(self) -> dict[str, list[float]]:
        try:
            found = json.loads(self.path.read_text())
            return {str(k): [float(n) for n in v] for k, v in found.items() if isinstance(v, list)}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}


def key_of(*parts: object) -> str:
    """A key for these facts on this machine: a home folder may serve several."""
    return f"{random.key(*(str(part) for part in (*parts, platform.node(), torch.__version__))):x}"


# are processes faster? ------------------------------------------------------------------------------------------------
# what handing a client to another process costs: a few wake-ups, and copies through shared memory
CALL_SECONDS = 0.5e-3
BYTES_PER_SECOND = 1.5e9
_ANSWERS = Remembered("engines.json")
_LONG_SECONDS = 1.0  # beside a training of this length its warm-up is nothing
_WORTH = 0.9  # processes must be at least a tenth faster to be worth their memory


@dataclass(frozen=True)
class OneClient:
    """One client's training here. moved: bytes that another process would have to get and give back."""

    seconds: float
    moved: int


def processes_pay(setup: Setup, build_module: BuildModule, workers: int) -> bool:
    """Would `workers` processes run a round clearly faster than one?"""
    measured = one_client(setup, build_module)
    if measured is None:
        return False
    clients = len(setup.stream.round(0).participants)
    return _in_processes(measured, clients, workers) < _WORTH * clients * measured.seconds


def speedup(measured: OneClient, clients: int, workers: int) -> float:
    """How many times as fast as one process a round of `clients` runs on `workers` cores, at least 1."""
    return max(1.0, clients * measured.seconds / _in_processes(measured, clients, workers))


def _in_processes(measured: OneClient, clients: int, workers: int) -> float:
    """Seconds of a round of `clients` in `workers` processes."""
    busiest = -(-clients // workers)
    return busiest * (measured.seconds + CALL_SECONDS + measured.moved / BYTES_PER_SECOND)


def one_client(setup: Setup, build_module: BuildModule) -> OneClient | None:
    """Measured once and remembered; None where a client's training fails, which the run reports properly."""
    key = _key(setup)
    found = _ANSWERS.find(key, 2)
    if found is None:
        try:
            # where there is a GPU, this process must not run a backward pass if it shall fork workers later
            measured = in_fork(partial(_measure, setup, build_module)) if gpu() else _measure(setup, build_module)
        except CLIENT_FAULTS:
            return None
        found = list(measured)
        _ANSWERS.put(key, found)
    return OneClient(found[0], int(found[1]))


def _measure(setup: Setup, build_module: BuildModule) -> tuple[float, int]:
    """(seconds one client's training takes here, bytes that would have to move). Nothing is kept of it."""
    trainer = new_trainer(setup, build_module)
    plan = setup.stream.round(0)
    place, phase = Place(0, plan), setup.method.train_phase()
    client = _with_data(setup, plan)
    model = setup.facts.layout.read(build_module())
    message = {MODEL: {**model, "params": model["params"][: setup.facts.layout.shared]}}
    seconds, moved = [], 0
    for _ in range(2):  # the first call warms up
        started = time.perf_counter()
        state, reply = call(setup, trainer, phase, client, None, message, place)
        seconds.append(time.perf_counter() - started)
        moved = 2 * tensor_bytes(state) + tensor_bytes(reply.values)
        if seconds[-1] > _LONG_SECONDS:
            break
    return seconds[-1], moved


def _with_data(setup: Setup, plan: RoundPlan) -> int:
    """The first participant that will train at all."""
    for client in plan.participants:
        if len(setup.stream.data(client, plan.tasks[client])):
            return client
    return plan.participants[0]


def _key(setup: Setup) -> str:
    options, facts = setup.options, setup.facts
    parts = (setup.method.name, facts.layout.size, *facts.input_shape, options.batch_size, options.local_epochs)
    plan = setup.stream.round(0)
    client = _with_data(setup, plan)
    sizes = (len(plan.participants), len(setup.stream.data(client, plan.tasks[client])))
    return key_of(*parts, *sizes)
