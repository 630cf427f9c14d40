"""Gaussian noise from a cryptographic generator, bound to what it hides.

The numbers are a function of a secret key and of a binding: the digest of everything that the release depends on. Equal
bindings give equal noise, so a step that is computed again releases the same numbers again; any other binding gives
noise that is independent for everyone without the key.

A keystream of AES-256 in counter mode is turned into normal numbers by Box and Muller's transform of uniform numbers of
53 bits, in float64. None is larger than sqrt(2 * 53 ln 2) = 8.57; a true normal number is with a probability of 1e-17.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.tree import Tree, leaves

_BLOCK = 1 << 15  # pairs of numbers that are made at a time: they stay in the processor's cache
_UNIT = 2.0**-53


def standard_normal(key: bytes, binding: bytes, count: int) -> np.ndarray:
    """(count,) float64."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    derived = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=b"everfed noise " + binding).derive(key)
    stream = Cipher(algorithms.AES(derived), modes.CTR(bytes(16))).encryptor()
    out = np.empty((2, -(-count // 2)))
    for start in range(0, out.shape[1], _BLOCK):
        width = min(_BLOCK, out.shape[1] - start)
        words = np.frombuffer(stream.update(bytes(16 * width)), dtype="<u8").reshape(2, width) >> np.uint64(11)
        radius = np.sqrt(-2.0 * np.log((words[0] + np.uint64(1)) * _UNIT))  # of numbers in (0, 1]
        angle = words[1] * (2.0 * math.pi * _UNIT)
        out[0, start : start + width] = radius * np.cos(angle)
        out[1, start : start + width] = radius * np.sin(angle)
    return out.reshape(-1)[:count]


def tree_digest(tree: Tree, *more: str) -> bytes:
    """A digest of all leaves with their paths, types and shapes, and of further texts; the order of keys is ignored."""
    found = hashlib.sha256()
    for text in more:
        _add(found, text.encode())
    for path, leaf in sorted(leaves(tree), key=lambda one: one[0]):
        _add(found, path.encode())
        if isinstance(leaf, Tensor):
            array = leaf.detach().cpu().contiguous()
            _add(found, f"{array.dtype} {tuple(array.shape)}".encode())
            if array.numel():
                found.update(array.reshape(-1).view(torch.uint8).numpy().data)
        else:
            _add(found, f"{type(leaf).__name__} {leaf!r}".encode())
    return found.digest()


def _add(found: Any, data: bytes) -> None:
    """With its length, so that no two sequences of texts give the same bytes."""
    found.update(len(data).to_bytes(8, "little") + data)
