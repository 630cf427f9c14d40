"""Minibatches that go through a network in one forward pass, each with BatchNorm statistics of its own.

Convolutions treat every sample by itself, and on a GPU one call for two minibatches takes less time than two calls.
BatchNorm would mix them: it has to be given their sizes. `core/step.py` sets them around a forward pass, and the
BatchNorm layers of networks that say so (an attribute `normalises_apart`) read them in `models/fused.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_sizes: ContextVar[tuple[int, ...] | None] = ContextVar("sizes", default=None)


@contextmanager
def normalised_apart(sizes: Sequence[int]) -> Iterator[None]:
    """Inside, the first sizes[0] samples of a forward pass are one minibatch, the next sizes[1] another, and so on."""
    token = _sizes.set(tuple(sizes))
    try:
        yield
    finally:
        _sizes.reset(token)


def minibatch_sizes(x: Tensor) -> tuple[int, ...]:
    """The sizes of the minibatches in an activation (n, ...). Raises ValueError where they do not add up to n."""
    sizes = _sizes.get()
    if sizes is None:
        return (len(x),)
    if sum(sizes) != len(x):
        raise ValueError(f"minibatches of {', '.join(map(str, sizes))} samples, but an activation of {len(x)}")
    return sizes
