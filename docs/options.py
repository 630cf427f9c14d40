"""The tables of options in the documents, made from where the options are declared.

    python docs/options.py            writes the tables
    python docs/options.py --check    says which pages are out of date

A page holds one between `<!-- options: fedgp memory.size -->` and `<!-- end -->`: of whole parts, or of single options.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from everfed.core.option import declared_options
from everfed.methods import registry

PAGES = Path(__file__).parent
_PLACE = re.compile(r"(<!-- options: ([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def tables(text: str) -> str:
    """A page with all its tables as the code has them."""
    return _PLACE.sub(lambda found: f"{found[1]}{_table(found[2].split())}{found[3]}", text)


def _table(names: list[str]) -> str:
    rows = [row for name in names for row in _rows(name, several=len(names) > 1)]
    head = "| option | default | allowed | meaning |\n|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _rows(name: str, several: bool) -> Iterator[tuple[str, ...]]:
    part, _, only = name.partition(".")
    kind = registry.part_class(part)
    defaults = {field.name: _default(field) for field in fields(kind)}
    for option, declared in declared_options(kind):
        if only in ("", option):
            shown = f"`{part}.{option}`" if several else f"`{option}`"
            yield shown, f"`{defaults[option]}`", declared.allowed, declared.about.replace("|", "\\|")


def _default(field: Any) -> str:
    value = field.default if field.default is not MISSING else field.default_factory()
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def main() -> int:
    stale = []
    for page in sorted(PAGES.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if tables(text) != text:
            stale.append(page)
            if "--check" not in sys.argv:
                page.write_text(tables(text), encoding="utf-8")
    for page in stale:
        print(page.relative_to(PAGES))
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
