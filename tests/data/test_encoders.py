"""Frozen encoders and their cache."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from everfed import models, streams
from everfed.data import load
from everfed.data.encoders import HashingEncoder, TransformerEncoder, features, make_encoder
from everfed.errors import DataError
from everfed.streams.options import OptionError

TEXTS = ("The quick brown fox", "a slow green turtle", "")


class Counting:
    """An encoder that counts its calls; also one of a user's own, named as package.module:Name."""

    name, fingerprint = "counting", "counting 1"

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        self.calls += 1
        return np.array([[len(text), self.calls] for text in texts], dtype=np.float32).reshape(-1, 2)


class Wrong(Counting):
    def encode(self, texts: Sequence[str]) -> np.ndarray:
        return np.zeros((1, 2))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVERFED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_hashing_is_a_function_of_the_text_alone() -> None:
    encoder = HashingEncoder(64)
    vectors = encoder.encode(TEXTS)
    assert vectors.shape == (3, 64) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [10.0, 10.0, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(vectors[1], encoder.encode([TEXTS[1]])[0])
    # neither case, order, repetition nor stop words matter
    np.testing.assert_array_equal(encoder.encode(["fox fox BROWN the quick"]), vectors[:1])


def test_wordllama_knows_what_texts_are_about() -> None:
    pytest.importorskip("wordllama", reason="pip install 'everfed[text]'")
    encoder = make_encoder("wordllama", None)
    assert encoder.name == make_encoder(None, None).name == "wordllama:256"
    vectors = encoder.encode(["a boat on the sea", "the ship sails the ocean", "income tax and bank accounts", ""])
    assert vectors.shape == (4, 256) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1)[:3], 10.0, rtol=1e-5)
    assert np.isfinite(vectors).all()
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]  # no word in common but "the"
    np.testing.assert_allclose(vectors[:1], encoder.encode(["a boat on the sea"]), atol=1e-5)
    assert encoder.encode([]).shape == (0, 256)


def test_a_missing_wordllama_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wordllama", None)
    with pytest.raises(DataError, match=r"needs the package wordllama.*everfed\[text\]"):
        make_encoder("wordllama", None)


def test_texts_that_share_words_lie_nearer() -> None:
    a, b, c = HashingEncoder().encode(["stock market price", "market price of gold", "football player goal"])
    assert a @ b > a @ c


def test_features_are_computed_once_per_encoder_and_texts(tmp_path: Path) -> None:
    encoder = Counting()
    first = features(encoder, TEXTS, tmp_path)
    again = features(encoder, TEXTS, tmp_path)
    assert encoder.calls == 1
    np.testing.assert_array_equal(first, again)
    features(encoder, TEXTS[:2], tmp_path)
    features(HashingEncoder(4), TEXTS, tmp_path)
    assert encoder.calls == 2 and len(list((tmp_path / "features").iterdir())) == 3


def test_a_damaged_file_is_computed_again(tmp_path: Path) -> None:
    encoder = Counting()
    features(encoder, TEXTS, tmp_path)
    (path,) = (tmp_path / "features").iterdir()
    path.write_bytes(path.read_bytes()[:70])
    assert features(encoder, TEXTS, tmp_path).tolist() == [[19, 2], [19, 2], [0, 2]]


def test_wrong_shapes_and_folders_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gave \(1, 2\) for 3 texts"):
        features(Wrong(), TEXTS, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="EVERFED_CACHE"):
        features(Counting(), TEXTS, tmp_path / "file")


def tiny_distilbert(folder: Path) -> Path:
    """A DistilBERT of random weights, in the files the hub has it in."""
    transformers = pytest.importorskip("transformers", reason="pip install 'everfed[text]'")
    folder.mkdir(parents=True)
    special, words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], ["the", "quick", "brown", "fox", "slow", "turtle"]
    words = special + words
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "DistilBertTokenizer"}))
    config = transformers.DistilBertConfig(vocab_size=len(words), dim=16, n_layers=1, n_heads=2, hidden_dim=32)
    transformers.DistilBertModel(config).save_pretrained(folder)
    return folder


def test_a_transformer_of_a_folder_gives_its_first_tokens_vector(tmp_path: Path) -> None:
    from transformers import AutoModel

    folder = tiny_distilbert(tmp_path / "distilbert-base-uncased")
    vectors = TransformerEncoder(str(folder)).encode(TEXTS)
    assert vectors.shape == (3, 16)
    with torch.no_grad():  # [CLS] the quick brown fox [SEP]
        hidden = AutoModel.from_pretrained(folder).eval()(torch.tensor([[2, 5, 6, 7, 8, 3]])).last_hidden_state
    np.testing.assert_allclose(vectors[0], hidden[0, 0].numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["mean_tokens", "max_tokens", "cls_token"])
def test_a_folder_of_sentence_transformers_is_pooled_as_it_says(mode: str, tmp_path: Path) -> None:
    """Over a text's own tokens, not over the padding of a batch."""
    folder = tiny_distilbert(tmp_path / "sentences")
    plain = TransformerEncoder(str(folder)).fingerprint
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{key}": key == mode for key in ("mean_tokens", "max_tokens", "cls_token")}
    (folder / "1_Pooling/config.json").write_text(json.dumps({**modes, "word_embedding_dimension": 16}))
    encoder = make_encoder("sentences", tmp_path)
    vectors = encoder.encode(["fox", "the quick brown fox"])
    hidden = encoder._load()[1](torch.tensor([[2, 8, 3]])).last_hidden_state[0].detach()
    expected = {"mean_tokens": hidden.mean(0), "max_tokens": hidden.amax(0), "cls_token": hidden[0]}[mode]
    np.testing.assert_allclose(vectors[0], expected.numpy(), rtol=1e-4, atol=1e-5)
    assert (encoder.fingerprint == plain) is (mode == "cls_token")


def test_normalised_vectors_have_one_length_and_odd_pooling_is_refused(tmp_path: Path) -> None:
    folder = tiny_distilbert(tmp_path / "sentences")
    (folder / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Normalize"}]))
    assert np.linalg.norm(TransformerEncoder(str(folder)).encode(TEXTS), axis=1) == pytest.approx(10.0)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_weightedmean_tokens": True}))
    with pytest.raises(DataError, match="pools by pooling_mode_weightedmean_tokens; one of cls, mean, max is needed"):
        TransformerEncoder(str(folder)).encode(TEXTS)


def test_tokens_for_a_network_that_reads_them(cache: Path, tmp_path: Path) -> None:
    """[CLS] = 2, [SEP] = 3, then padding = 0; the set is trained on as int64."""
    folder = tiny_distilbert(tmp_path / "bert")
    encoder = make_encoder("tokens:5:bert", tmp_path)
    assert encoder.encode(["quick fox", "the quick brown fox slow"]).tolist() == [[2, 6, 8, 3, 0], [2, 5, 6, 7, 3]]
    rows = [
        {"split": p, "label": i % 2, "text": "fox" if i % 2 else "turtle"} for p in ("train", "test") for i in range(8)
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"dataset": "mine", "scenario": "class-incremental", "tasks": 1, "clients": 1}
    stream = streams.build({**options, "encoder": "tokens:5:bert"}, 0, 1, tmp_path)
    assert stream.input_shape == (5,) and stream.data(0, 0).x.dtype == torch.int64
    model = models.build(f"hf:{folder}", (5,), 2, 0)
    assert model(stream.inputs(stream.data(0, 0).x)).shape == (8, 2)
    for spec, message in (("tokens:bert", "expected tokens:LENGTH:FOLDER"), ("tokens:5:none", "no folder at")):
        with pytest.raises(DataError, match=message):
            make_encoder(spec, tmp_path)


def test_auto_takes_distilbert_where_its_weights_are_and_hashing_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everfed.data.encoders.find_spec", lambda name: None)
    assert make_encoder(None, tmp_path).name == "hashing:2048"
    assert make_encoder("auto", None).name == "hashing:2048"
    with pytest.raises(DataError, match=r"huggingface.co/distilbert.*hashing"):
        make_encoder("distilbert", tmp_path)
    tiny_distilbert(tmp_path / "distilbert-base-uncased")
    for spec in ("auto", "distilbert"):
        assert make_encoder(spec, tmp_path).name == "transformer:distilbert-base-uncased"


def test_other_weights_have_another_fingerprint(tmp_path: Path) -> None:
    one = TransformerEncoder(str(tiny_distilbert(tmp_path / "a" / "distilbert")))
    other = TransformerEncoder(str(tiny_distilbert(tmp_path / "b" / "distilbert")))
    assert one.name == other.name and one.fingerprint != other.fingerprint


@pytest.mark.parametrize("spec", ["bert", "hashing:many", "hashing:0", "builtins:dict"])
def test_unknown_encoders_are_refused(spec: str) -> None:
    with pytest.raises(DataError, match=r"stream.encoder"):
        make_encoder(spec, None)


def test_an_encoder_of_ones_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_encoder(f"{__name__}:Counting", None).name == "counting"


def test_the_stream_says_which_encoder_made_its_features(cache: Path, tmp_path: Path) -> None:
    rows = [{"split": p, "label": i % 4, "text": f"word{i % 4} other{i}"} for p in ("train", "test") for i in range(40)]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"dataset": str(path), "scenario": "class-incremental", "tasks": 2, "clients": 2, "encoder": "hashing:32"}
    stream = streams.build({**options, "max_train": 20}, 0, 1)
    assert stream.describe()["encoder"] == "hashing:32" and stream.input_shape == (32,)
    assert sum(len(stream.data(client, task)) for client in range(2) for task in range(2)) == 20


def test_an_encoder_for_images_is_refused() -> None:
    with pytest.raises(OptionError, match=r"stream.encoder: digits has no texts"):
        streams.build({"dataset": "digits", "scenario": "class-incremental", "encoder": "hashing"}, 0, 1)


@pytest.mark.skipif("EVERFED_DATA" not in os.environ, reason="EVERFED_DATA names no folder of data sets")
@pytest.mark.parametrize(
    ("name", "classes", "train", "test"),
    [("yahooqa", 10, 200, 200), ("newsgroups", 20, 200, 200), ("dbpedia", 14, 210, 210), ("clinc150", 150, 300, 300)],
)
def test_real_sets(cache: Path, name: str, classes: int, train: int, test: int) -> None:
    from everfed.data.sources import TextOptions

    try:
        source = load(name, texts=TextOptions("hashing:256", train, test))
    except DataError as missing:
        pytest.skip(str(missing))
    assert source.classes == classes and source.x_train.shape == (train, 256) and source.x_test.shape == (test, 256)
    assert len(set(source.y_train.tolist())) == classes
