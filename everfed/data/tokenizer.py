"""A vocabulary of word pieces trained on a stream's own text, and text as rows of token numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from everfed.data.errors import DataError

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
    try:
        import tokenizers
    except ImportError as missing:
        raise DataError(
            "streams of text need the package tokenizers; install it with: pip install 'everfed[text]'"
        ) from missing
    return tokenizers
