"""Markdown pages that are written by hand, but for the parts between two marks, which are generated.

<!-- records: fedgp/table1 -->
...
<!-- records: end -->
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from everfed.errors import UserError


def read_page(path: Path) -> str:
    """The text of a page that `--page` names. Raises UserError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--page {path} cannot be read: {error.strerror or error}") from error


def names(text: str, kind: str) -> list[str]:
    """The names of a page's parts of one kind, in their order."""
    return [found[2] for found in _marked(kind).finditer(text)]


def renewed(text: str, kind: str, content: Callable[[str], str]) -> str:
    """The page with every part of one kind written anew. content: of the name of a part."""
    return _marked(kind).sub(lambda found: f"{found[1]}{content(found[2])}\n{found[4]}", text)


def _marked(kind: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {kind}: (?!end)(\S+) -->\n)(.*?)(<!-- {kind}: end -->)", re.DOTALL)
