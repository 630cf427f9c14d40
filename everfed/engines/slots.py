"""How many slots, how many host threads to feed them, and which client goes where."""

from __future__ import annotations

import heapq
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import torch

from everfed.core.data import device_memory

_STEPS = (4, 8, 12, 16)  # numbers of slots worth trying
_GAIN = 1.03  # a change must be at least this much faster
_OFTEN, _SHORT = 3, 2.0  # rounds of each setting that are timed where a round takes less than these seconds
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


def seat(hands: Sequence[list[int]], shapes: Mapping[int, int], known: Sequence[AbstractSet[int]]) -> list[list[int]]:
    """The same hands, one for every slot, in the order in which slots have captured most of their shapes before.

    shapes: the size of each client's last minibatch. known: those that each slot has met.
    """
    wanted = [{shapes[client] for client in hand} for hand in hands]
    if not any(known) or all(new <= own for new, own in zip(wanted, known, strict=True)):
        return list(hands)
    from scipy.optimize import linear_sum_assignment  # a quarter of a second, for runs whose clients differ in size

    met = [[len(new & own) for own in known] for new in wanted]
    numbers, slots = linear_sum_assignment(met, maximize=True)
    by_slot = dict(zip(slots.tolist(), numbers.tolist(), strict=True))
    return [hands[by_slot[slot]] for slot in range(len(known))]


class Setting(NamedTuple):
    """slots: clients at a time. threads: 1 is best while launches are cheap; a large model's graphs fill the queue of a
    stream, and then one thread per slot keeps the other slots from waiting."""

    slots: int
    threads: int


class Tuner:
    """Finds a good setting from measured rounds: first whether threads pay, then more slots as long as they do.

    setting: at most so many slots. used: how many the last phase had. Results do not depend on slots or threads.
    """

    def __init__(self, slots: int = 0, threads: int = 0, device: torch.device | None = None) -> None:
        self.fixed_slots, self.fixed_threads, self.device = slots, threads, device
        self._clients = sys.maxsize  # of the last phase
        self.restart()
        self.used = self.setting

    def restart(self) -> None:
        """Search anew: what clients do has changed."""
        self.setting = Setting(self.fixed_slots or _STEPS[0], self.fixed_threads or 1)
        self.rates: dict[Setting, float] = {}
        self._timed: list[float] = []  # rates of the setting so far
        self.searching = not (self.fixed_slots and self.fixed_threads)

    def settle(self, setting: Setting) -> None:
        """End the search: this one is known to be the best."""
        self.setting, self.searching = setting, False

    def choose(self, clients: int) -> Setting:
        """The setting for a phase with `clients` clients. Eight slots need two turns for ten of them, and so do five,
        which are faster (benchmarks/README.md)."""
        slots = max(1, min(self.setting.slots, clients))
        turns = -(-clients // slots)
        slots = max(1, -(-clients // max(1, turns)))
        self._clients, self.used = clients, Setting(slots, min(self.setting.threads, slots))
        return self.used

    def measured(self, samples: float, seconds: float) -> None:
        """A round that captured nothing under the setting. What disturbs a short one (a client's data that is loaded
        for the first time, a checkpoint) only makes it longer, so the best of several counts."""
        self._timed.append(samples / seconds)
        if len(self._timed) < (_OFTEN if seconds < _SHORT else 1):
            return
        self.rates[self.setting], self._timed = max(self._timed), []
        following = self._next(self.setting)
        if following is None:
            self.settle(self.best())
        else:
            self.setting = following

    def best(self) -> Setting:
        return max(self.rates, key=lambda setting: self.rates[setting])

    def _next(self, used: Setting) -> Setting | None:
        if not self.fixed_threads and len(self.rates) == 1:
            return Setting(used.slots, used.slots)
        grown = any(setting.slots < used.slots for setting in self.rates)
        if self.fixed_slots or (grown and not self._pays(used)):
            return None
        best = self.best()
        larger = next((step for step in _STEPS if step > best.slots), None) if best.slots < self._clients else None
        if larger is None or not self._fits(best.slots, larger):
            return None
        return Setting(larger, self.fixed_threads or (larger if best.threads > 1 else 1))

    def _pays(self, used: Setting) -> bool:
        others = [rate for setting, rate in self.rates.items() if setting != used]
        return self.rates[used] > _GAIN * max(others)

    def _fits(self, slots: int, more: int) -> bool:
        if self.device is None:
            return True
        each = torch.cuda.memory_reserved(self.device) / slots
        return self.has_room(each * (more - slots))

    def has_room(self, needed: float) -> bool:
        """Are so many bytes, and some more, free on the device?"""
        return self.device is None or needed < _MEMORY_SHARE * device_memory(self.device)[0]


# queues ---------------------------------------------------------------------------------------------------------------
VARIABLE, _MANY = "CUDA_DEVICE_MAX_CONNECTIONS", "32"
_MARK = "EVERFED_CHOSE_CONNECTIONS"  # the variable is everfed's choice, not the user's


def choose_queues() -> None:
    """Ask CUDA for a queue for every slot's stream, unless the user has chosen. CUDA's own number is 8, and streams
    that share a queue wait for each other. To be called before CUDA starts. Under MPS it stays at CUDA's own number, 2
    a process: processes share a limit there, and beyond it they do not start."""
    if _under_mps():
        take_back(os.environ)  # it may be from the process that started this one
    elif VARIABLE not in os.environ:
        os.environ[VARIABLE] = os.environ[_MARK] = _MANY


def take_back(environment: MutableMapping[str, str]) -> None:
    """Remove everfed's own choice from an environment."""
    if environment.pop(_MARK, None) is not None:
        del environment[VARIABLE]


def _under_mps() -> bool:
    """Is there an MPS daemon that CUDA in this process would use?"""
    # not pathlib: Python 3.11's raises where a folder of another user may not be entered
    return os.path.exists(os.path.join(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps", "control"))
