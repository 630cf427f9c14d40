"""A part of your own: one idea of a method. Its fields are its options; hooks: `everfed.method.Part`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from everfed.method import Gradient, Part, Step, option


@dataclass(frozen=True)
class Clip(Part):
    """Shortens every gradient that is longer than `norm`."""

    norm: float = option(1.0, above=0, about="the greatest length")

    name = "clip"

    def gradient(self, step: Step, gradient: Gradient) -> Tensor:
        """Called in every training step; `gradient.vector` is the whole gradient, one vector."""
        return gradient.vector * (self.norm / gradient.vector.norm().clamp(min=self.norm))
