"""When a phase ends, and when requests are repeated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from everfed.core.option import WaitOptions


@dataclass(frozen=True)
class PhaseOptions(WaitOptions):
    """Deadlines, quorum and retries of a phase; the recipe's [federation]. A finished step is answered from the
    client's journal; a client that cannot be reached is waited for, whatever `tries` says."""

    def over(self, phase: str, clients: int, answered: int, seconds: float, given_up: int = 0) -> bool:
        """May the phase end now? clients: how many it has; given_up: how many of them will not answer."""
        if answered + given_up >= clients or not self.suffices(clients - given_up, clients):
            return True
        if answered < self._least(phase, clients):
            return False
        deadline = self._deadline(phase)
        return answered >= math.ceil(self.enough * clients) or (deadline > 0 and seconds >= deadline)

    def suffices(self, answers: int, clients: int) -> bool:
        """Are there as many answers as `minimum` requires?"""
        return answers >= min(self.minimum, clients)

    def backoff(self, failures: int) -> float:
        """Seconds to wait after a client's n-th failure in a row."""
        return float(min(self.longest_retry, self.retry * 2 ** min(failures - 1, 16)))

    def silent(self, requests: int) -> float:
        """Seconds after which the n-th unanswered request in a row counts as lost."""
        return self.silence * 2 ** min(requests - 1, 16)

    def _least(self, phase: str, clients: int) -> int:
        if self.minimum:
            return min(self.minimum, clients)
        return 1 if self._deadline(phase) > 0 or self.enough < 1 else clients

    def _deadline(self, phase: str) -> float:
        return self.deadlines.get(phase, self.deadline)
