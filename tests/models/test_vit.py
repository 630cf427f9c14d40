"""The Vision Transformer: its sizes, the numbers of an independent implementation, and prefixes of its attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from everfed import models
from everfed.methods.common.layers import head, through_head
from everfed.models.vit import Attention, Prompts, ViT, own_names, resized_positions

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
        num_channels=3, layer_norm_eps=1e-2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    reference = transformers.ViTModel(config, add_pooling_layer=False).eval()
    ours = models.build("vit", (3, 16, 16), 10, 0, TINY).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(std=0.3)
    reference.save_pretrained(tmp_path)
    found = ours.converted(load_file(tmp_path / "model.safetensors"), config.to_dict())
    assert set(found) == {name for name in ours.state_dict() if not name.startswith("head")}
    ours.load_state_dict(found, strict=False)
    x = torch.randn(4, 3, 16, 16)
    expected = reference(x).last_hidden_state[:, 0]
    torch.testing.assert_close(ours.features(x), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours(x), functional.linear(expected, ours.head.weight, ours.head.bias))


def test_names_of_timm_stay_as_they_are() -> None:
    weights = models.build("vit", (3, 16, 16), 10, 0, TINY).state_dict()
    assert own_names(weights) == weights


def hugging_face_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of `ViT` as transformers' ViTModel names them, queries, keys and values apart."""
    layers = {
        "norm1": "layernorm_before", "attn.proj": "attention.output.dense", "norm2": "layernorm_after",
        "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense",
    }  # fmt: skip
    found = {"embeddings.cls_token": tensors["cls_token"], "embeddings.position_embeddings": tensors["pos_embed"]}
    for name, tensor in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if name.startswith("patch_embed"):
            found[f"embeddings.patch_embeddings.projection.{leaf}"] = tensor
        elif layer == "norm":
            found[f"layernorm.{leaf}"] = tensor
        elif name.startswith("blocks."):
            _, index, inner = layer.split(".", 2)
            where = f"encoder.layer.{index}"
            if inner == "attn.qkv":
                for which, rows in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                    found[f"{where}.attention.attention.{which}.{leaf}"] = rows.clone()
            else:
                found[f"{where}.{layers[inner]}.{leaf}"] = tensor
    return found


def test_weights_of_both_names_give_the_same_bits(tmp_path: Path) -> None:
    written = models.build("vit", (3, 16, 16), 10, 1, TINY)
    tensors = {name: value for name, value in written.state_dict().items() if not name.startswith("head")}
    save_file(tensors, tmp_path / "timm.safetensors")
    save_file(hugging_face_names(tensors), tmp_path / "hf.safetensors")
    x = torch.randn(2, 3, 16, 16)
    found = [
        models.build("vit", (3, 16, 16), 10, 0, {**TINY, "weights": str(tmp_path / f"{names}.safetensors")}).eval()
        for names in ("timm", "hf")
    ]
    assert torch.equal(found[0].features(x), written.eval().features(x))
    assert torch.equal(found[0](x), found[1](x))


def test_a_file_of_another_image_size_has_its_positions_interpolated(tmp_path: Path) -> None:
    """Bicubic, the class token's apart: what is linear in the place stays so, away from the borders."""
    written = models.build("vit", (3, 32, 32), 10, 1, TINY)
    place = torch.arange(8.0)
    with torch.no_grad():
        written.pos_embed[0, 0] = 7.0
        written.pos_embed[0, 1:, 0] = place.repeat_interleave(8)  # the row
        written.pos_embed[0, 1:, 1] = 3.0
    save_file(written.state_dict(), tmp_path / "model.safetensors")
    options = {**TINY, "weights": str(tmp_path)}
    found = models.build("vit", (3, 64, 64), 10, 0, options).pos_embed[0]
    assert torch.equal(found[0], torch.full((24,), 7.0))
    rows = found[1:, 0].reshape(16, 16)
    torch.testing.assert_close(rows[4:12], (torch.arange(4.0, 12.0) / 2 - 0.25).unsqueeze(1).expand(8, 16))
    torch.testing.assert_close(found[1:, 1], torch.full((256,), 3.0))
    same = models.build("vit", (3, 32, 32), 10, 0, options)
    assert torch.equal(same.pos_embed, written.pos_embed)


def test_timm_interpolates_positions_in_the_same_way() -> None:
    timm = pytest.importorskip("timm", reason="needs timm and torchvision", exc_type=ImportError)
    positions = torch.randn(1, 1 + 49, 12)
    expected = timm.layers.resample_abs_pos_embed(positions, new_size=[4, 4], num_prefix_tokens=1)
    torch.testing.assert_close(resized_positions(positions, 17), expected)


def test_it_computes_what_timms_vit_computes(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm", reason="needs timm and torchvision", exc_type=ImportError)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 10}
    reference = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(std=0.3)
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    x = torch.randn(4, 3, 16, 16)
    ours = models.build("vit", (3, 16, 16), 10, 0, {**TINY, "weights": str(tmp_path)}).eval()
    torch.testing.assert_close(ours(x), reference(x), rtol=1e-5, atol=1e-5)
    again = models.build("timm:vit_tiny_patch16_224", (3, 16, 16), 10, 0, {**sizes, "weights": str(tmp_path)}).eval()
    assert torch.equal(again(x), reference(x))


def test_prompts_without_a_forward_pass_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (Prompts,), {})()


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
