"""Names that become folders, files and log lines: of federations, runs and clients. Nothing else may come in as one."""

from __future__ import annotations

import re

from everfed.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?")
# what Windows takes for devices, whatever follows the dot
_DEVICES = frozenset({"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))})


class NameRefused(UserError):
    """A name that could mean a place in a file system, or that no terminal should print."""


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
    """The name itself; `what` says in the message whose it is. Raises NameRefused."""
    if is_name(name):
        return str(name)
    shown = repr(name)[:80]
    raise NameRefused(
        f"{what}: {shown} is not a name; allowed are 1 to 64 letters, digits, '.', '-' and '_', beginning with a "
        "letter or a digit"
    )
