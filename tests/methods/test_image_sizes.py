"""The generative family on images of 28, 32 and 64 pixels, grey and in colour: two tasks, clients and server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.entrants import EAGER, entrant, take_turns
from everfed import streams
from everfed.recipe import Recipe

SYNTHESIS = {
    "syn_round": 1, "synth_batch": 4, "g_steps": 1, "nz": 4, "kd_steps": 1, "kd_batch": 4, "batch": 4, "n_syn": 4,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "mfcl": {"mfcl": {"gen_steps": 2, "gen_batch": 4, "syn_batch": 2, "z_dim": 4, "gen_light": True}},
    "target": {"target": {**SYNTHESIS, "warmup": 0}},
    "lander": {"lander": {**SYNTHESIS, "warmup": 1, "width": 4, "statistics": "stream"}},
    "fedcil": {"fedcil": {"server_steps": 1, "server_batch": 2, "noise": 2, "width": 16}},
    "glfc": {
        "glfc": {"old_model": "proxy", "perturbation": 1, "reconstruction": 1, "iterates": 1},
        "memory": {"size": 4, "policy": {"kind": "on-transition", "detect": "boundary"}},
    },
    "af-fcl": {"af-fcl": {"hidden": 8}},
}


def images(shape: tuple[int, ...]) -> Any:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (16, *shape), dtype=np.uint8)
    if shape[-1] == 1:
        x = x[..., 0]
    y = np.arange(16) % 4
    return streams.from_arrays(x, y, x[:4], y[:4], scenario="class-incremental", tasks=2, clients=2, rounds_per_task=2)


SHAPES = {28: (28, 28, 1), 32: (32, 32, 3), 64: (64, 64, 3)}
BY_DEFAULT = {("mfcl", 28), ("target", 32), ("lander", 28), ("fedcil", 32), ("glfc", 28), ("af-fcl", 32)}
CASES = [
    pytest.param(method, shape, id=f"{method}-{side}", marks=[] if (method, side) in BY_DEFAULT else [pytest.mark.slow])
    for method in SMALL
    for side, shape in SHAPES.items()
]


@pytest.mark.parametrize(("method", "shape"), CASES)
def test_a_run_of_two_tasks(method: str, shape: tuple[int, ...]) -> None:
    recipe = Recipe.model_validate(
        {
            "method": {"name": method, **SMALL[method]},
            "model": {"kind": "acgan-cnn"},
            "train": {"rounds_per_task": 2, "batch_size": 4, "logits": "seen", "optimizer": {"lr": 0.01}},
            "engine": {**EAGER, "device": "cpu"},
        }
    )
    one = entrant(recipe, stream=images(shape))
    take_turns([one], 4)
    assert one.runner.state.model["params"].isfinite().all()
    assert len(one.runner.state.rows) == 2
    phases = {event["phase"] for event in one.events if event["event"] == "phase"}
    servers = {"mfcl": "generator", "target": "synthesis", "lander": "synthesis", "fedcil": "consolidate"}
    assert {**servers, "glfc": "reconstruct"}.get(method, "train") in phases
