"""Errors of data; the message names the set, the path and the remedy."""

from __future__ import annotations

from everfed.errors import SettingError


class DataError(SettingError):
    """A data set that is missing, unreadable or malformed."""


class PartitionError(SettingError):
    """A partition that cannot be drawn; the message names the option and values that work."""
