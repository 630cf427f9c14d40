"""Features of texts and images, computed once and cached on the machine that has them: a file for every encoder and
list."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from everfed.data.encoders import Encoder, text_digest
from everfed.data.errors import DataError
from everfed.data.source import Source, make_source
from everfed.data.texts import Texts
from everfed.store.files import digest, make_folder, write_atomic

VARIABLE = "EVERFED_CACHE"


def cache_folder() -> Path:
    """EVERFED_CACHE, else everfed/ in the user's cache folder."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everfed"


def features(encoder: Encoder, texts: Sequence[str] | np.ndarray, folder: Path | None = None) -> np.ndarray:
    """(n, d) float32 vectors of the texts, or of uint8 images, read from `folder` (default: the cache) when they were
    computed before. A file that is damaged is computed again."""
    folder = (cache_folder() if folder is None else folder) / "features"
    path = folder / f"{digest(f'{encoder.fingerprint}|{_content(texts)}'.encode())}.npy"
    held = _read(path, len(texts))
    if held is not None:
        return held
    made = np.asarray(encoder.encode(texts), dtype=np.float32)
    if made.ndim != 2 or len(made) != len(texts):
        raise DataError(f"stream.encoder: {encoder.name} gave {made.shape} for {len(texts)} texts; needed: (n, d)")
    if not np.isfinite(made).all():
        raise DataError(f"stream.encoder: {encoder.name} gave values that are not finite")
    _write(path, made)
    return made


def encoded(texts: Texts, encoder: Encoder) -> Source:
    """The set as vectors, or as tokens where the encoder has `tokens`; `encoder` of the source names the encoder."""
    form = np.int64 if getattr(encoder, "tokens", False) else np.float32
    train, test = (features(encoder, part).astype(form, copy=False) for part in (texts.train, texts.test))
    names = texts.class_names
    return make_source(
        texts.name,
        train,
        texts.y_train,
        test,
        texts.y_test,
        origin=texts.origin,
        class_names=names,
        encoder=encoder.name,
    )


def encoded_images(source: Source, encoder: Encoder) -> Source:
    """A set of images as vectors; `encoder` of the source names the encoder."""
    x_train, x_test = (
        torch.from_numpy(features(encoder, x.numpy(force=True))) for x in (source.x_train, source.x_test)
    )
    return replace(source, x_train=x_train, x_test=x_test, encoder=encoder.name)


def _content(items: Sequence[str] | np.ndarray) -> str:
    if isinstance(items, np.ndarray):
        return f"{items.shape} {digest(np.ascontiguousarray(items).tobytes())}"
    return text_digest(items)


def _read(path: Path, count: int) -> np.ndarray | None:
    try:
        held: np.ndarray = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return held if held.ndim == 2 and len(held) == count and held.dtype == np.float32 else None


def _write(path: Path, made: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, made, allow_pickle=False)
    try:
        make_folder(path.parent)
        write_atomic(path, buffer.getvalue())
    except OSError as problem:
        raise DataError(
            f"the features cannot be kept in {path.parent} ({problem}); name a folder by {VARIABLE}"
        ) from problem
