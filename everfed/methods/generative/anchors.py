"""Label anchors: one fixed vector for each class, from a file of text embeddings, from class names or random (LANDER).

The authors use CLIP's text features of the class names, 512 numbers each, not normalised: for CIFAR-100 the entries
have a standard deviation of 0.43. Nothing is ever downloaded here; anchors from names and random ones have the same
spread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from everfed.errors import CompositionError
from everfed.naming import file_named

GAUSSIAN, NAMES, WORDLLAMA = "gaussian", "names", "wordllama"
FROM_NAMES = (NAMES, WORDLLAMA)
SPREAD = 0.43  # standard deviation of an anchor's entries
SEED = 0  # of random anchors: the same in every run, as a file would be
GRAM = 3  # letters that are hashed together
SUFFIXES = (".npy", ".npz", ".safetensors", ".txt")


def read_anchors(named: str, classes: int, width: int) -> Tensor:
    """(classes, width) float32. named: "gaussian" for random rows, or a file: .npy, .npz, .safetensors with the matrix
    (the only one in it, or the one called "anchors"), or .txt with a class name on each line, to be hashed."""
    if named == GAUSSIAN:
        return _tensor(np.random.default_rng(SEED).normal(0.0, SPREAD, (classes, width)))
    path = file_named(named)
    if path.suffix not in SUFFIXES:
        words = ", ".join(map(repr, (GAUSSIAN, *FROM_NAMES)))
        allowed = f"{words} or a file ending in {', '.join(SUFFIXES)}"
        raise CompositionError(f"anchors must be {allowed}; got {named!r}")
    if not path.is_file():
        raise CompositionError(f"anchors: there is no file {path}")
    rows = _hashed_lines(path, width) if path.suffix == ".txt" else _matrix(path)
    if rows.shape != (classes, width):
        needed = f"{classes} x {width}, the classes and the option width"
        raise CompositionError(f"anchors: {path} holds {_size(rows)}; needed are {needed}")
    if not np.isfinite(rows).all():
        raise CompositionError(f"anchors: {path} holds values that are not finite")
    return _tensor(rows)


def _matrix(path: Path) -> np.ndarray:
    try:
        arrays = _arrays(path)
    except (ValueError, OSError) as error:
        raise CompositionError(f"anchors: {path} cannot be read: {error}") from error
    return _only(path, arrays)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return {name: tensor.float().numpy() for name, tensor in load_file(path).items()}
        except SafetensorError as error:
            raise ValueError(str(error)) from error
    found = np.load(path, allow_pickle=False)
    return {"anchors": found} if isinstance(found, np.ndarray) else dict(found)


def _only(path: Path, arrays: dict[str, np.ndarray]) -> np.ndarray:
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    if "anchors" in arrays:
        return arrays["anchors"]
    raise CompositionError(f"anchors: {path} holds {', '.join(arrays) or 'nothing'}; call the matrix 'anchors'")


def check_named(named: str) -> None:
    """Refuse anchors from names that this machine cannot make."""
    if named == WORDLLAMA and find_spec(WORDLLAMA) is None:
        raise CompositionError(
            f"anchors = {WORDLLAMA!r} needs the package wordllama: pip install 'everfed[text]', or use {NAMES!r}"
        )


def anchors_of(named: str, names: Sequence[str], width: int) -> Tensor:
    """(names, width) anchors from class names; named: one of FROM_NAMES."""
    check_named(named)
    return sentence_anchors(names, width) if named == WORDLLAMA else hashed_names(names, width)


def sentence_anchors(names: Sequence[str], width: int) -> Tensor:
    """(names, width) embeddings of the names by the sentence encoder WordLlama, whose weights come with its package:
    names of similar meaning lie closer. A fixed rotation turns its 256 numbers into `width`; from 256 on it keeps all
    distances, below it is a random projection."""
    from everfed.data.encoders import WordLlamaEncoder

    rows = WordLlamaEncoder().encode([name.replace("_", " ") for name in names]).astype(np.float64)
    turned = rows @ _rotation(rows.shape[1], width)
    lengths = np.maximum(np.linalg.norm(turned, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return _tensor(SPREAD * np.sqrt(width) * turned / lengths)


def _rotation(inputs: int, outputs: int) -> np.ndarray:
    """(inputs, outputs) with orthonormal rows, or columns where these are fewer."""
    drawn = np.random.default_rng(SEED).normal(size=(max(inputs, outputs), min(inputs, outputs)))
    basis = np.linalg.qr(drawn)[0]
    return basis if inputs >= outputs else basis.T


def hashed_names(names: Sequence[str], width: int) -> Tensor:
    """(names, width) every name as a sum of fixed random vectors of its letter triples: names that share triples lie
    closer."""
    return _tensor(np.array([_hashed(name, width) for name in names]).reshape(len(names), width))


def _hashed_lines(path: Path, width: int) -> np.ndarray:
    lines = path.read_text(encoding="utf-8").splitlines()
    return hashed_names([line.strip() for line in lines if line.strip()], width).numpy()


def _hashed(name: str, width: int) -> np.ndarray:
    text = f"^{name.lower()}$"
    grams = [text[i : i + GRAM] for i in range(max(len(text) - GRAM + 1, 1))]
    total = sum((_vector(gram, width) for gram in grams), np.zeros(width))
    return SPREAD * total / np.sqrt(len(grams))


def _vector(gram: str, width: int) -> np.ndarray:
    digest = hashlib.blake2b(gram.encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).normal(size=width)


def _tensor(rows: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32))


def _size(rows: np.ndarray) -> str:
    return " x ".join(map(str, rows.shape))
