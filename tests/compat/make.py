"""Makes the folders of this package with an earlier version of everfed; what it makes is never made anew.

    PYTHONPATH=FOLDER_OF_THAT_VERSION python -P tests/compat/make.py

For every run below, `NAME/stopped` is the folder of a run that ended as by a crash in the middle of its second task,
and `NAME/expected.json` the fingerprint (`tests.support.bits`) of what that version made of it. `NAME/finished`, where
there is one, is the finished folder without its checkpoint.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

import everfed
from tests.support import bits

HERE = Path(__file__).resolve().parent
Table = dict[str, Any]
# parts by the paths that their modules had
PATHS = [
    "fedavg",
    "everfed.parts.regularise.synaptic:SynapticIntelligence",
    {"part": "everfed.parts.regularise.proximal:FedProx", "mu": 0.1},
    {
        "part": "everfed.parts.memory.buffer:Memory",
        "size": 6,
        "policy": {"kind": "everfed.parts.selection.gss_policies:GSSGreedy"},
    },
    "everfed.parts.memory.replay:Replay",
]
RUNS: Table = {
    "fedgp-der": {"name": "fedgp+der", "memory": {"size": 8}},
    "fedssi": {"name": "fedssi"},
    "ridge": {"name": "ridge"},
    "lora": {"name": "lora", "lora": {"rank": 2}},  # changes the network
    "paths": {"parts": PATHS},
}
FINISHED = ("fedgp-der", "lora")


def recipe(name: str) -> Table:
    """A run on a few digits, small enough for a repository."""
    method = RUNS[name]
    return {**bits.recipe(method.get("name", ""), "resumed"), "name": f"compat-{name}", "method": method}


def probe() -> str:
    """A digest of a few steps of training: machines that agree on it agree on the bits of small runs."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(10, 64, generator=draw), torch.arange(10)
    weights = [torch.randn(64, 8, generator=draw).requires_grad_(), torch.randn(8, 10, generator=draw).requires_grad_()]
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(torch.tanh(torch.nn.functional.gelu(x @ weights[0])) @ weights[1], y)
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.data -= 0.1 * gradient
    return bits.digest(torch.cat([weight.detach().reshape(-1) for weight in weights]))


def make(name: str) -> None:
    place = HERE / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    with tempfile.TemporaryDirectory() as temporary:
        folder, before = Path(temporary) / "run", Path(temporary) / "before"
        events = bits.stopped(recipe(name), folder)
        shutil.copytree(folder, before)
        result = everfed.resume(folder, progress=False, observers=[events.append])
        found = {"probe": probe(), **bits.fingerprint(folder, result.data, events)}
        shutil.copytree(before, place / "stopped")
        if name in FINISHED:
            shutil.copytree(folder, place / "finished", ignore=shutil.ignore_patterns("checkpoint", "clients"))
    for lock in place.rglob(".lock"):
        lock.unlink()
    (place / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    for each in RUNS:
        make(each)
