"""What a method reveals to the server: the one place that says so, and a table of all methods for the documentation.

python -m everfed.privacy.reveals docs/privacy-reference.md      # renews the table in that page
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from everfed.core.method import Method
from everfed.core.phase import OF_MODEL, TRAIN, Reducer
from everfed.methods import registry as methods
from everfed.store.files import marked_parts_renewed


def table() -> str:
    """Markdown, one row for all presets that reveal the same; without `fedgp+...`, which reveals what both parts do."""
    alike: dict[str, list[str]] = {}
    for name in methods.names():
        if not name.startswith("fedgp+"):
            alike.setdefault(_columns(methods.build(name)), []).append(f"`{name}`")
    head = ["| method | the server learns sums of | and of every client | secure aggregation |", "|---|---|---|---|"]
    return "\n".join([*head, *(f"| {', '.join(names)} {columns}" for columns, names in alike.items())])


def seen(method: Method, single: bool) -> list[tuple[str, str]]:
    """(phase, PART/KEY) of every value that the server learns. single: of each client by itself; else as a sum."""
    return [(phase, value) for phase, value, _, one_by_one in _values(method) if one_by_one == single]


def _values(method: Method) -> Iterator[tuple[str, str, Reducer, bool]]:
    """(phase, PART/KEY, reducer, whether the server learns every client's) of every value that clients send."""
    for phase in method.scheduled_phases():
        for part, keys in method.reducers(phase).items():
            opened = method.opening and part == method.aggregator.name
            for key, reducer in keys.items():
                yield phase.name, f"{part}/{key}", reducer, bool(opened or not reducer.secure)


def values_sent(method: Method) -> dict[str, dict[str, str]]:
    """{phase: {PART/KEY: what it tells of a client, and what the server sees without and with secure aggregation}}."""
    protected = "this method cannot run" if method.reveals() else "the sum alone"
    sees = f"The server sees each client's; with secure aggregation: {protected}"
    found: dict[str, dict[str, str]] = {TRAIN: {"samples, steps, losses": f"how much data, how well it fits. {sees}"}}
    for phase, value, reducer, _ in sorted(_values(method), key=lambda entry: entry[3]):
        about = reducer.tells or OF_MODEL.get(value.partition("/")[2], "see the method's page")
        found.setdefault(phase, {})[value] = f"{about}. {sees}"
    return found


def sentence(reveals: Mapping[str, Sequence[str]]) -> str:
    """`Method.reveals` in words."""
    found = ", ".join(f"{', '.join(parts)} (phase {phase})" for phase, parts in reveals.items())
    return f"single clients' values of {found}" if found else "sums and means over clients suffice"


def _columns(method: Method) -> str:
    sums, single = (_listed(seen(method, single)) for single in (False, True))
    return f"| {sums} | {single} | {'no' if method.reveals() else 'yes'} |"


def _listed(values: Sequence[tuple[str, str]]) -> str:
    shown = (f"`{value}`{'' if phase == TRAIN else f' ({phase})'}" for phase, value in values)
    return ", ".join(shown) or "nothing"


def renew(page: Path) -> None:
    """Put the current table between the page's marks, `methods`."""
    page.write_text(marked_parts_renewed(page.read_text(), "methods", lambda name: table()))


if __name__ == "__main__":
    renew(Path(sys.argv[1]))
