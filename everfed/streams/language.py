"""Texts and instructions of every client, period by period, for a causal language model: next tokens are predicted, and
scored by perplexity on documents of each client that are held out.

On a real client `stream.dataset` is a file of that client's own. A server needs the tokenizer, and no text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from everfed.data.sources import data_folder
from everfed.data.targets import TOKENS, held_out
from everfed.data.tokens import Instructions, TokenizerFolder, rows_of
from everfed.streams.draws import generator
from everfed.streams.options import OptionError, Options, require_whole
from everfed.streams.own import Own, Period


class Language(Own):
    """tokenizer: a folder of transformers with a tokenizer, by its path or below the data folder. length: tokens of a
    sample. pack: documents lie one after the other in full rows; else every document begins a row of its own.
    test_share: of every period's documents, at least one where there are two."""

    scenario = "language"
    unused = (*Own.unused, "normalise", "augment")

    def __init__(
        self,
        source: Instructions,
        options: Options,
        *,
        seed: int,
        rounds_per_task: int,
        scale: float = 1.0,
        tokenizer: str = "",
        length: int = 128,
        pack: bool = True,
        test_share: float = 0.2,
    ) -> None:
        if not isinstance(source, Instructions):
            raise OptionError("scenario", "language takes a jsonl file; other data fits the other scenarios")
        if not tokenizer or not isinstance(tokenizer, str):
            raise OptionError("tokenizer", f"expected the folder of a tokenizer of transformers, got {tokenizer!r}")
        if not isinstance(pack, bool):
            raise OptionError("pack", f"expected true or false, got {pack!r}")
        if options.label_kind not in (None, TOKENS):
            raise OptionError("label_kind", f"is {TOKENS!r} in the scenario language; leave it out")
        require_whole("length", length, least=2)
        self.source, self.pack = source, pack
        self.tokenizer, self.tokenizer_name = TokenizerFolder(tokenizer, source.folder), tokenizer
        given: dict[str, Any] = {"seed": seed, "rounds_per_task": rounds_per_task, "scale": scale}
        given |= {"classes": self.tokenizer.size, "input_shape": (length,), "dtype": "int64"}
        super().__init__(self._periods, replace(options, label_kind=TOKENS), **given, test_share=test_share)
        self.name = f"{Path(source.name).stem}-language"

    @staticmethod
    def read(dataset: str | Path, data_dir: str | Path | None = None) -> Instructions:  # type: ignore[override]
        """The file of that name."""
        return Instructions(str(dataset), data_folder(data_dir))

    def describe(self) -> dict[str, Any]:
        """The settings in full; what clients have is not known."""
        settings = {"tokenizer": self.tokenizer_name, "vocabulary": self.classes, "length": self.input_shape[0]}
        return {**super().describe(), "dataset": self.source.name, **settings, "pack": self.pack}

    def _periods(self, client: int) -> Iterator[Period]:
        """Rows of tokens, whole documents of which are held out."""
        for period, documents in enumerate(self.source.periods(client, self.tokenizer)):
            rng = generator(self.seed, "held out of a period", client, period)
            least = 1 / len(documents) if len(documents) > 1 and self.test_share else 0.0
            share = max(self.test_share, least) if least else 0.0
            kept, held = held_out(np.zeros(len(documents), dtype=np.int64), share, rng)
            train, test = (
                rows_of([documents[row] for row in rows], self.input_shape[0], self.tokenizer.end, self.pack)
                for rows in (kept, held)
            )
            yield Period(*train, test)
