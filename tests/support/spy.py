"""A part that watches training: what every step saw, and the gradient as the parts before it left it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from everfed.method import Gradient, Method, Part, Step, compose


@dataclass
class Seen:
    """One step. params: before the step. batches: {"part/key": (x, y, extra)} that parts brought."""

    client: int
    round: int
    params: Tensor
    x: Tensor
    y: Tensor
    outputs: Tensor
    batches: dict[str, tuple[Tensor, Tensor, dict[str, Tensor]]]
    gradient: Tensor


@dataclass(frozen=True)
class Spy(Part):
    """Keeps what it sees in a list that belongs to the test. It changes nothing."""

    log: list[Seen] = field(default_factory=list, compare=False)

    name: ClassVar[str] = "spy"

    def gradient(self, step: Step, gradient: Gradient) -> Gradient:
        batches = {
            key if key == part or key.startswith(f"{part}/") else f"{part}/{key}": (
                b.x.clone(),
                b.y.clone(),
                dict(b.extra),
            )
            for part, own in step.training.batches.items()
            for key, b in own.items()
        }
        where = (int(step.context.client or 0), step.context.round)
        now = (step.params.clone(), step.x.clone(), step.y.clone(), step.outputs.detach().clone())
        self.log.append(Seen(*where, *now, batches, gradient.vector.clone()))
        return gradient


def spied(method: Method, log: list[Seen], before: str | None = None) -> Callable[[], Method]:
    """The method with a spy after all its parts, or in front of part `before`."""
    names = [part.name for part in method.parts]
    at = len(names) if before is None else names.index(before)
    parts = (*method.parts[:at], Spy(log), *method.parts[at:])
    return lambda: compose(*parts, name=method.name)
