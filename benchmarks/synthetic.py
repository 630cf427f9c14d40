"""Streams of random images in the shapes of the usual sets: for speed, where what is learned does not matter."""

from __future__ import annotations

from typing import Any

import numpy as np

from everfed import streams
from everfed.core.stream import Stream

SHAPES = {"cifar": (3, 32, 32), "mnist": (1, 28, 28), "digits": (1, 8, 8)}


def stream(
    shape: str,
    clients: int,
    per_client: int,
    rounds: int,
    participation: float = 1.0,
    classes: int = 10,
    tasks: int = 1,
    **options: Any,
) -> Stream:
    """`clients` clients with `per_client` images in each task, which has `rounds` rounds."""
    rng = np.random.default_rng(0)
    count = clients * per_client * tasks
    x = rng.integers(0, 256, (count, *SHAPES[shape]), dtype=np.uint8)
    y = np.arange(count) % classes
    return streams.from_arrays(
        x,
        y,
        x[:100],
        y[:100],
        scenario="class-incremental",
        tasks=tasks,
        clients=clients,
        participation=participation,
        rounds_per_task=rounds,
        partition={"kind": "iid"},
        **options,
    )
