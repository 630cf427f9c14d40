"""The cryptography that secure aggregation stands on."""

from __future__ import annotations

import builtins
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everfed.privacy import masking


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
