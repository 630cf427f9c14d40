"""Random draws of a stream, from its own seed and a purpose."""

from __future__ import annotations

import hashlib

import numpy as np


def generator(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """The generator for one purpose of one stream, the same on every machine and in every order of calls."""
    word = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little")
    # SeedSequence ignores trailing zeros: without the number of keys, key 0 would be the same as no key
    return np.random.default_rng(np.random.SeedSequence([seed, word, len(keys), *keys]))


def cohort_size(clients: int, ratio: float) -> int:
    """How many clients take part in a round."""
    return max(1, round(ratio * clients))
