"""A part of your own: one idea of a method. Its fields are its options; hooks: `everfed.method.Part`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from everfed.method import Part, Step


@dataclass(frozen=True)
class Clip(Part):
    """Shortens every gradient to at most `norm`."""

    norm: float = 1.0

    name: ClassVar[str] = "clip"

    def __post_init__(self) -> None:
        if not self.norm > 0:
            raise ValueError(f"norm must be above 0; got {self.norm}")

    def gradient(self, step: Step, gradient: Tensor) -> Tensor:
        """Called in every training step with the whole gradient as one vector."""
        return gradient * (self.norm / gradient.norm().clamp(min=self.norm))
