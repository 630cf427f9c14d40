"""Texts and instructions in lines of JSON, as rows of tokens for a causal language model.

    {"text": "a document", "client": 0}
    {"prompt": "what is to be done", "response": "the answer", "client": 3, "period": 1}

Of a document every token is predicted, of an instruction only those of the response and the end that follows. A line
without `client` belongs to whoever reads the file: a real client's own file names none. `period` counts from 0, its
default.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from everfed.data.formats import json_lines
from everfed.data.targets import NONE
from everfed.errors import DataError, optional_package
from everfed.naming import places

Marked = tuple[list[int], list[bool]]
"""The tokens of a document, and which of them are predicted."""


class TokenizerFolder:
    """The tokenizer that a folder of transformers holds: tokenizer.json and its configuration."""

    def __init__(self, name: str, folder: Path | None) -> None:
        transformers = optional_package("transformers", "text", "stream.tokenizer", DataError)
        found = places(name, folder)
        place = next((one for one in found if one.is_dir()), None)
        if place is None:
            raise DataError(
                f"stream.tokenizer = {name!r} was not found; it is the folder of a tokenizer of transformers. Looked "
                f"at: {_listed(found)}"
            )
        try:
            self._made: Any = transformers.AutoTokenizer.from_pretrained(
                place, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as problem:
            raise DataError(f"stream.tokenizer: {place} cannot be loaded ({problem})") from problem
        if self._made.eos_token_id is None:
            raise DataError(f"stream.tokenizer: {place} names no eos_token, which ends a document")
        self.end, self.size = int(self._made.eos_token_id), len(self._made)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without any special ones."""
        tokens: list[int] = self._made.encode(text, add_special_tokens=False)
        return tokens


@dataclass(frozen=True)
class Instructions:
    """A jsonl file by its path or by its name below the data folder; a server has none, so it is looked for when a
    client's lines are read."""

    name: str
    folder: Path | None = None

    def periods(self, client: int, tokenizer: TokenizerFolder) -> list[list[Marked]]:
        """The client's documents, period by period. Raises DataError."""
        looked = places(self.name, self.folder, f"{self.name}.jsonl")
        path = next((place for place in looked if place.is_file()), None)
        if path is None:
            raise DataError(f"texts {self.name!r} were not found. Looked for a jsonl file at: {_listed(looked)}")
        found: dict[int, list[Marked]] = {}
        for where, row in json_lines(path):
            read = _document(row, client, tokenizer, where)
            if read is not None:
                found.setdefault(read[0], []).append(read[1])
        return [found.get(period, []) for period in range(max(found, default=-1) + 1)]


def _listed(looked: Sequence[Path]) -> str:
    return ", ".join(map(str, looked))


def _document(row: dict[str, Any], client: int, tokenizer: TokenizerFolder, where: str) -> tuple[int, Marked] | None:
    """(period, document); None for another client's."""
    period, owner = row.get("period", 0), row.get("client", client)
    answer, prompt = row.get("response", row.get("text")), row.get("prompt", "") if "response" in row else ""
    if not isinstance(answer, str) or not isinstance(prompt, str):
        raise DataError(
            f'{where}: needs an object with "text", or with "prompt" and "response"; it is {json.dumps(row)[:80]!r}'
        )
    for key, value in (("period", period), ("client", owner)):
        if type(value) is not int or value < 0:
            raise DataError(f'{where}: "{key}" is a whole number, counted from 0; got {value!r}')
    if owner != client:
        return None
    shown, predicted = tokenizer.encode(prompt), [*tokenizer.encode(answer), tokenizer.end]
    return period, ([*shown, *predicted], [False] * len(shown) + [True] * len(predicted))


def rows_of(documents: Sequence[Marked], length: int, end: int, pack: bool) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, next tokens), both (n, length) int64; the latter are NONE where nothing is predicted.

    pack: documents lie one after the other and rows are full but for the last one; else every document begins a row.
    Tokens of a document that do not fit into a row go on in the next one.
    """
    if pack and documents:
        documents = [([t for tokens, _ in documents for t in tokens], [m for _, marks in documents for m in marks])]
    pieces = [
        (tokens[first : first + length + 1], marks[first : first + length + 1])
        for tokens, marks in documents
        for first in range(0, max(len(tokens) - 1, 1), length)
    ]
    x = np.full((len(pieces), length), end, dtype=np.int64)
    y = np.full((len(pieces), length), NONE, dtype=np.int64)
    for row, (tokens, marks) in enumerate(pieces):
        x[row, : min(len(tokens), length)] = tokens[:length]
        y[row, : len(tokens) - 1] = np.where(marks[1:], tokens[1:], NONE)
    some = (y != NONE).any(1)  # a row without a target teaches nothing
    return x[some], y[some]
