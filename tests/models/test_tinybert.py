"""TinyBERT: its size to the parameter, and the same numbers as an independent implementation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from everfed import models
from everfed.core.layout import Layout
from everfed.models.tinybert import TinyBERT


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_the_size_is_that_of_the_paper() -> None:
    """14.35 M with BERT's vocabulary: without a pooler (312 x 312 + 312 = 97,656) that is 14,252,592."""
    module = TinyBERT((32,), 30_522)
    assert parameters(module.embedding) + parameters(module.layers) + 97_656 == 14_350_248
    assert parameters(module) == 14_381_394
    assert Layout.of(module).size == 14_381_394  # tied weights count once


SMALL = {"layers": 2, "width": 24, "heads": 3, "feed_forward": 40, "positions": 16}


def small(vocabulary: int = 50, length: int = 10, seed: int = 0, **options: object) -> nn.Module:
    return models.build("tinybert", (length,), vocabulary, seed, {**SMALL, **options})


NAMES = {
    "embedding.words": "bert.embeddings.word_embeddings",
    "embedding.positions": "bert.embeddings.position_embeddings",
    "embedding.segments": "bert.embeddings.token_type_embeddings",
    "embedding.norm": "bert.embeddings.LayerNorm",
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "wide": "intermediate.dense",
    "narrow": "output.dense",
    "norm": "output.LayerNorm",
    "head.map": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head": "cls.predictions",
}


def theirs(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{leaf}"
    _, index, inner = module.split(".", 2)
    return f"bert.encoder.layer.{index}.{NAMES[inner]}.{leaf}"


def test_it_computes_what_bert_for_masked_lm_computes() -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'everfed[text]'")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
        max_position_embeddings=16,
    )  # fmt: skip
    reference = transformers.BertForMaskedLM(config).eval()
    ours = small().eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.3)
    weights = {theirs(name): value for name, value in ours.state_dict().items()}
    weights["cls.predictions.decoder.weight"] = ours.embedding.words.weight
    weights["cls.predictions.decoder.bias"] = ours.head.bias
    missing, unexpected = reference.load_state_dict(weights, strict=False)
    assert not unexpected and all("position_ids" in name for name in missing)
    tokens = torch.randint(1, 50, (4, 10))
    tokens[0, 6:] = 0
    expected = reference(tokens, attention_mask=(tokens != 0).long()).logits
    torch.testing.assert_close(ours(tokens), expected, rtol=1e-4, atol=1e-4)


def test_padding_changes_nothing() -> None:
    module = small().eval()
    tokens = torch.tensor([[2, 9, 17, 3]])
    padded = torch.tensor([[2, 9, 17, 3, 0, 0, 0]])
    torch.testing.assert_close(module(padded)[:, :4], module(tokens), rtol=1e-5, atol=1e-6)


def test_first_weights_come_from_the_seed_alone() -> None:
    assert torch.equal(small(seed=3).head.map.weight, small(seed=3).head.map.weight)
    assert not torch.equal(small(seed=3).head.map.weight, small(seed=4).head.map.weight)
    words = small().embedding.words.weight
    assert not words[0].any()
    assert float(words[1:].std()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"width": 25}, "multiple of heads"), ({"positions": 8}, "positions = 8 are fewer than the 10 tokens")],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, int], problem: str) -> None:
    with pytest.raises(models.ModelError, match=problem):
        small(**options)
    with pytest.raises(models.ModelError, match="samples of shape"):
        models.build("tinybert", (1, 28, 28), 10, 0)
