"""Lists the data sets: every named one, with its path or where to get it, and the user's own."""

from __future__ import annotations

from pathlib import Path

from everfed.data import catalogue, domains, published, scenes, streets, texts, utterances
from everfed.data.catalogue import KnownSet, data_folder
from everfed.data.images import is_image_folder
from everfed.data.sources import EMBEDDED
from everfed.data.tables import SUFFIXES as TABLES

Row = tuple[str, bool, str]  # name, found, its path or where to get it


def available(data_dir: str | Path | None = None) -> list[Row]:
    """Single sets, those of several domains and those of text, then the user's own in the data folder."""
    folder = data_folder(data_dir)
    digits = [name for name in domains.DIGIT10 if not catalogue.KNOWN[name].find(folder)]
    missing = f"missing: {', '.join(digits)}"
    rows: list[Row] = [
        (EMBEDDED, True, "embedded (scikit-learn)"),
        *(_row(name, known, folder) for table in (catalogue.KNOWN, published.KNOWN) for name, known in table.items()),
        ("digit10", not digits, missing if digits else ", ".join(domains.DIGIT10)),
        *(
            _row(name, known, folder)
            for table in (domains.KNOWN, texts.KNOWN, utterances.KNOWN)
            for name, known in table.items()
        ),
        (streets.NAME, True, "drawn (images with boxes)"),
        _row("carla", scenes.CARLA, folder),
    ]
    taken = [Path(where) for _, found, where in rows if found]
    return rows + [row for row in _own(folder) if not any(place.is_relative_to(row[2]) for place in taken)]


def _row(name: str, known: KnownSet, folder: Path | None) -> Row:
    found = known.find(folder)
    if found is None:
        return name, False, f"missing; {known.about}{': ' if known.about else ''}{known.get_it}"
    first, *others = found[1]
    return name, True, str(first.parent if others and first.is_dir() else first)


def _own(folder: Path | None) -> list[Row]:
    if folder is None or not folder.is_dir():
        return []
    files = (".npz", *TABLES)
    own = [p for p in sorted(folder.iterdir()) if p.suffix in files or (p.is_dir() and is_image_folder(p))]
    return [(p.stem if p.is_file() else p.name, True, str(p)) for p in own]
