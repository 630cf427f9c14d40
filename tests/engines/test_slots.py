"""Dealing clients to slots, and the search for a good number of them."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from everfed.engines.slots import Setting, Tuner, deal


@given(st.dictionaries(st.integers(0, 500), st.integers(0, 1000), max_size=60), st.integers(1, 12))
def test_every_client_is_dealt_once_and_no_slot_waits_long(sizes: dict[int, int], hands: int) -> None:
    dealt = deal(sizes, hands)
    assert sorted(client for hand in dealt for client in hand) == sorted(sizes)
    loads = [sum(sizes[client] for client in hand) for hand in dealt]
    # list scheduling: no slot is ahead of another by more than one client
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def search(speed: Callable[[Setting], float], clients: int = 100, **fixed: int) -> Tuner:
    tuner = Tuner(**fixed)
    for _ in range(20):
        if tuner.searching:
            used = tuner.choose(clients)
            tuner.measured(used, speed(used))
    assert not tuner.searching
    return tuner


def test_cheap_launches_keep_one_thread_and_add_slots_while_that_pays() -> None:
    tuner = search(lambda s: min(s.slots, 8) * (1.0 if s.threads == 1 else 0.9))
    assert tuner.setting == Setting(8, 1)
    assert Setting(16, 1) not in tuner.rates  # 12 brought nothing, so 16 was not tried


def test_blocking_launches_take_a_thread_per_slot() -> None:
    tuner = search(lambda s: s.slots if s.threads == s.slots else 1.0)
    assert tuner.setting == Setting(16, 16)


def test_given_numbers_are_kept() -> None:
    assert search(lambda s: 1.0, slots=3).setting.slots == 3
    assert search(lambda s: s.slots, threads=1).setting == Setting(16, 1)
    assert not Tuner(slots=2, threads=2).searching


def test_no_more_slots_than_clients() -> None:
    assert Tuner(slots=10, threads=10).choose(3) == Setting(3, 3)
    assert search(lambda s: 1.0, clients=2).choose(2).slots == 2
