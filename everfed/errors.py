"""Errors that need no traceback: those that a user can correct, and faults of a run that their message explains."""

from __future__ import annotations

import errno
import importlib
import os
from typing import Any

USERS, FAULT = 2, 1  # exit codes


class UserError(Exception):
    """An error that the user can correct; the message names the file, the key and the allowed values."""


class RecipeError(UserError):
    """A recipe that cannot be read, or has an unknown key or a value that is not allowed."""


class SettingError(UserError, ValueError):
    """A value of a recipe that is refused where it is used: data, streams, models, parts. `recipe.placed` adds the file
    and the line."""


class DataError(SettingError):
    """A data set that is missing, unreadable or malformed; the message names the set, the path and the remedy."""


class PartitionError(SettingError):
    """A partition that cannot be drawn; the message names the option and values that work."""


class CompositionError(SettingError):
    """Parts that do not fit together, or not on this stream."""


class Fault(RuntimeError):
    """A fault of a run that its message explains, and no bug: a loss that is not finite, too few clients."""


class ClientError(RuntimeError):
    """A call on a client failed; says which client, in which phase, and why. The error itself is its `__cause__`."""

    def __init__(self, client: int, phase: str, round_index: int, cause: BaseException | str) -> None:
        why = cause if isinstance(cause, str) or exit_code(cause) is not None else described(cause)
        super().__init__(f"client {client} failed in phase {phase!r} of round {round_index + 1}: {why}")
        self.client, self.phase, self.round, self.cause = client, phase, round_index, cause


def optional_package(name: str, extra: str, user: str, error: type[UserError] = UserError) -> Any:
    """The package or module `name`. Raises `error` where it is missing, with how to install what `user` needs."""
    package = name.partition(".")[0]
    try:
        importlib.import_module(package)
        return importlib.import_module(name)
    except ImportError as missing:
        raise error(f"{user} needs the package {package}; install it with: pip install 'everfed[{extra}]'") from missing


# Errors of the file system about a path that the user chose; any other OSError is a bug.
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


def is_user_error(error: BaseException) -> bool:
    """Can the user correct this, so that only its message is shown?"""
    if isinstance(error, ClientError) and error.__cause__ is not None:
        return is_user_error(error.__cause__)
    return isinstance(error, UserError)


def exit_code(error: BaseException) -> int | None:
    """The exit code of a command that ends with this error; None for a bug, whose traceback is shown."""
    if is_user_error(error) or _is_place(error):
        return USERS
    return FAULT if isinstance(error, Fault) else None


def sentence(error: BaseException) -> str:
    """The message to show for an error that has an exit code."""
    if isinstance(error, OSError) and _is_place(error):
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _is_place(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _PLACES and error.filename is not None


def described(error: BaseException) -> str:
    """The class, the message and the place of a bug: `KeyError: 'x' (my_part.py, line 9, in loss)`."""
    place = place_of(error)
    return f"{type(error).__name__}: {error}{f' ({place})' if place else ''}"


def place_of(error: BaseException) -> str:
    """File, line and function where an error was raised: in a user's code where some is involved, else in everfed's,
    else in an installed package. Empty for an error that was not raised."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)[::-1]
    known = [frame for frame in frames if not frame.filename.startswith((*_installed(), "<"))]
    own = [frame for frame in known if not frame.filename.startswith(OURS)]
    for frame in (*own, *known, *frames):
        part = _part(error) if own else ""
        return f"{part}{frame.filename}, line {frame.lineno}, in {frame.name}"
    return ""


OURS = os.path.dirname(__file__)


def _installed() -> tuple[str, ...]:
    import sysconfig

    return tuple(sysconfig.get_paths()[key] for key in ("purelib", "platlib", "stdlib"))


def _part(error: BaseException) -> str:
    """Whose method raised: `part 'clip', `, where it was a part's."""
    import traceback

    named = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner: Any = frame.f_locals.get("self")
        bases = {f"{base.__module__}.{base.__name__}" for base in type(owner).__mro__}
        if "everfed.core.part.Part" in bases:
            named = f"part {owner.name!r}, "
    return named


def in_own_code(error: BaseException) -> str:
    """The user's lines of a bug in the user's code, and the message below them; empty for other bugs."""
    import traceback

    cause = error.__cause__ if isinstance(error, ClientError) and error.__cause__ is not None else error
    frames = traceback.extract_tb(cause.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_installed(), "<", OURS))]
    if isinstance(error, ClientError) and not own:  # of another process only the message came
        return f"error: {error}" if ".py, line " in str(error) and OURS not in str(error) else ""
    if not own:
        return ""
    message = str(error) if isinstance(error, ClientError) else described(error)
    return "\n".join([*(line.rstrip() for line in traceback.format_list(own)), f"error: {message}"])


Note = dict[str, Any]  # JSON-ready


def note_of(error: BaseException) -> Note | None:
    """An error that needs no traceback in a form that another process can raise; None for a bug."""
    if exit_code(error) is None:
        return None
    if _is_place(error):  # errno and filename are not in vars(error)
        error = UserError(sentence(error))
    facts = {key: value for key, value in vars(error).items() if isinstance(value, (str, int, float, bool))}
    return {"module": type(error).__module__, "kind": type(error).__qualname__, "message": str(error), "facts": facts}


def from_note(note: Note) -> Exception:
    """The error of a note: its class, its message, its plain attributes. An unknown class becomes UserError. Only for
    notes of our own worker processes: a note names the module that is imported."""
    try:
        kind: Any = importlib.import_module(note["module"])
        for name in note["kind"].split("."):
            kind = getattr(kind, name)
    except (ImportError, AttributeError):
        kind = UserError
    error: Exception = kind.__new__(kind, note["message"])  # its __init__ may have other arguments
    vars(error).update(note["facts"])
    return error
