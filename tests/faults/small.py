"""A small run on the embedded digits, and what must be equal however often it was interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECIPE = """\
[stream]
dataset = "digits"
transform = "rotate"
tasks = 4
clients = 3
max_train = 90
max_test = 40

[model]
kind = "mlp"
hidden = [12]

[train]
rounds_per_task = 4
batch_size = 10
optimizer = { kind = "sgd", lr = 0.1 }

[method]
name = "fedavg"

[engine]
kind = "eager"
"""
MODELS = '''\
"""A network with BatchNorm."""

import math

from torch import nn


class Normed(nn.Sequential):
    def __init__(self, input_shape, classes):
        size = math.prod(input_shape)
        super().__init__(nn.Flatten(), nn.Linear(size, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))
'''
# what a run may keep between its rounds
CASES = {
    "fedavg": [],
    "fedgp+der": ["method.name=fedgp+der", "method.memory.size=10"],
    "paged": ["method.name=fedgp+der", "method.memory.size=10", "engine.state_memory=0.000001"],
    "fedcurv": ["method.name=fedcurv"],
    "equalised": ["method.name=fedgp", "method.memory.size=10", "train.sync_every=2"],
    "kept optimiser": ['train.optimizer={ kind = "adam", lr = 0.01, state = "kept" }'],
    "local statistics": ["model={ kind = 'normed_net:Normed', batchnorm = 'local' }"],
}


def prepare(folder: Path) -> Path:
    """The recipe and the network's module, in `folder`."""
    (folder / "small.toml").write_text(RECIPE)
    (folder / "normed_net.py").write_text(MODELS)
    return folder


def run_command(out: str, case: str, *sets: str, every: float = 0.0) -> list[str]:
    """`everfed run` of a case; checkpoints are written as fast as they can be."""
    chosen = [word for entry in [*CASES[case], *sets] for word in ("--set", entry)]
    return ["run", "small.toml", "--out", out, "--checkpoint-every", str(every), *chosen]


def resume_command(out: str, every: float = 0.0) -> list[str]:
    return ["resume", out, "--checkpoint-every", str(every)]


def outcome(folder: Path) -> dict[str, Any]:
    """All of a finished run but the time and the memory it took and the machine it ran on."""
    result = json.loads((folder / "result.json").read_text())
    cost = {name: value for name, value in result["cost"].items() if name not in ("seconds", "peak_memory_bytes")}
    rest = {name: value for name, value in result.items() if name not in ("environment", "cost")}
    return {**rest, "cost": cost, "model": (folder / "model.safetensors").read_bytes()}
