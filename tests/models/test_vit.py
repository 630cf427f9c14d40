"""The Vision Transformer: its sizes, the numbers of an independent implementation, and prefixes of its attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from everfed import models
from everfed.models.vit import Attention, ViT, own_names
from everfed.parts.shared.features import head, through_head

NANO = {"patch": 2, "width": 64, "depth": 3, "heads": 4}
TINY = {"patch": 4, "width": 24, "depth": 2, "heads": 3}


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_sizes_to_the_parameter() -> None:
    """ViT-B/16 at 224 pixels: 85,798,656 without the head, 85,875,556 with one of 100 classes."""
    assert parameters(ViT((1, 8, 8), 10, **NANO)) == 152_202
    assert parameters(ViT((3, 32, 32), 100)) == 2_710_948
    with torch.device("meta"):
        base = ViT((3, 224, 224), 100, patch=16, width=768, depth=12, heads=12)
    assert parameters(base) == 85_875_556
    assert parameters(base) - parameters(base.head) == 85_798_656


def test_it_computes_what_hugging_faces_vit_computes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'everfed[text]'")
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96, image_size=16, patch_size=4,
        num_channels=3, layer_norm_eps=1e-6, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    reference = transformers.ViTModel(config, add_pooling_layer=False).eval()
    ours = models.build("vit", (3, 16, 16), 10, 0, TINY).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(std=0.3)
    reference.save_pretrained(tmp_path)
    found = own_names(load_file(tmp_path / "model.safetensors"))
    assert set(found) == {name for name in ours.state_dict() if not name.startswith("head")}
    ours.load_state_dict(found, strict=False)
    x = torch.randn(4, 3, 16, 16)
    expected = reference(x).last_hidden_state[:, 0]
    torch.testing.assert_close(ours.features(x), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours(x), functional.linear(expected, ours.head.weight, ours.head.bias))


def test_names_of_timm_stay_as_they_are() -> None:
    weights = models.build("vit", (3, 16, 16), 10, 0, TINY).state_dict()
    assert own_names(weights) == weights


def test_features_are_the_input_of_the_head() -> None:
    module = models.build("vit", (3, 16, 16), 10, 0, TINY).eval()
    x = torch.randn(2, 3, 16, 16)
    assert head(module) is module.head
    assert torch.equal(through_head(module, x)[1], module.features(x))


def test_a_prefix_of_zeros_takes_part_of_the_attention() -> None:
    """One head, scores s_j, L / 2 keys and values of zero: out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + L / 2)."""
    layer = Attention(4, 1).eval()
    layer.proj.load_state_dict({"weight": torch.eye(4), "bias": torch.zeros(4)})
    x, length = torch.randn(1, 5, 4), 3
    q, k, v = layer.qkv(x).chunk(3, -1)
    weights = (q @ k.transpose(1, 2) / 4**0.5).exp()
    expected = weights @ v / (weights.sum(-1, keepdim=True) + length)
    torch.testing.assert_close(layer(x, (torch.zeros(1, length, 4),) * 2), expected)


def test_a_prefix_of_length_zero_changes_nothing() -> None:
    module = models.build("vit", (3, 16, 16), 10, 0, TINY).eval()
    tokens = module.embed(torch.randn(2, 3, 16, 16))
    empty = torch.zeros(2, 0, 24)
    assert torch.equal(module.run_blocks(tokens, {0: (empty, empty)}), module.run_blocks(tokens))


def test_images_are_resized_where_image_says_so() -> None:
    module = models.build("vit", (3, 16, 16), 10, 0, {**TINY, "image": 32})
    assert module.pos_embed.shape == (1, 65, 24) and module(torch.zeros(2, 3, 16, 16)).shape == (2, 10)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3, 16, 12), {}, "square images"),
        ((3, 16, 16), {"patch": 5}, "a multiple of patch; got 16 pixels a side, patch = 5"),
        ((3, 16, 16), {"heads": 5}, "width = 24, heads = 5"),
        ((3, 16, 16), {"image": 30}, "got 30 pixels a side, patch = 4"),
    ],
)
def test_what_cannot_be_built_is_refused(shape: tuple[int, ...], options: dict[str, int], message: str) -> None:
    with pytest.raises(models.ModelError, match=message):
        models.build("vit", shape, 10, 0, {**TINY, **options})
