"""How long a phase waits, and for whom."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Patience:
    """When a phase is over before everybody has answered.

    deadline: seconds after which it goes on without the others, 0 for never; deadlines: the same for single phases.
    minimum: it never ends with fewer answers (0: all that are asked, or 1 where there is a deadline). enough: the share
    of answers that ends it at once; a plan that asks more clients than it needs over-selects. retry: seconds before a
    client that failed is asked again, doubled each time up to `longest`. silence: seconds after which a client that is
    connected but says nothing is asked again, doubled each time: requests can get lost without a word, and one that was
    carried out already is answered from the client's journal. tries: how often a client that itself fails is asked in a
    phase before it counts as absent, 0 for ever; one that cannot be reached is waited for all the same.
    """

    deadline: float = 0.0
    deadlines: Mapping[str, float] = field(default_factory=dict)
    minimum: int = 0
    enough: float = 1.0
    retry: float = 1.0
    longest: float = 30.0
    silence: float = 120.0
    tries: int = 10

    def over(self, phase: str, asked: int, answered: int, seconds: float, given_up: int = 0) -> bool:
        """May the phase end now? given_up: how many of those that were asked will not answer."""
        if answered + given_up >= asked or not self.suffices(asked - given_up, asked):
            return True
        if answered < self._least(phase, asked):
            return False
        deadline = self._deadline(phase)
        return answered >= math.ceil(self.enough * asked) or (deadline > 0 and seconds >= deadline)

    def suffices(self, answers: int, asked: int) -> bool:
        """Are so many answers as many as `minimum` asks for?"""
        return answers >= min(self.minimum, asked)

    def backoff(self, failures: int) -> float:
        """Seconds to wait after a client's n-th failure in a row."""
        return float(min(self.longest, self.retry * 2 ** min(failures - 1, 16)))

    def silent(self, requests: int) -> float:
        """Seconds after which the n-th request in a row that nobody answers is taken for lost."""
        return self.silence * 2 ** min(requests - 1, 16)

    def _least(self, phase: str, asked: int) -> int:
        if self.minimum:
            return min(self.minimum, asked)
        return 1 if self._deadline(phase) > 0 or self.enough < 1 else asked

    def _deadline(self, phase: str) -> float:
        return self.deadlines.get(phase, self.deadline)
