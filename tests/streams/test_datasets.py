"""Data sets of torch and Hugging Face as streams: the same samples as from arrays, decoded when they are needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

import everfed
from everfed.errors import DataError
from everfed.streams import OptionError, from_arrays, from_datasets

image = pytest.importorskip("PIL.Image", reason="the extra `images` is not installed")
ONE_CLIENT = {"scenario": "domain-incremental", "tasks": 2, "clients": 1, "rounds_per_task": 1}
SETTINGS = {"tasks": 2, "clients": 3, "rounds_per_task": 1, "partition": {"kind": "dirichlet", "alpha": 0.5}}


class Files(Dataset):  # type: ignore[type-arg]
    """As torchvision writes its sets: files, and labels in `targets`."""

    def __init__(self, paths: list[Path], targets: list[int]) -> None:
        self.paths, self.targets, self.opened = paths, targets, 0

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        self.opened += 1
        with image.open(self.paths[index]) as picture:
            return picture.convert("RGB"), self.targets[index]


def pixels(count: int, size: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    return rng.integers(0, 256, (count, size, size, 3)).astype(np.uint8), np.arange(count) % 4


def files(folder: Path, count: int, size: int = 6) -> Files:
    folder.mkdir()
    x, y = pixels(count, size)
    for number, picture in enumerate(x):
        image.fromarray(picture).save(folder / f"{number}.png")
    return Files([folder / f"{number}.png" for number in range(count)], y.tolist())


@pytest.fixture
def sets(tmp_path: Path) -> tuple[Files, Files]:
    return files(tmp_path / "train", 60), files(tmp_path / "test", 24)


@pytest.mark.parametrize(
    ("scenario", "further"),
    [
        ("class-incremental", {}),
        ("task-incremental", {}),
        ("domain-incremental", {"transform": "rotate"}),
        ("domain-incremental", {"transform": "permute", "image_size": 4, "channels": 1}),
        ("class-incremental", {"order": [1, 0, 1], "without": {"0": [1]}, "validation": 0.2}),
        ("task-pool", {"classes_per_task": 2}),
    ],
)
def test_the_same_stream_as_from_arrays(sets: tuple[Files, Files], scenario: str, further: dict[str, Any]) -> None:
    further = {**SETTINGS, **further}
    if scenario == "task-pool":
        del further["partition"]
    lazy = from_datasets(*sets, scenario=scenario, **further)
    eager = from_arrays(*pixels(60), *pixels(24), scenario=scenario, **further)
    for client in range(3):
        for task in range(lazy.tasks):
            mine, theirs = lazy.data(client, task), eager.data(client, task)
            assert torch.equal(mine.x, theirs.x) and torch.equal(mine.y, theirs.y)
            assert np.array_equal(mine.ids, theirs.ids)
            mine, theirs = lazy.test_of(client, task), eager.test_of(client, task)
            assert torch.equal(mine.x, theirs.x) and torch.equal(mine.y, theirs.y)


def test_only_what_a_client_sees_is_decoded_and_only_once(sets: tuple[Files, Files]) -> None:
    made = from_datasets(*sets, scenario="class-incremental", **SETTINGS)
    assert sets[0].opened == 1  # for its form
    first = made.data(0, 0)
    assert sets[0].opened == 1 + len(first)
    made._cache._held.clear()  # type: ignore[attr-defined]
    assert torch.equal(made.data(0, 0).x, first.x) and sets[0].opened == 1 + len(first)


def test_a_cache_serves_later_runs_and_other_data_has_other_files(tmp_path: Path, sets: tuple[Files, Files]) -> None:
    settings = {"scenario": "class-incremental", "cache": tmp_path / "cache", **SETTINGS}
    first = from_datasets(*sets, **settings).data(0, 0)
    before = sets[0].opened
    again = from_datasets(*sets, **settings).data(0, 0)
    assert torch.equal(again.x, first.x)
    assert sets[0].opened < before + len(first) + 40 and len(list((tmp_path / "cache").iterdir())) == 1
    other = files(tmp_path / "other", 60)
    for path in other.paths:
        image.fromarray(np.zeros((6, 6, 3), np.uint8)).save(path)
    assert int(from_datasets(other, sets[1], **settings).data(0, 0).x.max()) == 0


def test_subsets_concatenations_and_tensors(sets: tuple[Files, Files]) -> None:
    x, y = pixels(60)
    whole = ConcatDataset([Subset(sets[0], range(20)), Subset(sets[0], range(20, 60))])
    tensors = TensorDataset(torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(y))
    streams = [
        from_datasets(train, sets[1], scenario="class-incremental", **SETTINGS) for train in (sets[0], whole, tensors)
    ]
    for made in streams[1:]:
        assert torch.equal(made.data(1, 1).x, streams[0].data(1, 1).x)


def test_a_subset_in_any_order_has_the_labels_of_its_own_samples() -> None:
    labels = torch.arange(40) % 4
    whole = TensorDataset(labels[:, None].float(), labels)  # every sample holds its label
    test = Subset(whole, [13, 2, 31, 5, 8, 39, 20, 27, 4, 11])
    train = Subset(test, range(9, 0, -1))
    made = from_datasets(train, test, **{**ONE_CLIENT, "scenario": "class-incremental"})
    data = [made.data(0, task) for task in range(2)] + [made.test_of(0, task) for task in range(2)]
    assert [len(part) for part in data] == [4, 5, 5, 5]  # of classes 0 and 1, and of classes 2 and 3
    assert all(part.x.flatten().tolist() == part.y.tolist() for part in data)


class Pairs:
    """A plain sequence of (features, label): labels are read from the samples."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[np.ndarray, str]:
        return np.full(5, index, dtype=np.float64), "even" if index % 2 == 0 else "odd"


def test_features_with_names_for_labels(tmp_path: Path) -> None:
    made = from_datasets(Pairs(), Pairs(), scenario="class-incremental", **{**SETTINGS, "partition": {"kind": "iid"}})
    assert tuple(made.class_names) == ("even", "odd") and made.input_shape == (5,)
    assert set(made.data(0, 0).x[:, 0].tolist()) <= set(range(0, 40, 2))
    table = {"model": {"kind": "mlp"}, "method": {"name": "er"}, "engine": {"kind": "processes", "workers": 2}}
    assert everfed.run(table, tmp_path / "run", stream=made).metrics["acc"] is not None


def test_a_hugging_face_data_set() -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `hub` is not installed")
    x, y = pixels(60)
    columns = {"image": [image.fromarray(picture) for picture in x], "label": y.tolist()}
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["ash", "birch", "cedar", "date"])}
    )
    held = datasets.Dataset.from_dict(columns, features=features)
    made = from_datasets(held, held.select(range(24)), scenario="class-incremental", **SETTINGS)
    eager = from_arrays(x, y, x[:24], y[:24], scenario="class-incremental", **SETTINGS)
    assert tuple(made.class_names) == ("ash", "birch", "cedar", "date")
    assert torch.equal(made.data(0, 1).x, eager.data(0, 1).x) and torch.equal(made.test(1).y, eager.test(1).y)


def test_images_of_several_sizes_need_a_common_one(tmp_path: Path, sets: tuple[Files, Files]) -> None:
    image.new("RGB", (9, 5)).save(sets[0].paths[40])
    made = from_datasets(
        *sets, scenario="domain-incremental", **{**SETTINGS, "clients": 1, "partition": {"kind": "iid"}}
    )
    with pytest.raises(DataError, match=r"sample 40 is .*stream.image_size"):
        made.data(0, 0)
    assert from_datasets(*sets, **ONE_CLIENT, image_size=4).data(0, 0).x.shape == (60, 3, 4, 4)


def test_what_cannot_be_read_is_named(sets: tuple[Files, Files]) -> None:
    sets[0].paths[3].write_bytes(b"no picture")
    made = from_datasets(
        *sets, scenario="domain-incremental", **{**SETTINGS, "clients": 1, "partition": {"kind": "iid"}}
    )
    with pytest.raises(DataError, match="sample 3 cannot be read"):
        made.data(0, 0)
    with pytest.raises(OptionError, match="not made from two data sets"):
        from_datasets(*sets, scenario="own", **SETTINGS, classes=4)


class Made(Dataset):  # type: ignore[type-arg]
    """Items of a function, without labels apart."""

    def __init__(self, item: Callable[[int], Any], count: int = 40) -> None:
        self.item, self.count = item, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


def picture(mode: str, size: tuple[int, int] = (6, 6)) -> Any:
    return image.new("RGB", size, (200, 100, 0)).convert(mode)


COLOUR, PALETTE = [200, 100, 0], [204, 102, 0]  # the nearest of Pillow's own palette
GREY, BIT = [118], [0]  # Pillow: (200 * 19595 + 100 * 38470 + 2^15) >> 16


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("RGB", COLOUR), ("RGBA", COLOUR), ("CMYK", COLOUR), ("P", PALETTE), ("L", GREY), ("LA", GREY), ("1", BIT)],
)
def test_pictures_of_any_mode_are_grey_or_colour(mode: str, expected: list[int]) -> None:
    """A palette's numbers are no brightness, and transparency is no channel."""
    made = from_datasets(*[Made(lambda index: (picture(mode), index % 4))] * 2, **ONE_CLIENT)
    assert made.input_shape == (len(expected), 6, 6) and made.data(0, 0).x.dtype == torch.uint8
    assert made.data(0, 0).x[0, :, 2, 2].tolist() == expected


def test_pictures_of_several_modes_and_sizes() -> None:
    modes, sizes = ("L", "RGB", "RGBA", "P", "1", "CMYK", "LA"), ((6, 6), (9, 5), (3, 12))
    held = Made(lambda index: (picture(modes[index % 7], sizes[index % 3]), torch.tensor(index % 4)))
    made = from_datasets(held, held, **ONE_CLIENT, image_size=4, channels=3)
    assert made.data(0, 0).x.shape == (40, 3, 4, 4) and made.data(0, 0).y.tolist() == [i % 4 for i in range(40)]
    one_size = Made(lambda index: (picture(modes[index % 7]), index % 4))
    with pytest.raises(DataError, match=r"sample 1 is .*\(3, 6, 6\).*stream.channels"):
        from_datasets(one_size, one_size, **ONE_CLIENT).data(0, 0)


def broken(index: int) -> Any:
    if index == 7:
        raise RuntimeError("no such disk")
    return picture("RGB"), index % 4


class Flowing(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(3, 6, 6), 0)] * 40)

    def __len__(self) -> int:
        return 40


REFUSED: dict[str, tuple[Any, str]] = {
    "iterable": (Flowing(), "train is Flowing, which has no samples by index.*from_function"),
    "a number": (3, "train is int, which has no samples by index"),
    "several sets": ({"train": [], "test": []}, r"a table of data sets \(train, test\); name one of them"),
    "empty": (Made(broken, 0), "train is empty"),
    "an item raises": (Made(broken), r"sample 7 cannot be read \(RuntimeError: no such disk\)"),
    "dictionaries": (Made(lambda index: {"x": 1, "y": 2}), "item 0 must be a sample and its label; got dict"),
    "no label": (Made(lambda index: (picture("RGB"), None)), "item 0 must be a sample and its label"),
    "16 bits": (Made(lambda index: (picture("I"), 0)), "a picture of mode 'I' has more than 8 bits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_data_set_is_refused_with_a_reason(name: str) -> None:
    held, reason = REFUSED[name]
    with pytest.raises(DataError, match=reason):
        from_datasets(held, held, **ONE_CLIENT)


def test_an_item_that_raises_later_is_named() -> None:
    held = Made(broken)
    held.targets = [index % 4 for index in range(40)]  # type: ignore[attr-defined]
    made = from_datasets(held, held, **ONE_CLIENT)
    with pytest.raises(DataError, match=r"train: sample 7 cannot be read \(RuntimeError: no such disk\)"):
        made.data(0, 0)


def test_a_run_equals_the_one_on_arrays(tmp_path: Path, sets: tuple[Files, Files]) -> None:
    table = {"model": {"kind": "mlp"}, "method": {"name": "fedgp+der"}, "engine": {"kind": "eager", "device": "cpu"}}
    results = [
        everfed.run(table, tmp_path / name, stream=made)
        for name, made in (
            ("lazy", from_datasets(*sets, scenario="class-incremental", **SETTINGS)),
            ("eager", from_arrays(*pixels(60), *pixels(24), scenario="class-incremental", **SETTINGS)),
        )
    ]
    assert results[0].data["accuracy_matrix"] == results[1].data["accuracy_matrix"]
    first, second = (everfed.load(tmp_path / name).model.state_dict() for name in ("lazy", "eager"))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


MEMORY = """
import json, sys
from pathlib import Path
from tests.streams.test_datasets import Files
import everfed
from everfed.streams import from_datasets

folder, count = Path(sys.argv[1]), int(sys.argv[2])
made = [Files([folder / f"{n % 500}.png" for n in range(c)], [n % 4 for n in range(c)]) for c in (count, 400)]
stream = from_datasets(*made, scenario="class-incremental", tasks=2, clients=40, rounds_per_task=1, image_size=64)
model, engine = {"kind": "mlp", "hidden": [16]}, {"kind": "eager", "device": "cpu"}
table = {"model": model, "method": {"name": "fedavg"}, "engine": engine}
result = everfed.run(table, folder / f"run-{count}", stream=stream)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({"samples": result.data["cost"]["samples"], "peak": int(status["VmHWM"].split()[0]),
                  "anonymous": int(status["RssAnon"].split()[0])}))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_memory_does_not_grow_with_the_number_of_files(tmp_path: Path) -> None:
    """2,000 and 20,000 images of 64 pixels: 24 and 246 MB decoded, of which a client sees a 40th. None of it stays."""
    x, _ = pixels(500, 48)
    for number, picture in enumerate(x):
        image.fromarray(picture).save(tmp_path / f"{number}.png")
    found = {}
    for count in (2_000, 20_000):
        words = [sys.executable, "-c", MEMORY, str(tmp_path), str(count)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        found[count] = json.loads(done.stdout.splitlines()[-1])
    assert found[20_000]["samples"] == 20_000
    decoded = 20_000 * 3 * 64 * 64 // 1024
    assert found[20_000]["peak"] - found[2_000]["peak"] < decoded // 3, found
