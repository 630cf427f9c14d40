"""Random numbers keyed by what they are for, never by when they are drawn.

Each draw comes from a generator named by (seed, round, phase, client, tag), so the order in which clients run, the
engine that runs them and the other parts of a method cannot change it.
"""

from __future__ import annotations

import hashlib

import numpy as np

Key = int | str | None


def key(*parts: Key) -> int:
    """A stable 63-bit integer for a tuple of names and numbers, the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*parts: Key) -> np.random.Generator:
    """A numpy generator for `parts`."""
    return np.random.Generator(np.random.Philox(key=key(*parts)))
