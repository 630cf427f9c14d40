"""Labelled texts: Yahoo! Answers topics, 20 Newsgroups, DBpedia, CLINC150, and files of one's own.

Read in the layouts they are published in: the csv files of Zhang et al. (2015), folders of messages, CLINC's json; or
as jsonl, an object with text and label on every line.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from everfed.data.errors import DataError
from everfed.data.formats import TEST_FRACTION, read_names
from everfed.data.split import SPLIT_SEED, held_out, thinned
from everfed.naming import places

SUFFIX = ".jsonl"
_BEFORE = ("title", "subject")  # fields of a line that belong in front of its text


class TextRow(NamedTuple):
    """A text with its class, by number (then perhaps with a name) or by name alone. part: "train", "test" or another;
    "" where the file has none."""

    part: str
    label: int | str
    name: str
    text: str


@dataclass(frozen=True)
class Texts:
    """Labelled texts with their own train and test parts. y_*: (n,) int64 class ids."""

    name: str
    train: tuple[str, ...]
    y_train: np.ndarray
    test: tuple[str, ...]
    y_test: np.ndarray
    class_names: tuple[str, ...]
    origin: str

    def thinned(self, most_train: int | None, most_test: int | None) -> Texts:
        """At most so many texts of each part, every class in proportion: the same ones in every run, so that their
        features are computed once."""
        train, test = thinned(self.y_train, most_train), thinned(self.y_test, most_test)
        return replace(
            self,
            train=tuple(self.train[row] for row in train),
            y_train=self.y_train[train],
            test=tuple(self.test[row] for row in test),
            y_test=self.y_test[test],
        )


@dataclass(frozen=True)
class Location:
    """One layout of a set below the data folder. path: a file of it, or its folder. read: that path -> rows."""

    path: str
    read: Callable[[Path], Iterator[TextRow]]


@dataclass(frozen=True)
class KnownTexts:
    """A named set: its possible layouts, what it is and where it is published. left_out: classes that are no topic."""

    places: tuple[Location, ...]
    about: str
    get_it: str
    left_out: tuple[str, ...] = ()

    def find(self, folder: Path) -> tuple[Location, Path] | None:
        """The first layout that is found."""
        for place in self.places:
            if (folder / place.path).exists():
                return place, folder / place.path
        return None


def is_text(name: str, folder: Path | None) -> bool:
    """Is this a set of texts: a named one, or a jsonl file?"""
    return name in KNOWN or name.endswith(SUFFIX) or bool(folder and _own_file(name, folder))


def load_texts(name: str, folder: Path | None = None) -> Texts:
    """A named set of the data folder, or a jsonl file, by path or by name in that folder. Raises DataError."""
    known = KNOWN.get(name)
    if known is None:
        path = _own_file(name, folder)
        if path is None:
            raise DataError(
                f"texts {name!r} were not found; named sets: {', '.join(KNOWN)}, or the path of a jsonl file"
            )
        return _collected(path.stem, read_jsonl(path), path)
    if folder is None:
        raise DataError(f"texts {name!r}: no data folder is named; get them from {known.get_it}")
    found = known.find(folder)
    if found is None:
        places = ", ".join(str(folder / place.path) for place in known.places)
        raise DataError(f"texts {name!r} were not found. Looked for: {places}. Get them from {known.get_it}")
    place, path = found
    return _collected(name, place.read(path), path, known.left_out)


# readers ---------------------------------------------------------------------------------------------------------


def read_jsonl(path: Path) -> Iterator[TextRow]:
    """Objects with text and label (a number counted from 0, or a name), and perhaps split, name, title or subject."""
    for number, line in enumerate(_lines(path), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as problem:
            raise DataError(f"{path}, line {number}: not JSON ({problem})") from problem
        if not isinstance(row, dict) or "text" not in row or not isinstance(row.get("label"), (int, str)):
            raise DataError(f"{path}, line {number}: needs an object with text, and label as a number or a name")
        text = "\n".join(str(row[key]) for key in (*_BEFORE, "text") if row.get(key))
        yield TextRow(str(row.get("split", "")), row["label"], str(row.get("name", "")), text)


def read_zhang_csv(folder: Path) -> Iterator[TextRow]:
    """train.csv and test.csv of Zhang et al.: a class counted from 1, then the columns of the text; classes.txt."""
    names = read_names(folder / "classes.txt") or ()
    for part in ("train", "test"):
        path = folder / f"{part}.csv"
        for number, row in enumerate(csv.reader(_lines(path)), start=1):
            if len(row) < 2 or not row[0].isdecimal() or int(row[0]) < 1:
                raise DataError(f"{path}, row {number}: needs a class counted from 1 and a text; it has {row[:2]}")
            label = int(row[0]) - 1
            name = names[label] if label < len(names) else ""
            yield TextRow(part, label, name, "\n".join(column for column in row[1:] if column).replace("\\n", "\n"))


def read_message_folders(folder: Path) -> Iterator[TextRow]:
    """20 Newsgroups by date: 20news-bydate-{train,test}/<group>/<message>; of a message, its subject and its body."""
    for part in ("train", "test"):
        root = folder / f"20news-bydate-{part}"
        for path in sorted(root.glob("*/*")):
            head, _, body = path.read_text(encoding="latin-1").partition("\n\n")
            subject = [line[len("Subject:") :].strip() for line in head.splitlines() if line.startswith("Subject:")]
            yield TextRow(part, path.parent.name, "", "\n".join([*subject, body]))


def read_clinc(path: Path) -> Iterator[TextRow]:
    """CLINC150's data_full.json: {"train": [[text, intent], ...], "val": ..., "test": ..., "oos_train": ...}."""
    try:
        parts = json.loads(path.read_text(encoding="utf-8"))
        for part in ("train", "test"):
            for text, intent in parts[part]:
                yield TextRow(part, str(intent), "", str(text))
    except (ValueError, KeyError, TypeError) as problem:
        raise DataError(f"{path}: not CLINC150's data_full.json ({problem!r})") from problem


def _lines(path: Path) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            yield from (line for line in file if line.strip())
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: cannot be read ({problem})") from problem


_ZHANG = "Zhang et al. (2015), https://github.com/zhangxiangxiao/Crepe: the folder {} with train.csv and test.csv"


def _jsonl(stem: str) -> tuple[Location, ...]:
    return tuple(Location(f"{folder}{stem}{SUFFIX}", read_jsonl) for folder in ("text/", ""))


def _csv(folder: str) -> tuple[Location, ...]:
    return tuple(Location(f"{above}{folder}", read_zhang_csv) for above in ("", "text/"))


KNOWN: Mapping[str, KnownTexts] = {
    "yahooqa": KnownTexts(
        (*_csv("yahoo_answers_csv"), *_jsonl("yahoo10")),
        "Yahoo! Answers, 10 topics",
        _ZHANG.format("yahoo_answers_csv"),
    ),
    "dbpedia": KnownTexts(
        (*_csv("dbpedia_csv"), *_jsonl("dbpedia14")), "DBpedia, 14 kinds of things", _ZHANG.format("dbpedia_csv")
    ),
    "newsgroups": KnownTexts(
        (
            *_jsonl("newsgroups20"),
            *(Location(folder, read_message_folders) for folder in ("20news-bydate", "20_newsgroups")),
        ),
        "20 Newsgroups, split by date",
        "http://qwone.com/~jason/20Newsgroups/ (20news-bydate.tar.gz, unpacked into 20news-bydate/)",
    ),
    "clinc150": KnownTexts(
        (*_jsonl("clinc150"), Location("data_full.json", read_clinc), Location("clinc150/data_full.json", read_clinc)),
        "CLINC150, 150 intents of an assistant's users; out-of-scope utterances are left out",
        "https://github.com/clinc/oos-eval (data/data_full.json)",
        left_out=("oos",),
    ),
}


# from rows to a set ----------------------------------------------------------------------------------------------


def _collected(name: str, rows: Iterator[TextRow], path: Path, left_out: Sequence[str] = ()) -> Texts:
    """Both parts with class ids; other parts of a file (validation) are left out."""
    kept = [row for row in rows if row.part in ("train", "test", "") and not {row.name, row.label} & {*left_out}]
    names = _class_names(kept, path)
    number = {class_name: label for label, class_name in enumerate(names)}
    y = np.array([row.label if isinstance(row.label, int) else number[row.label] for row in kept], dtype=np.int64)
    train, test = _parts(kept, y, path)
    texts = [row.text for row in kept]
    parts = (tuple(texts[row] for row in rows) for rows in (train, test))
    x_train, x_test = parts
    return Texts(name, x_train, y[train], x_test, y[test], names, str(path.absolute()))


def _class_names(rows: Sequence[TextRow], path: Path) -> tuple[str, ...]:
    kinds = {type(row.label) for row in rows}
    if len(kinds) > 1:
        raise DataError(f"{path}: some labels are numbers and some are names; use one of them")
    if kinds == {str}:
        return tuple(sorted({str(row.label) for row in rows}))
    named = {int(row.label): row.name for row in rows}
    if min(named, default=0) < 0:
        raise DataError(f"{path}: labels are counted from 0; one is {min(named)}")
    return tuple(named.get(label, "") or str(label) for label in range(max(named, default=-1) + 1))


def _parts(rows: Sequence[TextRow], y: np.ndarray, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the train and the test part; without any, a fixed fifth of every class is for testing."""
    part = np.array([row.part for row in rows])
    if len(part) and (part == "").all():
        return held_out(y, TEST_FRACTION, np.random.default_rng(SPLIT_SEED))
    found = np.flatnonzero(part == "train"), np.flatnonzero(part == "test")
    for name, chosen in zip(("train", "test"), found, strict=True):
        if not len(chosen):
            raise DataError(f"{path}: holds no text of the {name} part")
    return found


def _own_file(name: str, folder: Path | None) -> Path | None:
    found = places(name, folder, f"{name}{SUFFIX}", f"text/{name}{SUFFIX}")
    return next((place for place in found if place.is_file() and place.suffix == SUFFIX), None)
