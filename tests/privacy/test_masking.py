"""The cryptography that secure aggregation stands on."""

from __future__ import annotations

import builtins
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everfed.privacy import masking, shamir


def test_two_parties_agree_and_a_third_does_not() -> None:
    a, b, c = (masking.new_private() for _ in range(3))
    shared = masking.agree(a, masking.public_of(b))
    assert shared == masking.agree(b, masking.public_of(a)) != masking.agree(c, masking.public_of(b))
    assert len(masking.public_of(a)) == masking.PUBLIC


def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(ValueError):
        masking.agree(masking.new_private(), b"\2" + b"\xff" * 32)


def test_letters_open_with_their_key_only() -> None:
    a, b, c = (masking.new_private() for _ in range(3))
    letter = masking.encrypt(masking.agree(a, masking.public_of(b)), b"shares")
    assert masking.decrypt(masking.agree(b, masking.public_of(a)), letter) == b"shares"
    for wrong in (letter[:-1] + b"A", letter[:-4], b""):
        with pytest.raises(ValueError):
            masking.decrypt(masking.agree(b, masking.public_of(a)), wrong)
    with pytest.raises(ValueError):
        masking.decrypt(masking.agree(c, masking.public_of(a)), letter)


@given(st.binary(min_size=32, max_size=32), st.integers(2, 6), st.data())
@settings(max_examples=20, deadline=None)
def test_any_threshold_of_shares_gives_the_secret_back(secret: bytes, count: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(2, count))
    shares = masking.split(secret, threshold, count)
    chosen = data.draw(st.permutations(shares))[:threshold]
    assert masking.combine(chosen) == secret


def test_fewer_shares_do_not() -> None:
    secret = bytes(range(32))
    shares = masking.split(secret, 3, 5)
    with suppress(ValueError):  # mostly what comes out is not even padded
        assert masking.combine(shares[:2]) != secret


def test_masks_depend_on_secret_and_purpose_and_nothing_else() -> None:
    mask = masking.mask(b"s" * 32, 1000, np.uint32, b"narrow")
    assert np.array_equal(mask, masking.mask(b"s" * 32, 1000, np.uint32, b"narrow"))
    assert not np.array_equal(mask, masking.mask(b"s" * 32, 1000, np.uint32, b"wide"))
    assert not np.array_equal(mask, masking.mask(b"t" * 32, 1000, np.uint32, b"narrow"))


def test_masks_are_uniform_over_the_whole_ring() -> None:
    mask = masking.mask(b"s" * 32, 1 << 16, np.uint32, b"x")
    counts = np.bincount(mask >> 24, minlength=256)
    chi_squared = float(((counts - 256.0) ** 2 / 256.0).sum())
    assert 130 < chi_squared < 400  # 255 degrees of freedom; the tails beyond are below 1e-8
    ones = np.unpackbits(mask.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 5 * 0.5 / (1 << 10)  # five standard deviations of 2^21 fair bits, rounded up


def test_without_flower_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def blocked(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("flwr"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(masking.MissingPackage, match=r"everfed\[flower\]"):
        masking.check_installed()


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize("length", [0, 1, masking._BLOCK, masking._BLOCK + 1, 3 * masking._BLOCK - 1])
def test_masking_in_blocks_adds_the_whole_keystream(length: int, dtype: type[np.unsignedinteger]) -> None:
    """AES-256 in counter mode from a counter of zero, under HKDF(secret, info = "everfed mask " + purpose)."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    key = HKDF(hashes.SHA256(), 32, None, b"everfed mask narrow").derive(b"s" * 32)
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(length * dtype().itemsize))
    whole = np.frombuffer(stream, dtype=dtype)
    vector = np.arange(length, dtype=dtype)
    masking.add_mask(vector, b"s" * 32, b"narrow")
    assert np.array_equal(vector, np.arange(length, dtype=dtype) + whole)
    masking.add_mask(vector, b"s" * 32, b"narrow", minus=True)
    assert np.array_equal(vector, np.arange(length, dtype=dtype))


@given(st.binary(min_size=1, max_size=40), st.integers(2, 6), st.integers(0, 4), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=25)
def test_secrets_are_reconstructed_as_flower_does(secret: bytes, threshold: int, more: int, random: Any) -> None:
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares

    shares = masking.split(secret, threshold, threshold + more)
    some = random.sample(shares, threshold)
    assert masking.combine(some) == combine_shares(some) == secret


@pytest.mark.parametrize(
    "shares",
    [
        [],
        [b"", b""],
        [b"\1\0\0\0" + bytes(16), b"\1\0\0\0" + bytes(16)],  # one place twice
        [b"\0\0\0\0" + bytes(16), b"\1\0\0\0" + bytes(16)],  # the place of the secret itself
        [b"\1\0\0\0" + bytes(16), b"\2\0\0\0" + bytes(32)],
        [b"\1\0\0\0" + bytes(15), b"\2\0\0\0" + bytes(15)],
        [b"\1\0\0\0" + bytes(16), b"\2\0\0\0" + bytes(16)],  # a secret without its padding
    ],
)
def test_what_are_no_shares_of_one_secret_is_refused(shares: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"."):
        masking.combine(shares)


@pytest.mark.parametrize("places", [(1, 1), (3, 5, 3), (0, 1), (2, 0)])
def test_one_place_twice_or_the_place_of_the_secret_has_no_weights(places: tuple[int, ...]) -> None:
    """Two shares of one place would count as two clients'."""
    with pytest.raises(ValueError, match="two shares of one place, or one of none"):
        shamir.weights(places)


def test_the_field_is_that_of_gcm_s_polynomial() -> None:
    """x^127 times x is x^7 + x^2 + x + 1, by x^128 + x^7 + x^2 + x + 1 = 0; and products of small ones do not carry."""
    assert shamir.times(1 << 127, 2) == 0b10000111 and shamir.times(0b11, 0b11) == 0b101
    assert shamir.weights((1, 2)) == (shamir.times(2, shamir._inverse(3)), shamir._inverse(3))
