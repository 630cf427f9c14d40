"""Are worker processes faster than a plain loop for this model? Measured once on one client, and remembered.

Only speed hangs on the answer, never a result.
"""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

import torch

from everfed.core import random
from everfed.core.context import Moment, World
from everfed.core.message import MODEL
from everfed.core.stream import RoundPlan
from everfed.core.tree import tensor_bytes
from everfed.engines.base import CLIENT_FAULTS, BuildModule, call, new_trainer
from everfed.store.files import write_atomic

# what handing a client to another process costs: a few wake-ups, and copies through shared memory
CALL_SECONDS = 0.5e-3
BYTES_PER_SECOND = 1.5e9
_WORTH = 0.9  # processes must be at least a tenth faster to be worth their memory


def processes_pay(world: World, build_module: BuildModule, workers: int) -> bool:
    """Would `workers` processes run a round clearly faster than one?"""
    key = _key(world, workers)
    remembered = _read()
    if key not in remembered:
        try:
            compute, moved = _measure(world, build_module)
        except CLIENT_FAULTS:  # the run will meet it, too, and there it is told properly
            return False
        hand_over = CALL_SECONDS + moved / BYTES_PER_SECOND
        clients = len(world.stream.round(0).participants)
        busiest = -(-clients // workers)
        remembered[key] = busiest * (compute + hand_over) < _WORTH * clients * compute
        _remember(remembered)
    return remembered[key]


def _measure(world: World, build_module: BuildModule) -> tuple[float, int]:
    """(seconds one client's training takes here, bytes that would have to move). Nothing is kept of it."""
    trainer = new_trainer(world, build_module)
    plan = world.stream.round(0)
    moment, phase = Moment(0, plan), world.method.train_phase()
    client = _with_data(world, plan)
    model = world.facts.layout.read(build_module())
    message = {MODEL: {**model, "params": model["params"][: world.facts.layout.shared]}}
    seconds, moved = [], 0
    for _ in range(2):  # the first call warms up
        started = time.perf_counter()
        state, reply = call(world, trainer, phase, client, None, message, moment)
        seconds.append(time.perf_counter() - started)
        moved = 2 * tensor_bytes(state) + tensor_bytes(reply.values)
    return seconds[-1], moved


def _with_data(world: World, plan: RoundPlan) -> int:
    """The first participant that will train at all."""
    for client in plan.participants:
        if len(world.stream.data(client, plan.tasks[client])):
            return client
    return plan.participants[0]


def _key(world: World, workers: int) -> str:
    options, facts = world.options, world.facts
    parts = (world.method.name, facts.layout.size, *facts.input_shape, options.batch_size, options.local_epochs)
    plan = world.stream.round(0)
    client = _with_data(world, plan)
    sizes = (len(plan.participants), len(world.stream.data(client, plan.tasks[client])), workers)
    # a home folder may serve several machines
    return f"{random.key(*(str(part) for part in (*parts, *sizes, platform.node(), torch.__version__))):x}"


def _file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everfed" / "engines.json"


def _read() -> dict[str, bool]:
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return {str(k): bool(v) for k, v in found.items()} if isinstance(found, dict) else {}


def _remember(answers: dict[str, bool]) -> None:
    """A cache that cannot be written is measured again next time."""
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        write_atomic(_file(), json.dumps(answers).encode())
    except OSError:
        return
