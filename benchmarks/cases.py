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
from everfed.session import Assembly, assemble
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

    def assemble(self, rounds: int, method: str = "fedavg") -> Assembly:
        stream = synthetic.stream(self.shape, CLIENTS, self.per_client, rounds)
        return assemble(self.recipe(rounds, method), stream=stream)

    def bare(self, assembly: Assembly) -> BareFedAvg:
        options = {key: value for key, value in self.model.items() if key != "kind"}
        module = models.build(self.model["kind"], assembly.stream.input_shape, assembly.stream.classes, 0, options)
        return BareFedAvg(assembly.stream, module, LR, self.batch, self.epochs)


CASES = {
    "mcmahan": Case("arithmetic-bound", "mnist", {"kind": "mcmahan-cnn"}, 600, 32, 1),
    "demo": Case("overhead-bound", "digits", {"kind": "mlp", "hidden": [100, 100]}, 144, 32, 5),
}


def eager(assembly: Assembly) -> Eager:
    return Eager(assembly.setup, ClientStore(), assembly.build_module)


def processes(assembly: Assembly, workers: int) -> Processes:
    return Processes(assembly.setup, ClientStore(), assembly.build_module, workers)


def rounds_of(assembly: Assembly, engine: Engine) -> Callable[[], None]:
    """A function that runs the next round."""
    return Runner(assembly.setup, engine, assembly.first_model(), EvalOptions()).round
