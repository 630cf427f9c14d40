"""Data sets, how they are divided among clients, and the transforms that run on the device."""

from everfed.data.source import Source, make_source
from everfed.data.sources import load
from everfed.errors import DataError, PartitionError

__all__ = ["DataError", "PartitionError", "Source", "load", "make_source"]
