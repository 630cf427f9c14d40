"""Text as rows of tokens. For masked language modelling: word pieces trained on a stream's own text, the masks of a
sample, the loss, and the counts of a perplexity. For causal language models: texts and instructions in lines
of JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.data.formats import json_lines
from everfed.data.targets import NONE
from everfed.errors import DataError, optional_package
from everfed.naming import places

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, START, END, MASK = range(len(SPECIAL))


class Tokenizer:
    """Lower-cased byte pairs. `text` is its description in the format of the tokenizers package.

    Not the package's WordPiece: it numbers letters in the order of a hash table, so that its training gives another
    vocabulary in every process, and every client of a stream must have the same.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    @staticmethod
    def train(texts: Sequence[str], vocabulary: int) -> Tokenizer:
        """At most `vocabulary` pieces, the five special ones first; fewer when the texts do not give more."""
        tokenizers = _package()
        made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=SPECIAL[UNKNOWN]))
        made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=list(SPECIAL), min_frequency=2, show_progress=False
        )
        made.train_from_iterator(texts, trainer)
        pair = f"{SPECIAL[START]} $A {SPECIAL[END]}"
        named = [(SPECIAL[START], START), (SPECIAL[END], END)]
        made.post_processor = tokenizers.processors.TemplateProcessing(single=pair, special_tokens=named)
        return Tokenizer(made.to_str())

    @property
    def size(self) -> int:
        """How many pieces there are, special ones included."""
        return int(_package().Tokenizer.from_str(self.text).get_vocab_size())

    def encode(self, texts: Sequence[str], length: int) -> np.ndarray:
        """(n, length) int32 token numbers: [CLS], the text, [SEP], cut off or padded."""
        made = _package().Tokenizer.from_str(self.text)
        made.enable_truncation(length)
        made.enable_padding(length=length, pad_id=PAD, pad_token=SPECIAL[PAD])
        rows = np.empty((len(texts), length), dtype=np.int32)
        for first in range(0, len(texts), 10_000):
            for row, encoded in enumerate(made.encode_batch(list(texts[first : first + 10_000])), start=first):
                rows[row] = encoded.ids
        return rows


def _package() -> Any:
    return optional_package("tokenizers", "text", "a stream of text", DataError)


# masks and loss -------------------------------------------------------------------------------------------------------

IGNORED = NONE
_PARTS = 2**31  # chances are whole numbers below this
_SHOWN_MASKED, _SHOWN_RANDOM = 0.8, 0.1  # the rest is shown as it is (Devlin et al., 2019)


def mask_tokens(
    tokens: np.ndarray, rate: float, vocabulary: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets), both like `tokens` (n, length): each ordinary token is predicted with probability `rate`, and
    at least one of every row that has any. Of those, 80 % are shown as [MASK], 10 % as a random token, 10 % as is."""
    draws, shown = rng.random(tokens.shape), rng.random(tokens.shape)
    random_tokens = rng.integers(len(SPECIAL), vocabulary, tokens.shape)
    ordinary = tokens >= len(SPECIAL)
    draws = np.where(ordinary, draws, np.inf)
    lowest = draws.min(axis=1, keepdims=True)
    predicted = ordinary & ((draws < rate) | (draws == lowest))
    inputs = np.where(predicted & (shown < _SHOWN_MASKED), MASK, tokens)
    swapped = predicted & (shown >= _SHOWN_MASKED) & (shown < _SHOWN_MASKED + _SHOWN_RANDOM)
    return np.where(swapped, random_tokens, inputs), np.where(predicted, tokens, IGNORED)


def draw_masks(rng: np.random.Generator, count: int, length: int, vocabulary: int) -> np.ndarray:
    """(count, 3 length) integers that fix the masks of `count` samples: per token whether it is predicted and how it is
    shown, both in parts of `_PARTS`, and a random token."""
    chances = rng.integers(0, _PARTS, (count, 2 * length))
    return np.concatenate([chances, rng.integers(len(SPECIAL), vocabulary, (count, length))], axis=1)


def mask_anew(x: Tensor, y: Tensor, rate: float, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Samples (n, length) that `mask_tokens` made, with other masks by the same rule; draws: of `draw_masks`."""
    tokens = torch.where(y >= 0, y, x)
    chance, shown, random_tokens = draws.split(x.shape[1], dim=1)
    ordinary = tokens >= len(SPECIAL)
    chance = torch.where(ordinary, chance, _PARTS)
    predicted = ordinary & ((chance < rate * _PARTS) | (chance == chance.amin(1, keepdim=True)))
    inputs = torch.where(predicted & (shown < _SHOWN_MASKED * _PARTS), MASK, tokens)
    swapped = predicted & (shown >= _SHOWN_MASKED * _PARTS) & (shown < (_SHOWN_MASKED + _SHOWN_RANDOM) * _PARTS)
    return torch.where(swapped, random_tokens, inputs), torch.where(predicted, tokens, IGNORED)


def _likelihood(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Log-likelihoods of the targets, 0 where there is none, and where there is one; both shaped like y."""
    predicted = y >= 0
    logs = outputs.log_softmax(-1).gather(-1, y.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return torch.where(predicted, logs, 0.0), predicted


def token_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy over the tokens to be predicted; outputs (n, length, vocabulary), y (n, length)."""
    logs, predicted = _likelihood(outputs, y)
    return -logs.sum() / predicted.sum().clamp_min(1)


def token_counts(outputs: Tensor, y: Tensor) -> Tensor:
    """(2,) float64: tokens that were to be predicted, and the sum of their negative log-likelihoods."""
    logs, predicted = _likelihood(outputs.float(), y)
    return torch.stack([predicted.sum().double(), -logs.double().sum()])


# texts and instructions ----------------------------------------------------------------------------------------------
#     {"text": "a document", "client": 0}
#     {"prompt": "what is to be done", "response": "the answer", "client": 3, "period": 1}
#
# Of a document every token is predicted, of an instruction only those of the response and the end that follows. A line
# without `client` belongs to whoever reads the file: a real client's own file names none. `period` counts from 0, its
# default.
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
