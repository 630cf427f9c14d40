"""The two CPU cases of the benchmarks, and the ways to run a round of them in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import synthetic
from benchmarks.bare_loop import BareFedAvg
from everfed import models
from everfed.core.engine import Engine
from everfed.core.evaluate import EvalOptions
from everfed.core.server import Runner
from everfed.engines.eager import Eager
from everfed.engines.processes import Processes
from everfed.recipe import Recipe
from everfed.session import Run, assemble
from everfed.store.clients import ClientStore

CLIENTS = 10
LR = 0.01


@dataclass(frozen=True)
class Case:
    """FedAvg with ten clients on random images. about: what bounds it."""

    about: str
    shape: str
    model: dict[str, Any]
    per_client: int
    batch: int
    epochs: int

    def recipe(self, rounds: int, method: str = "fedavg") -> Recipe:
        return Recipe.model_validate(
            {
                "method": {"name": method},
                "model": self.model,
                "train": {
                    "rounds_per_task": rounds,
                    "local_epochs": self.epochs,
                    "batch_size": self.batch,
                    "optimizer": {"lr": LR},
                },
                "engine": {"kind": "eager", "device": "cpu"},
            }
        )

    def assemble(self, rounds: int, method: str = "fedavg") -> Run:
        stream = synthetic.stream(self.shape, CLIENTS, self.per_client, rounds)
        return assemble(self.recipe(rounds, method), stream=stream)

    def bare(self, run: Run) -> BareFedAvg:
        options = {key: value for key, value in self.model.items() if key != "kind"}
        module = models.build(self.model["kind"], run.stream.input_shape, run.stream.classes, 0, options)
        return BareFedAvg(run.stream, module, LR, self.batch, self.epochs)


CASES = {
    "mcmahan": Case("arithmetic-bound", "mnist", {"kind": "mcmahan-cnn"}, 600, 32, 1),
    "demo": Case("overhead-bound", "digits", {"kind": "mlp", "hidden": [100, 100]}, 144, 32, 5),
}


def eager(run: Run) -> Eager:
    return Eager(run.setup, ClientStore(), run.build_module)


def processes(run: Run, workers: int) -> Processes:
    return Processes(run.setup, ClientStore(), run.build_module, workers)


def rounds_of(run: Run, engine: Engine) -> Callable[[], None]:
    """A function that runs the next round."""
    return Runner(run.setup, engine, run.first_model(), EvalOptions()).round
