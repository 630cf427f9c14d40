"""Methods side by side in one process: each on its way through the same stream, a round each in turn, so that a busy
machine slows all alike. What the cost tables of method families (`fedssi_cost`, `generative_cost`, `stamp_cost`) share.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Any

import torch

from everfed import engines, session
from everfed.core.engine import Engine
from everfed.core.evaluate import EvalOptions
from everfed.core.events import Event
from everfed.core.server import Runner
from everfed.core.stream import Stream
from everfed.core.tree import on_device, tensor_bytes
from everfed.recipe import Recipe
from everfed.store.clients import ClientStore

EAGER = {"kind": "eager", "precision": "fp32"}  # the plainest engine, for ratios of what methods compute


@dataclass
class Entrant:
    """One method on its way through the stream. seconds: of every round, by `clock`. events: what the run emitted."""

    name: str
    runner: Runner
    store: ClientStore
    engine: Engine
    events: list[Event] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    clock: Callable[[], float] = perf_counter

    def advance(self) -> None:
        """One round, the device's work included."""
        start = self.clock()
        self.runner.round()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(self.clock() - start)

    @property
    def traffic(self) -> dict[str, Any]:
        """bytes_up, bytes_down and bytes_by_part so far."""
        return self.runner.state.traffic.as_dict()

    def times(self, key: str, base: Entrant) -> float:
        """This entrant's bytes over another's; key: "bytes_up" or "bytes_down"."""
        return float(self.traffic[key] / base.traffic[key])

    def state_bytes(self) -> int:
        """The largest client state."""
        return max(tensor_bytes(self.store.get(client) or {}) for client in self.store.clients())


def entrant(
    recipe: Recipe, data_dir: str | None = None, stream: Stream | None = None, *, cpu_time: bool = False
) -> Entrant:
    """The recipe's method at its first round, in the recipe's engine. cpu_time: on a CPU it is the time of this process
    that counts, which other work on the machine changes little."""
    run, store, events = session.assemble(recipe, data_dir, stream=stream), ClientStore(), []
    engine = engines.build(recipe.engine, run.setup, store, run.build_module, events.append)
    model = on_device(run.first_model(), engines.device(recipe.engine))
    runner = Runner(run.setup, engine, model, EvalOptions(logits=recipe.eval.logits), events.append)
    clock = process_time if cpu_time and not torch.cuda.is_available() else perf_counter
    return Entrant(run.method.name, runner, store, engine, events, clock=clock)


def take_turns(entrants: Sequence[Entrant], rounds: int) -> None:
    for _ in range(rounds):
        for one in entrants:
            one.advance()


def compare(entrants: Sequence[Entrant], rounds: int, rounds_per_task: int) -> None:
    """Runs the rounds in turn and prints what each entrant took, over the first one."""
    take_turns(entrants, rounds)
    base = entrants[0]
    size, clock = base.runner.setup.facts.layout.size, "CPU time" if base.clock is process_time else "time"
    print(f"{size} parameters, {rounds} rounds, {rounds_per_task} a task; {clock} and bytes over those of {base.name}")
    print(f"{'method':15} {'time':>6} {'last task':>10} {'up':>6} {'down':>6} {'client state':>13}")
    for one in entrants:
        last = sum(one.seconds[-rounds_per_task:]) / sum(base.seconds[-rounds_per_task:])
        up, down = (one.times(key, base) for key in ("bytes_up", "bytes_down"))
        time = sum(one.seconds) / sum(base.seconds)
        print(f"{one.name:15} {time:6.2f} {last:10.2f} {up:6.2f} {down:6.2f} {one.state_bytes():13,}")


def parser_of(about: str | None, methods: Sequence[str]) -> argparse.ArgumentParser:
    """A command line that begins with the methods, the first of which the others are divided by."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=methods, help="the first one is what the others are divided by")
    return parser
