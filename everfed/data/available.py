"""Lists the data sets: every named one, with its path or where to get it, and the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from everfed.data import catalogue, domains, published, scenes, streets, texts, utterances
from everfed.data.image_folder import is_image_folder
from everfed.data.sources import EMBEDDED, data_folder
from everfed.data.tables import SUFFIXES as TABLES

Row = tuple[str, bool, str]  # name, found, its path or where to get it


def available(data_dir: str | Path | None = None) -> list[Row]:
    """Single sets, those of several domains and those of text, then the user's own in the data folder."""
    folder = data_folder(data_dir)
    rows = [(EMBEDDED, True, "embedded (scikit-learn)"), *_single(folder), *_published(folder)]
    rows += [*_of_domains(folder), *_of_text(folder), *_of_scenes(folder)]
    taken = [Path(where) for _, found, where in rows if found]
    return rows + [row for row in _own(folder) if not any(place.is_relative_to(row[2]) for place in taken)]


def _row(name: str, place: Path | None, get_it: str) -> Row:
    return name, place is not None, str(place) if place else f"missing; {get_it}"


def _single(folder: Path | None) -> Iterator[Row]:
    for name, known in catalogue.KNOWN.items():
        found = known.find(folder) if folder else None
        yield _row(name, found[1][0] if found else None, known.get_it)


def _published(folder: Path | None) -> Iterator[Row]:
    for name, known in published.KNOWN.items():
        yield _row(name, known.find(folder), known.get_it)


def _of_domains(folder: Path | None) -> Iterator[Row]:
    missing = [name for name, found, _ in _single(folder) if name in domains.DIGIT10 and not found]
    yield "digit10", not missing, f"missing: {', '.join(missing)}" if missing else ", ".join(domains.DIGIT10)
    for name, known in domains.KNOWN.items():
        yield _row(name, known.find(folder) if folder else None, known.get_it)


def _of_text(folder: Path | None) -> Iterator[Row]:
    for name, text in texts.KNOWN.items():
        place = text.find(folder) if folder else None
        yield _row(name, place[1] if place else None, f"{text.about}: {text.get_it}")
    for name, known in utterances.KNOWN.items():
        yield _row(name, known.find(folder), f"put {known.file} there: {known.about}")


def _of_scenes(folder: Path | None) -> Iterator[Row]:
    yield streets.NAME, True, "drawn (images with boxes)"
    place = folder / "carla" if folder else None
    yield _row("carla", place if place and (place / "train.json").is_file() else None, scenes.CARLA)


def _own(folder: Path | None) -> list[Row]:
    if folder is None or not folder.is_dir():
        return []
    files = (".npz", *TABLES)
    own = [p for p in sorted(folder.iterdir()) if p.suffix in files or (p.is_dir() and is_image_folder(p))]
    return [(p.stem if p.is_file() else p.name, True, str(p)) for p in own]
