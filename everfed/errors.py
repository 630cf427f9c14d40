"""Errors that need no traceback: what a user can put right, and faults of a run that its message explains."""

from __future__ import annotations

import errno
import importlib
from typing import Any

USERS, FAULT = 2, 1  # exit codes


class UserError(Exception):
    """Something the user can put right; the message names the file, the key and what is allowed."""


class RecipeError(UserError):
    """A recipe that cannot be read, or says something that is not allowed."""


class CompositionError(UserError, ValueError):
    """Parts that do not fit together, or not on this stream."""


# Errors of layers that stand on their own, by full name, so that telling them apart imports nothing heavy.
_USERS = frozenset(
    {
        "everfed.data.errors.DataError",
        "everfed.data.errors.PartitionError",
        "everfed.models.ModelError",
        "everfed.naming.NameProblem",
        "everfed.streams.options.OptionError",
    }
)
_OF_CLIENTS = frozenset({"everfed.core.engine.ClientError"})  # says where; what went wrong is its cause
_FAULTS = frozenset(
    {
        "everfed.core.events.Diverged",
        "everfed.parts.aggregate.robust.TooFewReplies",
        "everfed.privacy.differential.BudgetSpent",
        "everfed.privacy.secure_engine.TooFewClients",
    }
)


# What the file system says about a path that a user chose; anything else it says is a bug of ours.
_PLACES = frozenset(
    {
        errno.EACCES,
        errno.EDQUOT,
        errno.EEXIST,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)


def is_users(error: BaseException) -> bool:
    """Can the user put this right, so that its message is all that should be shown?"""
    if _names(error) & _OF_CLIENTS and error.__cause__ is not None:
        return is_users(error.__cause__)
    return isinstance(error, UserError) or bool(_names(error) & _USERS)


def exit_code(error: BaseException) -> int | None:
    """The exit code of a command that an error ends; None for a bug, which deserves its traceback."""
    if is_users(error) or _is_place(error):
        return USERS
    return FAULT if _names(error) & _FAULTS else None


def sentence(error: BaseException) -> str:
    """What is shown of an error that has an exit code."""
    if isinstance(error, OSError) and _is_place(error):
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _is_place(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _PLACES and error.filename is not None


Note = dict[str, Any]  # JSON-ready


def note_of(error: BaseException) -> Note | None:
    """An error that needs no traceback, to be passed on to another process and raised there; None for a bug."""
    if exit_code(error) is None:
        return None
    if _is_place(error):  # its number and its path are no attributes of its own
        error = UserError(sentence(error))
    facts = {key: value for key, value in vars(error).items() if isinstance(value, (str, int, float, bool))}
    return {"module": type(error).__module__, "kind": type(error).__qualname__, "message": str(error), "facts": facts}


def from_note(note: Note) -> Exception:
    """The same error: its kind, its message, its plain attributes. A kind that this process cannot find is a UserError.
    For notes of our own forked workers only: a note says which module is imported."""
    try:
        kind: Any = importlib.import_module(note["module"])
        for name in note["kind"].split("."):
            kind = getattr(kind, name)
    except (ImportError, AttributeError):
        kind = UserError
    error: Exception = kind.__new__(kind, note["message"])  # its __init__ may want what made the message
    vars(error).update(note["facts"])
    return error


def _names(error: BaseException) -> set[str]:
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
