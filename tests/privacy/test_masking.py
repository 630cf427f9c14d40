"""The cryptography that secure aggregation stands on."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest

from everfed.privacy import masking


def test_two_parties_agree_and_a_third_does_not() -> None:
    a, b, c = (masking.new_private() for _ in range(3))
    shared = masking.agree(a, masking.public_of(b), b"x")
    assert shared == masking.agree(b, masking.public_of(a), b"x") != masking.agree(c, masking.public_of(b), b"x")
    assert shared != masking.agree(a, masking.public_of(b), b"y")
    assert len(masking.public_of(a)) == masking.PUBLIC and len(shared) == 32


@pytest.mark.parametrize("key", [b"", b"\2" + b"\xff" * 32, bytes(33), b"\4" + bytes(64), b"\5" + b"\1" * 32])
def test_what_is_no_point_on_the_curve_is_refused(key: bytes) -> None:
    assert not masking.is_public(key)
    with pytest.raises(ValueError):
        masking.agree(masking.new_private(), key, b"x")


def test_a_private_key_fits_its_public_key_alone() -> None:
    a, b = masking.new_private(), masking.new_private()
    assert masking.fits(a, masking.public_of(a))
    order = masking._ORDER.to_bytes(32, "big")
    assert not any(masking.fits(key, masking.public_of(b)) for key in (a, b"", bytes(32), order, b"\xff" * 32))


def test_letters_open_with_their_key_for_their_occasion_only() -> None:
    a, b, c = (masking.new_private() for _ in range(3))
    key = masking.agree(a, masking.public_of(b), b"x")
    letter = masking.encrypt(key, b"shares", b"from 1 to 2")
    assert masking.decrypt(masking.agree(b, masking.public_of(a), b"x"), letter, b"from 1 to 2") == b"shares"
    assert len(letter) == masking.NONCE + len(b"shares") + masking.TAG
    for wrong in (letter[:-1] + bytes([letter[-1] ^ 1]), letter[:-4], b""):
        with pytest.raises(ValueError):
            masking.decrypt(key, wrong, b"from 1 to 2")
    with pytest.raises(ValueError):
        masking.decrypt(key, letter, b"from 1 to 3")
    with pytest.raises(ValueError):
        masking.decrypt(masking.agree(c, masking.public_of(a), b"x"), letter, b"from 1 to 2")


def test_votes_are_hmac_sha256() -> None:
    """Test case 2 of RFC 4231."""
    expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    made = masking.mac(b"Jefe", b"what do ya want for nothing?")
    assert made.hex() == expected and masking.is_mac(made, b"Jefe", b"what do ya want for nothing?")
    assert not masking.is_mac(made, b"Jefe", b"what do ya want for something?") and not masking.is_mac(
        b"", b"Jefe", b""
    )


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


def test_without_the_package_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def blocked(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("cryptography"):
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
