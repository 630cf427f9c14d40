"""A part's own phase by name, for tests that call its functions directly."""

from __future__ import annotations

from everfed.method import Part, Phase


def phase_of(part: Part, name: str) -> Phase:
    return next(phase for phase in part.phases() if phase.name == name)
