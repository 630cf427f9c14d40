"""The tables of options in the documents, made from where the options are declared.

    python docs/options.py            writes the tables
    python docs/options.py --check    says which pages are out of date

A page holds one between `<!-- options: fedgp memory.size -->` and `<!-- end -->`: of whole parts, or of single options.
The owner may also be a policy of the memory, `policy/herding`, `gradients`, the table of that name, or a table of the
recipe, `table/train/optimizer`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from everfed.core.option import TABLES, declared_options
from everfed.methods import registry
from everfed.methods.replay.memory import policy_class
from everfed.methods.replay.sample_gradients import GradientOptions

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
    owner, _, only = name.partition(".")
    kind = owner_class(owner)
    defaults = {field.name: _default(field) for field in fields(kind)}
    for option, declared in declared_options(kind):
        if only in ("", option) and (declared.about or kind not in TABLES.values()):
            known = owner.removeprefix("policy/").removeprefix("table/").replace("/", ".")
            shown = f"`{known}.{option}`" if several else f"`{option}`"
            yield shown, f"`{defaults[option]}`", declared.allowed, _cell(declared.about)


def _cell(text: str) -> str:
    """Text as Markdown takes it in a cell; braces, which the extension attr_list reads as attributes, as code."""
    return re.sub(r"(\{[^}]*\})", r"`\1`", text.replace("|", "\\|"))


def owner_class(name: str) -> type:
    """The dataclass that declares the options of a part, of a memory's policy or gradients, or of a recipe's table."""
    if name.startswith("table/"):
        return TABLES[name.removeprefix("table/").replace("/", ".")]
    if name == "gradients":
        return GradientOptions
    return policy_class(name.removeprefix("policy/")) if name.startswith("policy/") else registry.part_class(name)


def _default(field: Any) -> str:
    return written(field.default if field.default_factory is MISSING else field.default_factory())


def written(value: Any) -> str:
    """A default as a recipe has it; `unset` for one that is chosen later."""
    if is_dataclass(value) and not isinstance(value, type):
        return f"{{ {', '.join(f'{name} = {written(entry)}' for name, entry in asdict(value).items())} }}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(written, value))}]"
    if value is MISSING:
        return "needed"
    if value is None or isinstance(value, bool):
        return "unset" if value is None else str(value).lower()
    if isinstance(value, float) and len(str(value)) > 8:
        return f"{value:.4g}"
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
