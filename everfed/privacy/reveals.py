"""What each shipped method reveals to the server, as a table for the documentation, from the methods themselves.

python -m everfed.privacy.reveals docs/privacy.md      # renews the table in that page
"""

from __future__ import annotations

import sys
from pathlib import Path

from everfed.core.method import Method
from everfed.methods import registry as methods
from everfed.store.marked import renewed


def table() -> str:
    """Markdown, one row for all presets that reveal the same; without `fedgp+...`, which reveals what both parts do."""
    alike: dict[str, list[str]] = {}
    for name in methods.names():
        if not name.startswith("fedgp+"):
            alike.setdefault(_columns(methods.build(name)), []).append(f"`{name}`")
    head = ["| method | the server learns sums of | and of every client | secure aggregation |", "|---|---|---|---|"]
    return "\n".join([*head, *(f"| {', '.join(names)} {columns}" for columns, names in alike.items())])


def _columns(method: Method) -> str:
    found: dict[bool, list[str]] = {True: [], False: []}
    for phase in method.scheduled_phases():
        for part, keys in method.reducers(phase).items():
            for key, reducer in keys.items():
                found[reducer.secure].append(f"`{part}/{key}`{'' if phase.name == 'train' else f' ({phase.name})'}")
    sums, single = (", ".join(found[secure]) or "nothing" for secure in (True, False))
    return f"| {sums} | {single} | {'no' if method.reveals() else 'yes'} |"


def renew(page: Path) -> None:
    """Put the current table between the page's marks, `methods`."""
    page.write_text(renewed(page.read_text(), "methods", lambda name: table()))


if __name__ == "__main__":
    renew(Path(sys.argv[1]))
