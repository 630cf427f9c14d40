"""Steps that a part takes around every training step: a generator after its discriminator, a flow before a classifier.

Each has a loss, the parameters it moves and an optimiser of its own, all inside one training step, so that a captured
step holds them too. Their moments travel with those of the run's optimiser, under "part/substep/...".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from everfed.core.layout import Entry, Layout
from everfed.core.optimizer import Optimizer

if TYPE_CHECKING:
    from everfed.core.part import Part

Moments = dict[str, Tensor]


@dataclass(frozen=True)
class Substep:
    """parameters: which ones it moves, by name; they must lie together in the vector. optimizer: its own, or None for
    the run's, with the round's rate. alone: nothing else moves them, not even the training step itself. after: it comes
    after the training step; otherwise before."""

    name: str
    parameters: Callable[[str], bool]
    optimizer: Optimizer | None = None
    alone: bool = False
    after: bool = False


@dataclass(frozen=True)
class Move:
    """A substep of a part, and where in the vector its parameters lie."""

    part: Part
    substep: Substep
    span: slice

    def moments(self, all_moments: Moments) -> Moments:
        """Its own of them, under plain names."""
        prefix = self._prefix
        return {name.removeprefix(prefix): value for name, value in all_moments.items() if name.startswith(prefix)}

    def first_moments(self, optimizer: Optimizer, params: Tensor) -> Moments:
        fresh = (self.substep.optimizer or optimizer).init(params[self.span])
        return {self._prefix + name: value for name, value in fresh.items()}

    def apply(self, params: Tensor, gradient: Tensor, moments: Moments, optimizer: Optimizer, rate: Tensor) -> None:
        """Move the parameters by the gradient of this substep's loss, (span,)."""
        own = self.substep.optimizer
        pace = rate if own is None else torch.full_like(rate, own.lr)
        (own or optimizer).apply(params[self.span], gradient, self.moments(moments), pace)

    @property
    def _prefix(self) -> str:
        return f"{self.part.name}/{self.substep.name}/"


@dataclass(frozen=True)
class Course:
    """Who moves what in a training step. main: what the step itself moves."""

    main: slice
    before: tuple[Move, ...] = ()
    after: tuple[Move, ...] = ()

    @staticmethod
    def of(parts: Sequence[Part], layout: Layout) -> Course:
        moves = [Move(p, s, _span(layout, s.parameters, p, s.name)) for p in parts for s in p.substeps(layout)]
        if not moves:
            return Course(slice(0, layout.size))
        alone = [move.substep.parameters for move in moves if move.substep.alone]
        main = _together([e for e in layout.params if not any(owns(e.name) for owns in alone)], "the training step")
        before, after = ([m for m in moves if m.substep.after is late] for late in (False, True))
        return Course(main, tuple(before), tuple(after))

    def first_moments(self, optimizer: Optimizer, params: Tensor) -> Moments:
        """Fresh moments of the run's optimiser and of all substeps."""
        moments = optimizer.init(params[self.main])
        for move in (*self.before, *self.after):
            moments |= move.first_moments(optimizer, params)
        return moments


def _span(layout: Layout, owns: Callable[[str], bool], part: Part, name: str) -> slice:
    return _together([entry for entry in layout.params if owns(entry.name)], f"substep {name!r} of part {part.name!r}")


def _together(entries: Iterable[Entry], whose: str) -> slice:
    """Where entries that lie together lie in the vector."""
    listed = list(entries)
    if not listed:
        raise ValueError(f"{whose} moves no parameter of this model")
    span = slice(listed[0].start, listed[-1].start + listed[-1].size)
    if sum(entry.size for entry in listed) != span.stop - span.start:
        raise ValueError(f"the parameters that {whose} moves do not lie together in the model's vector")
    return span
