"""Label anchors: from files in three formats, from names, or random; never downloaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from everfed import CompositionError
from everfed.methods.generative import anchors as anchors_module
from everfed.methods.generative.anchors import anchors_of, hashed_names, read_anchors, sentence_anchors

ROWS = np.arange(12, dtype=np.float64).reshape(3, 4) / 7


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.safetensors"])
def test_every_format_gives_the_same_matrix(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.endswith("npy"):
        np.save(path, ROWS)
    elif name.endswith("npz"):
        np.savez(path, anchors=ROWS, other=np.zeros(1))
    else:
        save_file({"text": torch.from_numpy(ROWS).half()}, path)
    tolerance = 1e-3 if name.endswith("safetensors") else 0
    torch.testing.assert_close(read_anchors(str(path), 3, 4), torch.from_numpy(ROWS).float(), rtol=0, atol=tolerance)


def test_random_anchors_have_the_spread_of_text_features_and_never_change() -> None:
    anchors = read_anchors("gaussian", 100, 512)
    assert float(anchors.std()) == pytest.approx(0.43, abs=0.01)
    assert torch.equal(read_anchors("gaussian", 100, 512), anchors)
    apart = torch.cdist(anchors, anchors).square() / 512  # mean squared errors
    assert float(apart[~torch.eye(100, dtype=torch.bool)].min()) > 0.015  # a radius around one holds no other


def test_names_that_share_parts_lie_closer(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("maple_tree\noak_tree\n\nrocket\n")
    anchors = read_anchors(str(path), 3, 512)
    assert torch.equal(anchors, hashed_names(["maple_tree", "oak_tree", "rocket"], 512))
    assert float(hashed_names([f"class {i}" for i in range(50)], 512).std()) == pytest.approx(0.43, abs=0.02)
    trees, other = (float((anchors[0] - anchors[i]).square().mean()) for i in (1, 2))
    assert trees < other


NAMES = ["maple_tree", "oak_tree", "rocket", "lion", "sea", "cloud", "bus"]


@pytest.mark.parametrize("width", [512, 256, 64])
def test_a_sentence_encoder_brings_meaning(width: int) -> None:
    pytest.importorskip("wordllama", reason="pip install 'everfed[text]'")
    anchors = sentence_anchors(NAMES, width)
    assert anchors.shape == (7, width) and anchors.dtype == torch.float32
    torch.testing.assert_close(anchors.norm(dim=1), torch.full((7,), 0.43 * width**0.5))
    alike = torch.nn.functional.cosine_similarity(anchors[:1], anchors[1:])
    assert alike.argmax().item() == 0 and alike[0] > 0.4  # an oak is the nearest to a maple
    apart = torch.cdist(anchors, anchors).square() / width
    assert float(apart[~torch.eye(7, dtype=torch.bool)].min()) > 0.015  # a radius around one holds no other
    assert torch.equal(sentence_anchors(NAMES, width), anchors)


def test_the_rotation_keeps_all_distances() -> None:
    pytest.importorskip("wordllama", reason="pip install 'everfed[text]'")
    small, large = (sentence_anchors(NAMES, width) for width in (256, 512))
    torch.testing.assert_close(torch.cdist(small, small) * 2**0.5, torch.cdist(large, large), rtol=1e-4, atol=1e-3)


def test_without_the_encoders_package_the_error_names_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors_module, "find_spec", lambda name: None)
    with pytest.raises(CompositionError, match=r"pip install 'everfed\[text\]', or use 'names'"):
        anchors_of("wordllama", NAMES, 8)
    assert torch.equal(anchors_of("names", NAMES, 8), hashed_names(NAMES, 8))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "clip",
            "must be 'gaussian', 'names', 'wordllama' or a file ending in .npy, .npz, .safetensors, .txt; got 'clip'",
        ),
        ("missing.npy", "there is no file missing.npy"),
    ],
)
def test_what_is_no_file_is_refused(name: str, message: str) -> None:
    with pytest.raises(CompositionError, match=message):
        read_anchors(name, 3, 4)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, ROWS)
    with pytest.raises(CompositionError, match="holds 3 x 4; needed are 10 x 4"):
        read_anchors(str(path), 10, 4)
    np.save(path, np.full((3, 4), np.nan))
    with pytest.raises(CompositionError, match="not finite"):
        read_anchors(str(path), 3, 4)
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(CompositionError, match="cannot be read"):
        read_anchors(str(path), 3, 4)
    two = tmp_path / "two.npz"
    np.savez(two, a=ROWS, b=ROWS)
    with pytest.raises(CompositionError, match="holds a, b; call the matrix 'anchors'"):
        read_anchors(str(two), 3, 4)
    broken = tmp_path / "a.safetensors"
    broken.write_bytes(b"nothing")
    with pytest.raises(CompositionError, match="cannot be read"):
        read_anchors(str(broken), 3, 4)
