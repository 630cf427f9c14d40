"""What goes wrong with data, said in one sentence that names the set, the place and the remedy."""

from __future__ import annotations


class DataError(ValueError):
    """A data set that is missing, unreadable or not what its place promises."""


class PartitionError(ValueError):
    """A partition that cannot be drawn as asked: the message names the option and what would work."""
