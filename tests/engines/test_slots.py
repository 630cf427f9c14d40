"""Dealing clients to slots, and the search for a good number of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from everfed.engines.slots import Setting, Tuner, deal, seat


@given(st.dictionaries(st.integers(0, 500), st.integers(0, 1000), max_size=60), st.integers(1, 12))
def test_every_client_is_dealt_once_and_no_slot_waits_long(sizes: dict[int, int], hands: int) -> None:
    dealt = deal(sizes, hands)
    assert sorted(client for hand in dealt for client in hand) == sorted(sizes)
    loads = [sum(sizes[client] for client in hand) for hand in dealt]
    # list scheduling: no slot is ahead of another by more than one client
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def test_the_largest_clients_are_dealt_first() -> None:
    """By hand: 9 | 7, 5 to the second (12), 4 to the first (13), 2 to the second (14). Smallest first would end with
    11 and 16."""
    sizes = {0: 2, 1: 4, 2: 5, 3: 7, 4: 9}
    assert deal(sizes, 2) == [[4, 1], [3, 2, 0]]
    assert deal({0: 3, 1: 3, 2: 3}, 2) == [[0, 2], [1]]  # equal ones in client order


def test_hands_go_to_slots_that_have_met_their_shapes() -> None:
    hands, shapes = [[0, 1], [2], [3]], {0: 5, 1: 6, 2: 7, 3: 5}
    assert seat(hands, shapes, [{7}, {5, 6}, set()]) == [[2], [0, 1], [3]]
    # the first slot knows 5 and 7, the second only 5: the first pair that fits would leave 7 without its slot
    assert seat([[3], [2]], shapes, [{5, 7}, {5}]) == [[2], [3]]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=4), st.sets(st.integers(0, 9))), min_size=1, max_size=8),
)
def test_seats_are_an_order_of_the_hands_and_stay_the_same_once_all_is_known(
    slots: list[tuple[list[int], set[int]]],
) -> None:
    shapes = {(number, place): shape for number, (own, _) in enumerate(slots) for place, shape in enumerate(own)}
    clients = {where: client for client, where in enumerate(shapes)}
    hands = [[clients[number, place] for place in range(len(own))] for number, (own, _) in enumerate(slots)]
    by_client = {clients[where]: shape for where, shape in shapes.items()}
    known = [set(before) for _, before in slots]
    seated = seat(hands, by_client, known)
    assert sorted(seated) == sorted(hands)
    for hand, own in zip(seated, known, strict=True):
        own.update(by_client[client] for client in hand)
    for hand, own in zip(seat(hands, by_client, known), known, strict=True):
        assert {by_client[client] for client in hand} <= own, "a second round captures nothing"


def search(speed: Callable[[Setting], float], clients: int = 100, **fixed: int) -> Tuner:
    tuner = Tuner(**fixed)
    for _ in range(20):
        if tuner.searching:
            used = tuner.choose(clients)
            tuner.measured(speed(used), 1.0)
    assert not tuner.searching
    return tuner


def test_cheap_launches_keep_one_thread_and_add_slots_while_that_pays() -> None:
    tuner = search(lambda s: min(s.slots, 8) * (1.0 if s.threads == 1 else 0.9))
    assert tuner.setting == Setting(8, 1)
    assert Setting(16, 1) not in tuner.rates  # 12 brought nothing, so 16 was not tried


def test_a_gain_within_the_noise_of_a_measurement_is_none() -> None:
    """8 slots are 2 % faster than 4: not enough to go on to 12. 4 % are."""
    tuner = search(lambda s: {4: 100.0, 8: 102.0}.get(s.slots, 1000.0), threads=1)
    assert set(tuner.rates) == {Setting(4, 1), Setting(8, 1)}
    assert Setting(12, 1) in search(lambda s: {4: 100.0, 8: 104.0}.get(s.slots, 1.0), threads=1).rates


def test_blocking_launches_take_a_thread_per_slot() -> None:
    tuner = search(lambda s: s.slots if s.threads == s.slots else 1.0)
    assert tuner.setting == Setting(16, 16)


def test_a_short_round_that_is_disturbed_does_not_decide() -> None:
    """Every third round, the last of a setting, takes five times as long: a checkpoint is written, say."""
    tuner, rounds = Tuner(), itertools.count()
    while tuner.searching:
        used = tuner.choose(100)
        tuner.measured(100.0 * used.slots, 0.5 if next(rounds) % 3 == 2 else 0.1)
    assert tuner.setting.slots == 16
    assert tuner.rates[Setting(4, 1)] == 4000.0


def test_a_long_round_is_timed_once() -> None:
    tuner = Tuner(threads=1)
    tuner.measured(100.0, 60.0)
    assert tuner.setting == Setting(8, 1)


def test_a_search_can_begin_anew() -> None:
    tuner = search(lambda s: float(s.slots))
    assert tuner.setting.slots == 16
    tuner.restart()
    assert tuner.searching and tuner.setting == Setting(4, 1) and not tuner.rates
    while tuner.searching:
        tuner.measured(1.0 / tuner.choose(100).slots, 1.0)
    assert tuner.setting.slots == 4
    fixed = Tuner(slots=3, threads=3)
    fixed.restart()
    assert not fixed.searching and fixed.setting == Setting(3, 3)


def test_given_numbers_are_kept() -> None:
    assert search(lambda s: 1.0, slots=3).setting.slots == 3
    assert search(lambda s: s.slots, threads=1).setting == Setting(16, 1)
    assert not Tuner(slots=2, threads=2).searching


def test_no_more_slots_than_clients() -> None:
    assert Tuner(slots=10, threads=10).choose(3) == Setting(3, 3)
    assert search(lambda s: 1.0, clients=2).choose(2).slots == 2


def test_no_more_slots_than_the_turns_need() -> None:
    """Ten clients take two turns on eight slots and on five, one on ten and on twelve, three on four."""
    assert [Tuner(slots=slots, threads=1).choose(10).slots for slots in (4, 5, 8, 10, 12)] == [4, 5, 5, 10, 10]
    assert Tuner(slots=8, threads=8).choose(10) == Setting(5, 5)


@given(st.integers(1, 300), st.integers(1, 16))
def test_fewer_slots_never_cost_a_turn(clients: int, slots: int) -> None:
    used = Tuner(slots=slots, threads=1).choose(clients).slots
    assert 1 <= used <= min(slots, clients) and -(-clients // used) == -(-clients // min(slots, clients))


def test_the_search_goes_on_where_fewer_slots_are_used_than_allowed() -> None:
    """Ten clients: four slots, then five for eight, then ten for twelve, which bring nothing; sixteen are ten again."""
    tuner = search(lambda s: float(min(s.slots, 5)), clients=10, threads=1)
    assert tuner.rates == {Setting(4, 1): 4.0, Setting(8, 1): 5.0, Setting(12, 1): 5.0}
    assert tuner.used == Setting(10, 1) and tuner.choose(10) == Setting(5, 1)
    assert Setting(16, 1) not in search(lambda s: float(s.slots), clients=10, threads=1).rates
