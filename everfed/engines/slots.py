"""How many slots, and which client goes where."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import torch

_STEPS = (2, 4, 8, 12, 16)  # numbers of slots worth trying
_GAIN = 1.03  # more slots must be at least this much faster
_MEMORY_SHARE = 0.8


def deal(sizes: Mapping[int, int], hands: int) -> list[list[int]]:
    """Clients dealt to `hands` slots, the largest first and each to the slot with the least to do."""
    piles: list[tuple[int, int]] = [(0, hand) for hand in range(hands)]
    dealt: list[list[int]] = [[] for _ in range(hands)]
    for client in sorted(sizes, key=lambda c: (-sizes[c], c)):
        load, hand = heapq.heappop(piles)
        dealt[hand].append(client)
        heapq.heappush(piles, (load + sizes[client], hand))
    return dealt


class SlotCount:
    """Chooses the number of slots: tries more of them as long as that pays and memory allows."""

    def __init__(self, fixed: int, device: torch.device) -> None:
        self.fixed, self.device = fixed, device
        self.rates: dict[int, float] = {}
        self._choice = fixed or _STEPS[1]
        self.searching = not fixed

    def choose(self, clients: int) -> int:
        """How many slots to use for `clients` clients now."""
        return max(1, min(self._choice, clients))

    def measured(self, slots: int, rate: float) -> None:
        """A round without captures ran at `rate` samples a second on `slots` slots."""
        if slots < self._choice:  # fewer clients than slots: nothing to learn about more
            self.searching = False
            return
        self.rates[slots] = rate
        larger = [step for step in _STEPS if step > slots]
        worse = any(rate < _GAIN * other for step, other in self.rates.items() if step < slots)
        if worse or not larger or not self._fits(slots, larger[0]):
            self._choice = max(self.rates, key=lambda step: self.rates[step])
            self.searching = False
        else:
            self._choice = larger[0]

    def _fits(self, slots: int, more: int) -> bool:
        free, _ = torch.cuda.mem_get_info(self.device)
        per_slot = torch.cuda.memory_reserved(self.device) / slots
        return per_slot * (more - slots) < _MEMORY_SHARE * free
