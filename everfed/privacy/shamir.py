"""Reconstruction of Shamir's secret: the value at zero of the polynomial through given points, in GF(2^128).

For the server, which may know the result; it is not protected against timing attacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

_MODULUS = (1 << 128) | 0b10000111  # x^128 + x^7 + x^2 + x + 1


@lru_cache(maxsize=8)
def weights(places: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's weights at zero of the places where the polynomial is known. Raises ValueError where one is zero or
    comes twice."""
    if 0 in places or len(set(places)) != len(places):
        raise ValueError("two shares of one place, or one of none")
    found = []
    for here in places:
        above, below = 1, 1
        for other in places:
            if other != here:
                above, below = times(above, other), times(below, other ^ here)
        found.append(times(above, _inverse(below)))
    return tuple(found)


def at_zero(known: Sequence[int], values: Sequence[bytes]) -> bytes:
    """The polynomial's value at zero from its values of 16 bytes, with the weights of their places."""
    total = 0
    for weight, value in zip(known, values, strict=True):
        total ^= times(weight, int.from_bytes(value, "big"))
    return total.to_bytes(16, "big")


def times(a: int, b: int) -> int:
    """The product of two elements of the field."""
    if a < b:
        a, b = b, a
    product = 0
    while b:
        if b & 1:
            product ^= a
        a, b = a << 1, b >> 1
    for bit in range(product.bit_length() - 1, 127, -1):
        if product >> bit & 1:
            product ^= _MODULUS << (bit - 128)
    return product


def _inverse(a: int) -> int:
    """a^(2^128 - 2)."""
    result, power = 1, a
    for _ in range(127):
        power = times(power, power)
        result = times(result, power)
    return result
