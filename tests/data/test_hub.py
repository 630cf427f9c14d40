"""Hub data sets, built here and read from the disk, and a hub that answers with errors."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from everfed.data import DataError, load
from everfed.streams import from_datasets

datasets = pytest.importorskip("datasets", reason="pip install 'everfed[hub]'")


def image_split(n: int, size: int = 5) -> tuple[object, np.ndarray]:
    pillow = pytest.importorskip("PIL.Image", reason="pip install 'everfed[images]'")
    x = np.random.default_rng(n).integers(0, 256, (n, size, size, 3), dtype=np.uint8)
    features = datasets.Features(
        {
            "img": datasets.Image(),
            "coarse_label": datasets.ClassLabel(names=["a", "b"]),
            "fine_label": datasets.ClassLabel(names=["p", "q", "r"]),
        }
    )
    rows = {
        "img": [pillow.fromarray(image) for image in x],
        "coarse_label": [i % 2 for i in range(n)],
        "fine_label": [i % 3 for i in range(n)],
    }
    return datasets.Dataset.from_dict(rows, features=features), x


def test_images_with_the_finest_labels(tmp_path):
    (train, x), (test, _) = image_split(9), image_split(4)
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(str(tmp_path / "set"))
    source = load(f"hub:{tmp_path / 'set'}")
    assert np.array_equal(source.x_train.numpy(), x.transpose(0, 3, 1, 2))
    assert source.y_train.tolist() == [0, 1, 2] * 3
    assert source.class_names == ("p", "q", "r")
    assert len(source.x_test) == 4
    assert "columns img and fine_label, test part: split test" in source.origin


def test_vectors_without_a_test_split(tmp_path):
    rows = {"features": [[float(i), 1.0] for i in range(20)], "label": [i % 2 for i in range(20)]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "set"))
    source = load(f"hub:{tmp_path / 'set'}")
    assert source.x_train.dtype == torch.float32
    assert (len(source.x_train), len(source.x_test), source.classes) == (16, 4, 2)
    assert "a fifth of split train" in source.origin


def test_name_and_config_reach_the_hub(monkeypatch):
    asked = []

    def load_dataset(*arguments):
        asked.append(arguments)
        return datasets.DatasetDict({"train": image_split(6)[0], "validation": image_split(3)[0]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert "split validation" in load("hub:owner/name").origin
    load("hub:owner/name:config")
    assert asked == [("owner/name",), ("owner/name", "config")]


def test_a_hub_that_cannot_be_reached_is_a_data_error(monkeypatch):
    def load_dataset(*_):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match="hub:owner/name: could not be loaded.*no route to host"):
        load("hub:owner/name")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"text": ["a", "b"], "label": [0, 1]}, "no column of images or of numbers; it has text, label"),
        ({"features": [[1.0], [2.0]], "answer": [0, 1]}, "has no label column"),
    ],
)
def test_columns_that_are_not_there(monkeypatch, rows, message):
    split = datasets.Dataset.from_dict(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: datasets.DatasetDict({"train": split, "test": split}))
    with pytest.raises(DataError, match=message):
        load("hub:x")


def test_a_set_in_memory_is_not_said_to_be_of_the_hub() -> None:
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
    with pytest.raises(DataError, match=r"^the data set: has no column of images or of numbers; it has text, label"):
        from_datasets(rows, rows, scenario="class-incremental", tasks=2, clients=1)


def test_no_train_split(monkeypatch):
    split = datasets.Dataset.from_dict({"features": [[1.0]], "label": [0]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: datasets.DatasetDict({"test": split}))
    with pytest.raises(DataError, match="needs a split 'train'; it has test"):
        load("hub:x")


def test_images_of_two_sizes(monkeypatch):
    split = datasets.concatenate_datasets([image_split(2)[0], image_split(2, size=7)[0]])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: datasets.DatasetDict({"train": split}))
    with pytest.raises(DataError, match="must have one size"):
        load("hub:x")


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"hub:x needs .*pip install 'everfed\[hub\]'"):
        load("hub:x")
