"""Image features: computed once by a frozen network, then a stream of vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from everfed.core.stream import Stream
from everfed.errors import DataError
from everfed.streams import OptionError, build

X = np.random.default_rng(0).integers(0, 256, (40, 3, 8, 8)).astype(np.uint8)
Y = np.arange(40) % 4


class Means:
    """Mean of every channel."""

    calls: ClassVar[int] = 0
    name, fingerprint = "means", "means 1"

    def encode(self, images: np.ndarray) -> np.ndarray:
        Means.calls += 1
        return images.mean((2, 3), dtype=np.float32)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVERFED_CACHE", str(tmp_path / "cache"))
    np.savez(tmp_path / "set.npz", x_train=X[:32], y_train=Y[:32], x_test=X[32:], y_test=Y[32:])
    np.savez(tmp_path / "rows.npz", x_train=X[:32, 0, 0], y_train=Y[:32], x_test=X[32:, 0, 0], y_test=Y[32:])
    return tmp_path


def stream(data: Path, encoder: str, dataset: str = "set", **options: Any) -> Stream:
    table = {
        "dataset": dataset,
        "scenario": "class-incremental",
        "tasks": 2,
        "clients": 2,
        "encoder": encoder,
        **options,
    }
    return build(table, 0, 1, data)


def test_features_are_computed_once(data: Path) -> None:
    before = Means.calls
    made, again = stream(data, f"{__name__}:Means"), stream(data, f"{__name__}:Means")
    assert Means.calls == before + 2  # the training part and the test part, the first time
    assert made.input_shape == (3,) and made.describe()["encoder"] == "means"
    held = made.data(0, 0)
    assert torch.equal(held.x, again.data(0, 0).x)
    np.testing.assert_allclose(held.x.numpy(), X[held.ids].mean((2, 3), dtype=np.float32))


def test_no_more_images_are_encoded_than_are_used(data: Path) -> None:
    made = stream(data, f"{__name__}:Means", max_train=12, max_test=4)
    held = [made.data(client, task) for client in range(2) for task in range(2)]
    assert sorted(label for one in held for label in one.y.tolist()) == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    kept = [np.load(path) for path in (data / "cache/features").iterdir()]
    assert sorted(map(len, kept)) == [4, 12]


def save_vit(folder: Path, **changes: int) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra `text` is not installed")
    sizes = {"image_size": 12, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.ViTConfig(**sizes, intermediate_size=8, **changes)
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(folder)


def test_a_vision_transformer_for_grey_images(data: Path) -> None:
    """The network's own number of channels counts, of colour images and of grey ones."""
    save_vit(data / "vit", num_channels=1)
    np.savez(data / "grey.npz", x_train=X[:32, 0], y_train=Y[:32], x_test=X[32:, 0], y_test=Y[32:])
    for dataset in ("set", "grey"):
        assert stream(data, "vit", dataset).input_shape == (16,)


def test_a_vision_transformer(data: Path) -> None:
    save_vit(data / "vit")
    made = stream(data, "vit")
    assert made.input_shape == (16,) and made.test(0).x.std() > 0
    assert torch.equal(stream(data, "vit").test(0).x, made.test(0).x)


def test_what_is_refused(data: Path) -> None:
    with pytest.raises(DataError, match=r"stream.encoder: 'nothing' was not found.*model.safetensors"):
        stream(data, "nothing")
    with pytest.raises(OptionError, match="neither texts nor images"):
        stream(data, f"{__name__}:Means", "rows")
