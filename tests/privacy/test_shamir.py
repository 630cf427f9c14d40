"""Shares of secrets: any threshold of them gives the secret, and a dealer that deals others is found."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everfed.privacy import shamir
from everfed.privacy.shamir import COMMITMENT, PRIME, SHARE, Dealing, deal, is_committed, is_sound

KEY, SEED, CONTEXT = bytes(range(32)), b"\xff" * 32, b"client 1 of a group"
SECRETS = st.binary(min_size=32, max_size=32)


def opened(dealing: Dealing, part: Any, places: list[int]) -> bytes:
    return shamir.combine({place: part(dealing.shares[place - 1]) for place in places})


@given(SECRETS, SECRETS, st.integers(2, 7), st.integers(0, 4), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_any_threshold_of_shares_gives_both_secrets(key: bytes, seed: bytes, t: int, more: int, random: Any) -> None:
    dealing = deal(key, seed, t, t + more, CONTEXT)
    places = random.sample(range(1, t + more + 1), t)
    assert opened(dealing, shamir.key_share, places) == key and opened(dealing, shamir.seed_share, places) == seed


def test_fewer_shares_do_not() -> None:
    dealing = deal(KEY, SEED, 3, 5, CONTEXT)
    with suppress(ValueError):
        assert opened(dealing, shamir.key_share, [1, 2]) != KEY


def test_the_polynomial_by_hand() -> None:
    """7 + 3x at 1, 2, 5; at zero the weights of places 1 and 2 are 2 and -1."""
    assert [shamir.value_at([7, 3], place) for place in (1, 2, 5)] == [10, 13, 22]
    assert shamir.weights((1, 2)) == (2, PRIME - 1)
    shares = {1: (10).to_bytes(SHARE, "big"), 2: (13).to_bytes(SHARE, "big")}
    assert int.from_bytes(shamir.combine(shares), "big") == 7


def test_the_field_is_of_a_prime_above_every_secret() -> None:
    """2^256 + 297: Fermat's test to ten bases, and no secret of 32 bytes wraps around."""
    assert PRIME == 2**256 + 297 and all(pow(base, PRIME - 1, PRIME) == 1 for base in range(2, 12))


@given(st.integers(1, 5), st.integers(0, 98), st.integers(1, 255))
@settings(max_examples=40, deadline=None)
def test_a_share_with_one_byte_changed_is_refused(place: int, byte: int, change: int) -> None:
    dealing = deal(KEY, SEED, 3, 5, CONTEXT)
    share = bytearray(dealing.shares[place - 1])
    assert is_sound(bytes(share), place, dealing.commitments, dealing.proof, 3, CONTEXT)
    share[byte] ^= change
    assert not is_sound(bytes(share), place, dealing.commitments, dealing.proof, 3, CONTEXT)


def test_shares_are_bound_to_place_dealer_and_threshold() -> None:
    one, other = deal(KEY, SEED, 3, 5, CONTEXT), deal(KEY, SEED, 3, 5, b"client 2")
    share = one.shares[0]
    assert not is_sound(share, 2, one.commitments, one.proof, 3, CONTEXT)
    assert not is_sound(share, 1, one.commitments, one.proof, 3, b"client 2")
    assert not is_sound(share, 1, other.commitments, other.proof, 3, b"client 2")
    assert not is_sound(share, 1, one.commitments, one.proof, 4, CONTEXT)
    assert not is_sound(share[:-1], 1, one.commitments, one.proof, 3, CONTEXT)
    assert not is_sound(share, 1, b"", one.proof, 3, CONTEXT)


def test_seeds_that_lie_on_no_polynomial_are_found_by_those_who_hold_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dealer that evaluates a polynomial of too high a degree, and commits to it, cannot make the proof fit."""
    honest = shamir._polynomial
    monkeypatch.setattr(shamir, "_polynomial", lambda secret, threshold: honest(secret, threshold + 1))
    dealing = deal(KEY, SEED, 3, 5, CONTEXT)
    assert len(dealing.proof) == 4 * SHARE  # too long, which is refused; cut, it fits no place
    cut = dealing.proof[: 3 * SHARE]
    assert not any(is_sound(dealing.shares[i], i + 1, dealing.commitments, cut, 3, CONTEXT) for i in range(5))


def test_what_was_committed_to_can_be_checked_one_secret_at_a_time() -> None:
    dealing = deal(KEY, SEED, 3, 5, CONTEXT)
    assert len(dealing.commitments) == 5 * COMMITMENT
    for place, share in enumerate(dealing.shares, start=1):
        key, seed = shamir.key_share(share), shamir.seed_share(share)
        assert is_committed(key, place, dealing.commitments, CONTEXT)
        assert is_committed(seed, place, dealing.commitments, CONTEXT)
        assert not is_committed(key, place % 5 + 1, dealing.commitments, CONTEXT)
        assert not is_committed(seed[:SHARE], place, dealing.commitments, CONTEXT)
        assert not is_committed(b"", place, dealing.commitments, CONTEXT)


@pytest.mark.parametrize(
    "shares",
    [
        {},
        {0: bytes(SHARE), 1: bytes(SHARE)},  # the place of the secret itself
        {1: b"", 2: b""},
        {1: b"\1" + bytes(SHARE - 1), 2: b"\1" + bytes(SHARE - 1)},  # 2^256 is no secret of 32 bytes
    ],
)
def test_what_are_no_shares_of_one_secret_is_refused(shares: dict[int, bytes]) -> None:
    with pytest.raises(ValueError, match=r"."):
        shamir.combine(shares)


@pytest.mark.parametrize("places", [(1, 1), (3, 5, 3), (0, 1), (2, 0), ()])
def test_one_place_twice_or_the_place_of_the_secret_has_no_weights(places: tuple[int, ...]) -> None:
    """Two shares of one place would count as two clients'."""
    with pytest.raises(ValueError, match="places above zero, each once"):
        shamir.weights(places)
