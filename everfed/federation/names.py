"""Names of federations, runs and clients. They become folders, files and log lines, so only safe characters pass."""

from __future__ import annotations

import re

from everfed.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?")
# device names on Windows, with any suffix
_DEVICES = frozenset({"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))})


class NameRefused(UserError):
    """A name that could be a path, or contains characters that a terminal should not print."""


def is_name(name: object) -> bool:
    """1 to 64 letters, digits, dots, dashes and underscores of ASCII, beginning with a letter or a digit and not ending
    with a dot, without two dots in a row, and no device of any system."""
    return (
        isinstance(name, str)
        and _NAME.fullmatch(name) is not None
        and ".." not in name
        and name.split(".")[0].lower() not in _DEVICES
    )


def check_name(what: str, name: object) -> str:
    """Returns the name. what: whose name it is, for the message. Raises NameRefused."""
    if is_name(name):
        return str(name)
    shown = repr(name)[:80]
    raise NameRefused(
        f"{what}: {shown} is not a name; allowed are 1 to 64 letters, digits, '.', '-' and '_', beginning with a "
        "letter or a digit"
    )
