"""A part's own functions, for tests that call them directly."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from everfed.method import Gradient, Part, Phase


def phase_of(part: Part, name: str) -> Phase:
    return next(phase for phase in part.phases() if phase.name == name)


def ruled(part: Part, step: Any, gradient: Tensor) -> Tensor:
    """What the part's rule makes of a gradient (P,) in a step, or in what has as much of one as the rule reads."""
    changed = part.gradient(step, Gradient.of(None, gradient))  # type: ignore[arg-type]
    return changed.vector if isinstance(changed, Gradient) else changed
