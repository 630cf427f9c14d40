"""Domain-incremental: the same classes and samples on the same clients, under another transform in every task."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from everfed.data import transforms
from everfed.data.source import Source
from everfed.streams.draws import generator
from everfed.streams.incremental import IncrementalStream
from everfed.streams.options import OptionError, Options, require_choice

TRANSFORMS: Mapping[str, str] = {
    "rotate": "one angle per task, uniform in [0, 180) degrees, about the centre, nearest pixel",
    "permute": "one random permutation of the pixels (or features) per task",
}


class DomainIncremental(IncrementalStream):
    """One transform per task, shared by all clients and by training and test samples; the first task has one too."""

    scenario = "domain-incremental"
    any_targets = True

    def __init__(self, source: Source, options: Options, *, transform: str = "rotate", **settings: Any) -> None:
        require_choice("transform", transform, TRANSFORMS)
        if transform == "rotate" and source.x_train.dim() != 4:
            raise OptionError("transform", "'rotate' needs images; allowed for these samples: permute")
        super().__init__(source, options, **settings)
        self.transform = transform
        self.name = f"{source.name}-{transform}"

    def view(self, x: Tensor, task: int) -> Tensor:
        """The samples under the transform of `task`."""
        if self.transform == "rotate":
            return transforms.rotate(x, self.angle(task))
        return transforms.permute_pixels(x, self.permutation(task))

    def division_of(self, task: int) -> int:
        """One division for the whole run: every sample keeps its client."""
        return 0

    def angle(self, task: int) -> float:
        """The degrees that `task` turns its images by."""
        return float(generator(self.seed, "angle", task).uniform(0.0, 180.0))

    def permutation(self, task: int) -> np.ndarray:
        """The order in which `task` shows the pixels."""
        is_image = len(self.input_shape) == 3
        pixels = self.input_shape[1] * self.input_shape[2] if is_image else self.input_shape[-1]
        return generator(self.seed, "permutation", task).permutation(pixels)

    def facts(self) -> dict[str, Any]:
        """The transform, with the angle or the fingerprint of the permutation of every task."""
        tasks = range(self.options.tasks)
        if self.transform == "rotate":
            return {"transform": self.transform, "angles": [self.angle(t) for t in tasks]}
        orders = [self.permutation(t).astype("<i8").tobytes() for t in tasks]
        return {
            "transform": self.transform,
            "permutations": [hashlib.sha256(order).hexdigest()[:16] for order in orders],
        }
