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

from everfed.data.catalogue import FileLayout, KnownSet
from everfed.data.formats import TEST_FRACTION, json_lines, read_names
from everfed.data.targets import SPLIT_SEED, held_out, thinned
from everfed.errors import DataError
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
    rows, files = known.load(name, folder)
    return _collected(name, rows, files[0])


# readers ---------------------------------------------------------------------------------------------------------


def read_jsonl(path: Path) -> Iterator[TextRow]:
    """Objects with text and label (a number counted from 0, or a name), and perhaps split, name, title or subject."""
    for where, row in json_lines(path):
        if "text" not in row or not isinstance(row.get("label"), (int, str)):
            raise DataError(f"{where}: needs an object with text, and label as a number or a name")
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


def _read_with(read: Callable[[Path], Iterator[TextRow]], *places: str) -> FileLayout:
    return FileLayout(("",), (places,), lambda files: read(files[0]))


def _jsonl(stem: str) -> FileLayout:
    return _read_with(read_jsonl, f"text/{stem}{SUFFIX}", f"{stem}{SUFFIX}")


def _csv(folder: str) -> FileLayout:
    return _read_with(read_zhang_csv, folder, f"text/{folder}")


def _in_scope(layout: FileLayout) -> FileLayout:
    """CLINC150 without the utterances that belong to none of its intents."""
    return replace(layout, read=lambda files: (row for row in layout.read(files) if "oos" not in (row.name, row.label)))


KNOWN: Mapping[str, KnownSet] = {
    "yahooqa": KnownSet(
        (_csv("yahoo_answers_csv"), _jsonl("yahoo10")),
        _ZHANG.format("yahoo_answers_csv"),
        "Yahoo! Answers, 10 topics",
    ),
    "dbpedia": KnownSet(
        (_csv("dbpedia_csv"), _jsonl("dbpedia14")), _ZHANG.format("dbpedia_csv"), "DBpedia, 14 kinds of things"
    ),
    "newsgroups": KnownSet(
        (_jsonl("newsgroups20"), _read_with(read_message_folders, "20news-bydate", "20_newsgroups")),
        "http://qwone.com/~jason/20Newsgroups/ (20news-bydate.tar.gz, unpacked into 20news-bydate/)",
        "20 Newsgroups, split by date",
    ),
    "clinc150": KnownSet(
        (_in_scope(_jsonl("clinc150")), _in_scope(_read_with(read_clinc, "data_full.json", "clinc150/data_full.json"))),
        "https://github.com/clinc/oos-eval (data/data_full.json)",
        "CLINC150, 150 intents of an assistant's users; out-of-scope utterances are left out",
    ),
}


# from rows to a set ----------------------------------------------------------------------------------------------


def _collected(name: str, rows: Iterator[TextRow], path: Path) -> Texts:
    """Both parts with class ids; other parts of a file (validation) are left out."""
    kept = [row for row in rows if row.part in ("train", "test", "")]
    names = _class_names(kept, path)
    number = {class_name: label for label, class_name in enumerate(names)}
    y = np.array([row.label if isinstance(row.label, int) else number[row.label] for row in kept], dtype=np.int64)
    train, test = _parts(kept, y, path)
    texts = [row.text for row in kept]
    x_train, x_test = (tuple(texts[row] for row in rows) for rows in (train, test))
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
