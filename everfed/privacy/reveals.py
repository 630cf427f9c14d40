"""What each shipped method shows the server, as a table for the documentation, from the methods themselves.

python -m everfed.privacy.reveals docs/privacy.md      # renews the table in that page
"""

from __future__ import annotations

import sys
from pathlib import Path

from everfed import methods
from everfed.core.method import Method
from everfed.core.phase import Position

BEGIN, END = "<!-- methods: begin -->", "<!-- methods: end -->"


def table() -> str:
    """Markdown, a row for all presets that show the same; `fedgp+...` shows FedGP's and the other's; left out."""
    alike: dict[str, list[str]] = {}
    for name in methods.names():
        if not name.startswith("fedgp+"):
            alike.setdefault(_columns(methods.build(name)), []).append(f"`{name}`")
    head = ["| method | the server learns sums of | and of every client | secure aggregation |", "|---|---|---|---|"]
    return "\n".join([*head, *(f"| {', '.join(names)} {columns}" for columns, names in alike.items())])


def _columns(method: Method) -> str:
    phases = [method.train_phase(), *method.phases(Position.BEFORE), *method.phases(Position.AFTER)]
    found: dict[bool, list[str]] = {True: [], False: []}
    for phase in phases:
        for part, keys in method.reducers(phase).items():
            for key, reducer in keys.items():
                found[reducer.secure].append(f"`{part}/{key}`{'' if phase.name == 'train' else f' ({phase.name})'}")
    sums, single = (", ".join(found[secure]) or "nothing" for secure in (True, False))
    return f"| {sums} | {single} | {'no' if method.reveals() else 'yes'} |"


def renew(page: Path) -> None:
    """Put the table of now between the page's marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    renew(Path(sys.argv[1]))
