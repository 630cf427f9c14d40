"""A real stream of few, tiny images, made with any option of a recipe's [stream] table."""

from __future__ import annotations

from typing import Any

import numpy as np

from everfed.streams import from_arrays


def small_stream(scenario: str = "class-incremental", rounds_per_task: int = 4, **options: Any) -> Any:
    """Noisy prototypes of 6 classes as 4 x 4 images: 3 tasks and 4 clients, unless `options` say otherwise."""
    rng = np.random.default_rng(11)
    prototypes = rng.integers(0, 180, (6, 4, 4))

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(count) % 6
        return (prototypes[y] + rng.integers(0, 70, (count, 4, 4))).astype(np.uint8), y

    table = {"tasks": 3, "clients": 4, "scenario": scenario, "rounds_per_task": rounds_per_task, **options}
    return from_arrays(*draw(96), *draw(36), **table)
