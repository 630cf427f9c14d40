"""Frozen encoders: texts or images in, one vector each out. A linear layer is trained on the vectors.

`distilbert` is what FedGP's Table 6 uses: the first token's vector of the last layer. Its weights are not part of
everfed. `wordllama` is a small sentence encoder whose weights come with its package. `hashing` needs none: signed
hashed word counts, the same on every machine and every client.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from everfed.data import transforms
from everfed.data.source import Source, make_source
from everfed.data.texts import Texts
from everfed.errors import DataError, optional_package
from everfed.naming import load_object, places, require_network
from everfed.store.files import digest, file_digest, make_folder, write_atomic

AUTO, HASHING, WORDLLAMA, DISTILBERT, HUB, TOKENS = "auto", "hashing", "wordllama", "distilbert", "hub:", "tokens:"
FOLDERS = ("distilbert-base-uncased", "distilbert")  # possible folders of DistilBERT below the data folder
_LENGTH = 128  # tokens; longer texts are cut
_BATCH = 64
_MOST_DIMENSIONS = 2**16
NORM = 10.0  # about the length of a transformer's vectors, so that the same learning rates fit a linear layer on any


@runtime_checkable
class Encoder(Protocol):
    """Turns texts into vectors."""

    @property
    def name(self) -> str:
        """For reports."""

    @property
    def fingerprint(self) -> str:
        """Of all that decides its vectors; the cache is keyed by it."""

    def encode(self, texts: Any) -> np.ndarray:
        """(n, d) float32 of n texts, or of uint8 images (n, channels, height, width)."""


@dataclass(frozen=True)
class HashingEncoder:
    """Words of a text without English stop words, each counted once, hashed with a sign into `dimensions` numbers (a
    sparse random projection of the bag of words), and brought to length `norm`."""

    dimensions: int = 2048
    norm: float = NORM

    def __post_init__(self) -> None:
        if not 1 <= self.dimensions <= _MOST_DIMENSIONS:
            raise DataError(f"stream.encoder: hashing needs 1 to {_MOST_DIMENSIONS} dimensions; got {self.dimensions}")

    @property
    def name(self) -> str:
        return f"{HASHING}:{self.dimensions}"

    @property
    def fingerprint(self) -> str:
        return f"{self.name} norm {self.norm:g} version 1"

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        from sklearn.feature_extraction.text import HashingVectorizer

        hashed = HashingVectorizer(n_features=self.dimensions, stop_words="english", binary=True, norm="l2")
        vectors: np.ndarray = hashed.transform(texts).astype(np.float32).toarray()
        return self.norm * vectors


class WordLlamaEncoder:
    """The mean of a text's token vectors, 256 numbers each, made from a language model's, brought to length NORM.
    Weights and tokenizer are part of the package wordllama (MIT licence); nothing is downloaded."""

    name = f"{WORDLLAMA}:256"

    def __init__(self) -> None:
        wordllama = optional_package(WORDLLAMA, "text", "stream.encoder", DataError)
        # the package searches for its tokenizer in a cache folder only: set to the package itself
        here = Path(wordllama.__file__).parent
        self._model = wordllama.WordLlama.load(cache_dir=here, disable_download=True)

    @property
    def fingerprint(self) -> str:
        return f"{self.name} {metadata.version(WORDLLAMA)} norm {NORM:g}"

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        if not texts:
            return np.zeros((0, 256), np.float32)
        vectors: np.ndarray = self._model.embed(list(texts))
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)  # an empty text stays at zero
        return (NORM * vectors / np.maximum(lengths, 1e-12)).astype(np.float32)


class TransformerEncoder:
    """A text's vector by a transformer in eval mode: its first token's of the last layer, or, where the folder says so
    (1_Pooling/config.json of sentence-transformers), the mean or the maximum over its tokens. Vectors that are to be
    normalised (modules.json) get length NORM. place: a folder with config.json, tokenizer and model.safetensors, or a
    model of the Hugging Face hub, which is then downloaded."""

    def __init__(self, place: str) -> None:
        self.place, self.name = place, f"transformer:{Path(place).name if Path(place).is_dir() else place}"
        self._loaded: tuple[Any, Any] | None = None

    @property
    def fingerprint(self) -> str:
        """Of the weights themselves, where they are at hand, and of what is done with them."""
        weights = Path(self.place) / "model.safetensors"
        pooling, length = self._pooling()
        how = {"cls": "first token"}.get(pooling, pooling) + (" normalised" if length else "")
        return f"{self.name} {file_digest(weights) if weights.is_file() else ''} {how} of {_LENGTH}"

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        tokenizer, model = self._load()
        pooling, normalised = self._pooling()
        found = []
        with torch.no_grad():
            for batch in _batches(texts):
                tokens = tokenizer(batch, padding=True, truncation=True, max_length=_LENGTH, return_tensors="pt")
                kept = {key: tokens[key] for key in ("input_ids", "attention_mask")}
                found.append(_POOLINGS[pooling](model(**kept).last_hidden_state.float(), kept["attention_mask"]))
        vectors = torch.cat(found) if found else torch.zeros(0, model.config.hidden_size)
        made: np.ndarray = (NORM * torch.nn.functional.normalize(vectors) if normalised else vectors).numpy()
        return made

    def _pooling(self) -> tuple[str, bool]:
        """(how tokens become one vector, is it normalised?), as the files of sentence-transformers say."""
        modules, pooling = self._described("modules.json") or [], self._described("1_Pooling/config.json") or {}
        chosen = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value]
        names = [key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for key in chosen]
        if len(names) > 1 or set(names) - set(_POOLINGS):
            raise DataError(
                f"stream.encoder: {self.place} pools by {', '.join(chosen)}; one of {', '.join(_POOLINGS)} is needed"
            )
        return (names or ["cls"])[0], any(one["type"].endswith("Normalize") for one in modules)

    def _described(self, name: str) -> Any:
        """The content of a JSON file beside the weights; None where there is none."""
        path = Path(self.place) / name
        return json.loads(path.read_text()) if path.is_file() else None

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            transformers = _transformers()
            try:
                tokenizer = transformers.AutoTokenizer.from_pretrained(self.place, local_files_only=True)
                # safetensors only: other weight files are pickles
                model = transformers.AutoModel.from_pretrained(self.place, local_files_only=True, use_safetensors=True)
            except (OSError, ValueError, json.JSONDecodeError) as problem:
                raise DataError(f"stream.encoder: {self.place} cannot be loaded ({problem})") from problem
            self._loaded = tokenizer, model.eval()
        return self._loaded


# (n, length, d) of the last layer, (n, length) mask of the text's tokens -> (n, d)
_POOLINGS: dict[str, Callable[[Any, Any], Any]] = {
    "cls": lambda hidden, mask: hidden[:, 0],
    "mean": lambda hidden, mask: (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True),
    "max": lambda hidden, mask: hidden.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).amax(1),
}


class TokenEncoder:
    """No vectors but tokens: the first `length` of every text, padded, for a network that reads tokens. place: a folder
    with a tokenizer of transformers."""

    tokens = True

    def __init__(self, place: Path, length: int) -> None:
        self.place, self.length = place, length
        self.name = f"{TOKENS}{length}:{place.name}"

    @property
    def fingerprint(self) -> str:
        kept = [self.place / name for name in ("tokenizer.json", "vocab.txt", "tokenizer_config.json")]
        return f"{self.name} {' '.join(file_digest(path) for path in kept if path.is_file())}"

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        try:
            tokenizer = _transformers().AutoTokenizer.from_pretrained(self.place, local_files_only=True)
        except (OSError, ValueError) as problem:
            raise DataError(f"stream.encoder: {self.place} holds no tokenizer ({problem})") from problem
        if tokenizer.pad_token_id is None:
            raise DataError(f"stream.encoder: the tokenizer in {self.place} names no pad_token")
        shape: dict[str, Any] = {"padding": "max_length", "truncation": True, "max_length": self.length}
        rows = [row for batch in _batches(texts) for row in tokenizer(batch, **shape)["input_ids"]]
        return np.array(rows, dtype=np.float32).reshape(len(texts), self.length)


class ImageEncoder:
    """The first token's vector of a vision transformer's last layer, in eval mode, of images brought to its size and
    number of channels, and normalised as its preprocessor_config.json says (else mean and deviation 0.5). folder: with
    config.json and model.safetensors."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, f"transformer:{folder.name}"

    @property
    def fingerprint(self) -> str:
        kept = [self.folder / name for name in ("config.json", "preprocessor_config.json", "model.safetensors")]
        return f"{self.name} {' '.join(file_digest(path) for path in kept if path.is_file())} first token of images"

    def encode(self, texts: np.ndarray) -> np.ndarray:
        transformers = _transformers()
        try:
            model = transformers.AutoModel.from_pretrained(self.folder, local_files_only=True, use_safetensors=True)
        except (OSError, ValueError) as problem:
            raise DataError(f"stream.encoder: {self.folder} cannot be loaded ({problem})") from problem
        described = self.folder / "preprocessor_config.json"
        table = json.loads(described.read_text()) if described.is_file() else {}
        mean, std = (tuple(table.get(key, (0.5,))) for key in ("image_mean", "image_std"))
        channels = int(getattr(model.config, "num_channels", 3))
        found = []
        with torch.no_grad():
            for batch in torch.from_numpy(texts).split(_BATCH):
                images = transforms.to_format(batch, channels, int(model.config.image_size))
                outputs = model.eval()(pixel_values=transforms.scale(images, mean, std))
                found.append(outputs.last_hidden_state[:, 0].float().numpy())
        return np.concatenate(found)


def is_of_texts(spec: str) -> bool:
    """Does `stream.encoder = spec` name an encoder that is for texts alone?"""
    return spec in (AUTO, WORDLLAMA, DISTILBERT) or spec.partition(":")[0] == HASHING or spec.startswith((HUB, TOKENS))


def make_image_encoder(spec: str, folder: Path | None) -> Encoder:
    """The encoder of images that `stream.encoder = spec` names: the folder of a vision transformer, absolute or below
    the data folder, or package.module:Name. Raises DataError."""
    found = places(spec, folder)
    for place in found:
        if (place / "model.safetensors").is_file():
            return ImageEncoder(place)
    if ":" in spec:
        return _own(spec)
    raise DataError(
        f"stream.encoder: {spec!r} was not found; for images it is a folder with config.json and model.safetensors "
        f"(looked at: {', '.join(map(str, found))}), or package.module:Name with encode(images)"
    )


def make_encoder(spec: str | None, folder: Path | None) -> Encoder:
    """The encoder that `stream.encoder = spec` names. Raises DataError.

    auto: DistilBERT if its weights are in the data folder, else WordLlama if it is installed, else hashing; result.json
    names the one that was used.
    """
    spec = AUTO if spec is None else spec
    weights = _distilbert(folder)
    if spec == AUTO:
        if weights:
            return TransformerEncoder(str(weights))
        return WordLlamaEncoder() if find_spec(WORDLLAMA) else HashingEncoder()
    if spec == WORDLLAMA:
        return WordLlamaEncoder()
    if spec == DISTILBERT:
        if weights is None:
            raise DataError(
                f"stream.encoder: no folder {' or '.join(FOLDERS)} with config.json, tokenizer and model.safetensors "
                f"is in the data folder; get it from https://huggingface.co/distilbert/distilbert-base-uncased, or "
                f"use '{HUB}distilbert/distilbert-base-uncased', '{WORDLLAMA}' or '{HASHING}'"
            )
        return TransformerEncoder(str(weights))
    if spec.partition(":")[0] == HASHING:
        return _hashing(spec)
    if spec.startswith(TOKENS):
        return _tokens(spec, folder)
    if spec.startswith(HUB):
        require_network(spec)
        return TransformerEncoder(_downloaded(spec.removeprefix(HUB)))
    found = next((place for place in places(spec, folder) if place.is_dir()), None)
    if found is not None:
        return TransformerEncoder(str(found))
    return _own(spec)


def _hashing(spec: str) -> HashingEncoder:
    _, given, dimensions = spec.partition(":")
    if not given:
        return HashingEncoder()
    if not dimensions.isdecimal():
        raise DataError(f"stream.encoder: {spec!r}: expected {HASHING}:<dimensions>, such as {HASHING}:2048")
    return HashingEncoder(int(dimensions))


def _tokens(spec: str, folder: Path | None) -> TokenEncoder:
    length, _, name = spec.removeprefix(TOKENS).partition(":")
    if not length.isdecimal() or not int(length) or not name:
        raise DataError(f"stream.encoder: {spec!r}: expected {TOKENS}LENGTH:FOLDER, such as {TOKENS}32:wheel:minilm")
    found = places(name, folder)
    place = next((one for one in found if one.is_dir()), None)
    if place is None:
        raise DataError(f"stream.encoder: {spec!r}: no folder at {', '.join(map(str, found))}")
    return TokenEncoder(place, int(length))


def _own(spec: str) -> Encoder:
    if ":" not in spec:
        raise DataError(
            f"stream.encoder: {spec!r} is not one of the allowed values: {AUTO}, {DISTILBERT}, {WORDLLAMA}, {HASHING}, "
            f"{HASHING}:<dimensions>, {HUB}<owner/model>, {TOKENS}<length>:<folder>, the folder of a "
            "transformer, or package.module:Name"
        )
    made = load_object(spec, "stream.encoder")()
    if not isinstance(made, Encoder):
        raise DataError(f"stream.encoder: {spec!r} needs the attributes name and fingerprint, and encode(texts)")
    return made


def _distilbert(folder: Path | None) -> Path | None:
    places = [folder / name for name in FOLDERS] if folder else []
    return next((place for place in places if (place / "model.safetensors").is_file()), None)


def _transformers() -> Any:
    return optional_package("transformers", "text", "stream.encoder", DataError)


def _downloaded(name: str) -> str:
    """The folder of a model of the hub, with its weights, its tokenizer and what says how tokens are pooled."""
    _transformers()
    import huggingface_hub

    try:
        kept = ["*.json", "*.txt", "*.model", "model*.safetensors"]
        return huggingface_hub.snapshot_download(name, allow_patterns=kept)
    except (OSError, ValueError) as problem:
        raise DataError(f"stream.encoder: {HUB}{name} cannot be downloaded ({problem})") from problem


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    for first in range(0, len(texts), _BATCH):
        yield list(texts[first : first + _BATCH])


# features, computed once ---------------------------------------------------------------------------------------------
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
    return digest("\x00".join(items).encode())


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
