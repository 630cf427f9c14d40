"""Shamir's secret sharing (1979) in a prime field, with shares that their receivers can check.

A secret is the value at zero of a random polynomial of degree `threshold` - 1; the share of place i is its value at i.
A dealer publishes a digest of every share, and for the seed a proof that all its shares lie on one such polynomial: a
second random polynomial is shared along with it, and blind + challenge x seed is published, the challenge being a
digest of all commitments (the hash-based proof of Atapoor, Baghery, Cozzo and Pedersen, 2023, "VSS from Distributed
ZK Proofs"). A receiver compares that polynomial at its own place with its own shares. So a dealer whose shares do not
fit together is found before anything depends on them. A key's shares need no proof: the key must fit its public key.

Python's integers are not protected against timing attacks; every secret here is drawn anew for each phase.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

PRIME = 2**256 + 297  # the smallest prime above all secrets of 32 bytes
SECRET = 32  # bytes
SHARE = 33
DIGEST = 32
DEALT = 3 * SHARE  # key, seed, blind
COMMITMENT = 2 * DIGEST  # of the key's share, and of the seed's and the blind's


@dataclass(frozen=True)
class Dealing:
    """What a dealer makes of its two secrets. shares: by place, from 1 on; commitments and proof: for all to see."""

    shares: list[bytes]
    commitments: bytes
    proof: bytes


def deal(key: bytes, seed: bytes, threshold: int, count: int, context: bytes) -> Dealing:
    """Shares of a key and of a seed: any `threshold` give the secret, fewer give nothing. context: what the commitments
    are bound to."""
    of_key, of_seed = (_polynomial(int.from_bytes(secret, "big"), threshold) for secret in (key, seed))
    blind = _polynomial(secrets.randbelow(PRIME), threshold)
    places = range(1, count + 1)
    shares = [b"".join(_bytes(value_at(one, place)) for one in (of_key, of_seed, blind)) for place in places]
    commitments = b"".join(_committed(share, place, context) for place, share in zip(places, shares, strict=True))
    challenge = _challenge(commitments, context)
    proof = [(b + challenge * s) % PRIME for b, s in zip(blind, of_seed, strict=True)]
    return Dealing(shares, commitments, b"".join(map(_bytes, proof)))


def is_sound(share: bytes, place: int, commitments: bytes, proof: bytes, threshold: int, context: bytes) -> bool:
    """Is this what the dealer committed to for `place`, and does the seed's share lie on the dealer's polynomial?"""
    if len(share) != DEALT or len(proof) != threshold * SHARE or len(commitments) < place * COMMITMENT:
        return False
    own = commitments[(place - 1) * COMMITMENT : place * COMMITMENT]
    seed, blind = _number(share[SHARE : 2 * SHARE]), _number(share[2 * SHARE :])
    wanted = value_at([_number(proof[i : i + SHARE]) for i in range(0, len(proof), SHARE)], place)
    fits = (blind + _challenge(commitments, context) * seed) % PRIME == wanted
    return fits and _committed(share, place, context) == own


def key_share(share: bytes) -> bytes:
    """What a receiver gives away to open the dealer's key."""
    return share[:SHARE]


def seed_share(share: bytes) -> bytes:
    """What a receiver gives away to open the dealer's seed: the blind belongs to the commitment."""
    return share[SHARE:]


def is_committed(part: bytes, place: int, commitments: bytes, context: bytes) -> bool:
    """Is `part` (of `key_share` or `seed_share`) what the dealer committed to for `place`?"""
    at = (place - 1) * COMMITMENT + (0 if len(part) == SHARE else DIGEST)
    return len(part) in (SHARE, 2 * SHARE) and _digest(part, place, context) == commitments[at : at + DIGEST]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret of {place: share}, as many as the threshold. Raises ValueError where they give no secret."""
    places = tuple(sorted(shares))
    if any(len(share) < SHARE for share in shares.values()):
        raise ValueError("a share is too short")
    numbers = [_number(shares[place][:SHARE]) for place in places]
    found = sum(w * n for w, n in zip(weights(places), numbers, strict=True)) % PRIME
    if found >> 8 * SECRET:
        raise ValueError("these are not shares of one secret")
    return found.to_bytes(SECRET, "big")


@lru_cache(maxsize=8)
def weights(places: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's weights at zero. Raises ValueError where a place is zero or comes twice."""
    if not places or 0 in places or len(set(places)) != len(places):
        raise ValueError("shares come from places above zero, each once")
    found = []
    for here in places:
        above, below = 1, 1
        for other in places:
            if other != here:
                above, below = above * other % PRIME, below * (other - here) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(found)


def value_at(coefficients: Sequence[int], place: int) -> int:
    """The polynomial's value, the constant coefficient first."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % PRIME
    return value


def _polynomial(secret: int, threshold: int) -> list[int]:
    return [secret, *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]


def _bytes(number: int) -> bytes:
    return number.to_bytes(SHARE, "big")


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big") % PRIME


def _committed(share: bytes, place: int, context: bytes) -> bytes:
    return _digest(key_share(share), place, context) + _digest(seed_share(share), place, context)


def _digest(part: bytes, place: int, context: bytes) -> bytes:
    return hashlib.sha256(b"everfed share " + place.to_bytes(8, "big") + context + part).digest()


def _challenge(commitments: bytes, context: bytes) -> int:
    return int.from_bytes(hashlib.sha256(b"everfed proof " + context + commitments).digest(), "big")
