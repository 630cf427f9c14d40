"""ImageNet's folder: which images are used, and that they are decoded only when asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from everfed import streams
from everfed.data import imagenet
from everfed.data.errors import DataError
from everfed.data.imagenet import Pictures, load_imagenet

PIL = pytest.importorskip("PIL.Image", reason="decoding images needs the package Pillow")


def folder(root: Path, classes: int = 3, images: int = 7, place: str = "imagenet/train") -> Path:
    """Class k has images of brightness 10 k + its number, none of them square."""
    for label in range(classes):
        below = root / place / f"n{label:08d}"
        below.mkdir(parents=True)
        for number in range(images):
            grey = np.full((40, 50, 3), 10 * label + number, np.uint8)
            PIL.fromarray(grey).save(below / f"{number:03d}.png")
    return root


@pytest.mark.parametrize("place", imagenet.FOLDERS)
def test_the_first_train_and_the_next_test(tmp_path: Path, place: str) -> None:
    source = load_imagenet("imagenet-32", folder(tmp_path, place=place), train=4, test=2)
    assert (len(source.x_train), len(source.x_test), source.classes) == (12, 6, 3)
    assert source.y_train.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert source.class_names == ("n00000000", "n00000001", "n00000002")
    every = source.x_train[torch.arange(12)]
    assert (every.shape, every.dtype) == ((12, 3, 32, 32), torch.uint8)
    assert every[:, 0, 0, 0].tolist() == [10 * k + i for k in range(3) for i in range(4)]
    assert source.x_test[torch.arange(6)][:, 2, 5, 9].tolist() == [4, 5, 14, 15, 24, 25]


def test_images_have_the_size_of_the_name(tmp_path: Path) -> None:
    source = load_imagenet("imagenet-224", folder(tmp_path, images=2), train=1, test=1)
    assert source.x_train[torch.tensor([2])].shape == source.x_train.shape[:0] + (1, 3, 224, 224)


def test_nothing_is_decoded_before_it_is_asked_for(tmp_path: Path) -> None:
    broken = folder(tmp_path) / "imagenet/train/n00000001/002.png"
    broken.write_bytes(b"no image")
    source = load_imagenet("imagenet-32", tmp_path, train=4, test=2)
    assert source.x_train[torch.tensor([0, 1])].shape[0] == 2
    with pytest.raises(DataError, match=r"002\.png"):
        source.x_train[torch.tensor([6])]
    assert Pictures([], 32)[torch.zeros(0, dtype=torch.int64)].shape == (0, 3, 32, 32)


def test_too_few_images_and_no_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"n00000000: 7 images where 600 \+ 100 are needed"):
        load_imagenet("imagenet-32", folder(tmp_path))
    with pytest.raises(DataError, match=r"'imagenet-224' was not found.*imagenet/train"):
        load_imagenet("imagenet-224", tmp_path / "nowhere")
    with pytest.raises(DataError, match="no data folder is named"):
        load_imagenet("imagenet-32", None)


def test_a_task_pool_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagenet.load_imagenet, "__defaults__", (4, 2))
    options = {"dataset": "imagenet-32", "scenario": "task-pool", "clients": 2, "tasks": 3, "classes_per_task": 1}
    stream = streams.build(options, 0, 1, folder(tmp_path))
    data = stream.data(1, 0)
    (label,) = stream.labels_of(1, 0)  # type: ignore[attr-defined]
    assert data.x[:, 0, 0, 0].tolist() == [10 * label + i for i in range(4)]
    assert stream.input_shape == (3, 32, 32) and len(stream.test_of(1, 0)) == 2  # type: ignore[attr-defined]
    assert stream.inputs(data.x).max() <= 1.0
