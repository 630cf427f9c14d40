"""Utterances of users over time: public sets by name, or a user's own jsonl file of (user, time, text)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from everfed.data.catalogue import FileLayout, KnownSet, data_folder
from everfed.data.formats import json_lines
from everfed.errors import DataError
from everfed.naming import places

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class Utterances:
    """n utterances in the order of their file.

    users: names, in order of first appearance. user: (n,) int64 positions in `users`. time: (n,) int64, seconds since
    1970 when `dated`, else a whole number that orders periods. stands_for: the private data it substitutes, or "".
    """

    name: str
    users: tuple[str, ...]
    user: np.ndarray
    time: np.ndarray
    texts: tuple[str, ...]
    dated: bool
    origin: str
    stands_for: str = ""

    def __len__(self) -> int:
        return len(self.texts)


def _known(file: str, time: str, about: str) -> KnownSet:
    """time: the field that holds it."""
    stands_for = "the private voice-assistant transcripts of the coordinated replay paper"
    name = Path(file).stem
    layout = FileLayout(("utterances", ""), ((file,),), lambda files: read_utterances(files[0], name, time, stands_for))
    return KnownSet((layout,), f"who has it: it is not published ({file}: {about})")


KNOWN: Mapping[str, KnownSet] = {
    "chitchat": _known("chitchat.jsonl", "t", "dialogues of 200 users, April to November 2018, dated"),
    "shakespeare": _known("shakespeare.jsonl", "act", "speeches of 1,363 roles, a period for every act"),
}


def load_utterances(name_or_path: str | Path, data_dir: str | Path | None = None) -> Utterances:
    """A named set of the data folder (there, or below `utterances/`), or a jsonl file of your own, each line an
    object with user, time (a date as in ISO 8601, or a whole number) and text. Raises DataError."""
    name, folder = str(name_or_path), data_folder(data_dir)
    if name not in KNOWN:
        return read_utterances(_own_file(name, folder))
    found: Utterances = KNOWN[name].load(name, folder)[0]
    return found


def read_utterances(path: Path, name: str = "", time: str = "time", stands_for: str = "") -> Utterances:
    """The utterances of a jsonl file; `time` names the field that holds it."""
    users: dict[str, int] = {}
    user, times, texts, kinds = [], [], [], set()
    for where, row in json_lines(path):
        for key in ("user", time, "text"):
            if key not in row:
                raise DataError(f"{where}: needs the fields user, {time} and text; it has {list(row)}")
        user.append(users.setdefault(str(row["user"]), len(users)))
        moment, dated = _moment(row[time], f"{where}: {time}")
        times.append(moment)
        kinds.add(dated)
        texts.append(str(row["text"]))
    if not texts:
        raise DataError(f"{path}: holds no utterance")
    if len(kinds) > 1:
        raise DataError(f"{path}: some lines have a date and some a number as {time}; use one of them")
    columns = np.array(user, dtype=np.int64), np.array(times, dtype=np.int64), tuple(texts)
    return Utterances(name or path.stem, tuple(users), *columns, kinds.pop(), str(path.absolute()), stands_for)


def _own_file(name: str, folder: Path | None) -> Path:
    found = places(name, folder, f"{name}.jsonl", f"utterances/{name}.jsonl")
    for place in found:
        if place.is_file() and place.suffix == ".jsonl":
            return place
    raise DataError(
        f"utterances {name!r} were not found. Looked for a jsonl file at: {', '.join(map(str, found))}. "
        f"Allowed: {', '.join(KNOWN)}, or the path of a jsonl file with user, time and text on every line"
    )


def _moment(value: Any, where: str) -> tuple[int, bool]:
    """(time, is it a date?). A date without a time zone is taken as UTC."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value, False
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError as problem:
        raise DataError(f"{where}: expected a date as in ISO 8601 or a whole number, got {value!r}") from problem
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()), True
