"""Errors that a user can cause. They reach the user as one message, without a traceback, and with exit code 2."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right; the message names the file, the key and what is allowed."""


class RecipeError(UserError):
    """A recipe that cannot be read, or says something that is not allowed."""


# Errors of layers that stand on their own, by full name, so that telling them apart imports nothing heavy.
_OTHERS = frozenset(
    {
        "everfed.core.part.CompositionError",
        "everfed.data.errors.DataError",
        "everfed.data.errors.PartitionError",
        "everfed.models.ModelError",
        "everfed.naming.NameProblem",
        "everfed.streams.options.OptionError",
    }
)


def is_users(error: BaseException) -> bool:
    """Can the user put this right, so that its message is all that should be shown?"""
    kinds = type(error).__mro__
    return isinstance(error, UserError) or any(f"{kind.__module__}.{kind.__qualname__}" in _OTHERS for kind in kinds)
