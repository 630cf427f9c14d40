"""The samples of a source that a stream uses: a share of them at scales below 1, with a validation part held out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from everfed.data.source import Source
from everfed.data.split import held_out, stratified
from everfed.streams.draws import generator

LEAST_TESTS = 20  # of a class, at any scale


@dataclass(frozen=True)
class Rows:
    """Ascending positions: train and validation in the source's training part, test in its test part."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def choose_rows(
    source: Source, seed: int, scale: float, validation: float, max_train: int | None, max_test: int | None
) -> Rows:
    """The samples a stream may use; validation samples never come from the test part."""
    y_train, y_test = source.strata("train"), source.strata("test")
    pool = _thinned(y_train, scale, max_train, generator(seed, "thin train"))
    least = min(1.0, LEAST_TESTS * source.classes / len(y_test))  # a handful of tests would score 0 or 100 %
    test = _thinned(y_test, max(scale, least), max_test, generator(seed, "thin test"))
    kept, held = held_out(y_train[pool], validation, generator(seed, "validation"))
    return Rows(pool[kept], pool[held], test)


def _thinned(labels: np.ndarray, scale: float, cap: int | None, rng: np.random.Generator) -> np.ndarray:
    """Positions of `scale` of the samples, `cap` at most, every class in proportion."""
    count = max(1, round(scale * len(labels)))
    count = count if cap is None else min(count, cap)
    return np.arange(len(labels)) if count == len(labels) else stratified(labels, count, rng)
