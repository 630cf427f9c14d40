"""Several data sets, or domains of one, as the tasks of a stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everfed import streams
from everfed.data import DataError
from everfed.data.domains import load_domains
from everfed.streams.options import OptionError


def write_sets(root: Path) -> None:
    """Three sets of one format or another, ten classes each, recognisable by their grey level."""
    rng = np.random.default_rng(0)
    for name, shape, level, count in (
        ("mnist", (28, 28), 10, 100),
        ("usps", (16, 16), 90, 60),
        ("svhn", (32, 32, 3), 200, 80),
    ):
        y, y_test = np.arange(count) % 10, np.arange(40) % 10
        x, x_test = ((level + rng.integers(0, 10, (n, *shape))).astype(np.uint8) for n in (count, 40))
        np.savez(root / f"{name}.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)


def build(root: Path, dataset: str = "mnist+usps+svhn", tasks: int = 3, **options: Any) -> Any:
    settings = {"image_size": 28, "channels": 1, "clients": 4, **options}
    return streams.build({"dataset": dataset, "scenario": "multi-domain", "tasks": tasks, **settings}, 0, 2, root)


def test_every_task_is_another_set_in_one_format(tmp_path: Path) -> None:
    write_sets(tmp_path)
    stream = build(tmp_path)
    assert (stream.input_shape, stream.classes, stream.tasks, stream.rounds) == ((1, 28, 28), 10, 3, 6)
    for task, (level, train) in enumerate(((10, 100), (90, 60), (200, 80))):
        held = [stream.data(client, task) for client in range(4)]
        assert sum(map(len, held)) == train
        for data in (*held, stream.test(task)):
            assert data.x.dtype == torch.uint8 and tuple(data.x.shape[1:]) == (1, 28, 28)
            assert data.x.float().mean() == pytest.approx(level + 4.5, abs=1.5)
        assert len(stream.test(task)) == 40
        assert stream.labels(task) == tuple(range(10))


def test_nothing_is_shared_between_clients_or_tasks(tmp_path: Path) -> None:
    write_sets(tmp_path)
    stream = build(tmp_path, partition={"kind": "dirichlet", "alpha": 1.0})
    for client in range(4):
        ids = np.concatenate([stream.data(client, task).ids for task in range(3)])
        assert len(np.unique(ids)) == len(ids)
    rows = np.concatenate([stream.data(client, 1).ids for client in range(4)])
    assert len(np.unique(rows)) == 60


def test_limits_and_the_validation_part_count_per_domain(tmp_path: Path) -> None:
    write_sets(tmp_path)
    stream = build(tmp_path, max_train=50, max_test=20, validation=0.2)
    for task in range(3):
        assert sum(len(stream.data(client, task)) for client in range(4)) == 40
        assert len(stream.test(task, "validation")) == 10
        assert len(stream.test(task)) == 20
        level = (10, 90, 200)[task]
        assert stream.test(task, "validation").x.float().mean() == pytest.approx(level + 4.5, abs=2.0)


def test_domains_can_be_chosen_and_ordered(tmp_path: Path) -> None:
    write_sets(tmp_path)
    stream = build(tmp_path, tasks=2, domains=["svhn", "mnist"])
    assert stream.describe()["domains"] == ["svhn", "mnist"]
    assert stream.test(0).x.float().mean() > 190
    assert build(tmp_path, tasks=2).describe()["domains"] == ["mnist", "usps"]


def test_it_describes_who_got_what(tmp_path: Path) -> None:
    write_sets(tmp_path)
    facts = build(tmp_path).describe()
    assert facts["samples_per_domain"] == [{"train": n, "test": 40} for n in (100, 60, 80)]
    assert [Path(origin).name for origin in facts["origins"]] == ["mnist.npz", "usps.npz", "svhn.npz"]
    assert len(facts["who_got_what"]) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": 4}, r"stream\.tasks: 4 is too many; mnist\+usps\+svhn has 3: mnist, usps, svhn"),
        ({"domains": ["cifar"]}, r"stream\.domains: .* has no domain 'cifar'; it has mnist, usps, svhn"),
        ({"image_size": None, "channels": None}, r"stream\.image_size: the domains differ \(mnist \(1, 28, 28\)"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write_sets(tmp_path)
    with pytest.raises(OptionError, match=message):
        build(tmp_path, **options)


def test_arrays_of_one_set_are_refused() -> None:
    x, y = np.zeros((10, 4, 4), np.uint8), np.arange(10)
    with pytest.raises(OptionError, match=r"stream\.scenario: multi-domain takes several data sets"):
        streams.from_arrays(x, y, x, y, scenario="multi-domain", tasks=1, clients=1)


# the named sets ------------------------------------------------------------------------------------------------------
def write_images(root: Path, sizes: dict[str, int], inside: str = "", parts: tuple[str, ...] = ("",)) -> None:
    image = pytest.importorskip("PIL.Image", reason="pip install 'everfed[images]'")
    for domain, size in sizes.items():
        for part in parts:
            for label in ("cup", "dog"):
                folder = root / domain / inside / part / label
                folder.mkdir(parents=True)
                for number in range(5):
                    image.new("RGB", (size, size), (size % 256, 0, 0)).save(folder / f"{number}.jpg")


def test_office31_in_its_published_layout(tmp_path: Path) -> None:
    write_images(tmp_path / "office31", {"amazon": 300, "dslr": 100, "webcam": 50}, inside="images")
    domains = load_domains("office31", tmp_path)
    assert domains.names == ("amazon", "dslr", "webcam")
    assert [tuple(s.x_train.shape) for s in domains.sources] == [(8, 3, 300, 300)] * 3  # a fifth of every class is test
    assert domains.sources[0].class_names == ("cup", "dog")
    stream = build(tmp_path, "office31", 3, image_size=32, channels=3, clients=1)
    assert stream.input_shape == (3, 32, 32)


def test_pacs_with_a_split_of_its_own(tmp_path: Path) -> None:
    names = {"photo": 60, "art_painting": 60, "cartoon": 60, "sketch": 60}
    write_images(tmp_path / "PACS", names, parts=("train", "test"))
    domains = load_domains("pacs", tmp_path)
    assert domains.names == ("photo", "art_painting", "cartoon", "sketch")
    assert [(len(s.x_train), len(s.x_test)) for s in domains.sources] == [(10, 10)] * 4


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    write_images(tmp_path / "mine", {"day": 64, "night": 64})
    assert load_domains(tmp_path / "mine").names == ("day", "night")
    assert load_domains("mine", tmp_path).sources[0].classes == 2


@pytest.mark.parametrize("named", [True, False])
def test_office_caltech_as_features(tmp_path: Path, named: bool) -> None:
    names = np.array(["amazon", "caltech", "dslr", "webcam"])
    y, domain = np.tile(np.arange(10), 8), np.repeat(np.arange(4), 20)
    x = np.random.default_rng(0).integers(0, 5, (80, 800)).astype(np.uint8)
    np.savez(tmp_path / "office_caltech10.npz", x=x, y=y, domain=names[domain] if named else domain)
    domains = load_domains("office-caltech10", tmp_path)
    assert domains.names == tuple(names)
    for source in domains.sources:
        assert source.x_train.dtype == torch.float32 and source.x_train.shape == (16, 800)
        assert torch.allclose(source.x_train.mean(1), torch.ones(16))


def test_office_caltech_in_the_published_mat_files(tmp_path: Path) -> None:
    from scipy import io

    for name in ("amazon", "Caltech10", "dslr", "webcam"):
        features = np.ones((20, 800))
        io.savemat(
            tmp_path / f"{name}_SURF_L10.mat", {"fts": features, "labels": np.arange(20).reshape(-1, 1) % 10 + 1}
        )
    assert [len(s.x_test) for s in load_domains("office-caltech10", tmp_path).sources] == [4] * 4


@pytest.mark.parametrize("name", ["office31", "pacs", "office-caltech10"])
def test_a_missing_set_is_named_with_where_to_get_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=rf"data set '{name}' was not found.*Get it from https://"):
        load_domains(name, tmp_path)
    with pytest.raises(DataError, match="domains 'nothing' were not found.*digit10, office31"):
        load_domains("nothing", tmp_path)


def test_domains_must_share_their_classes(tmp_path: Path) -> None:
    write_sets(tmp_path)
    x, y = np.zeros((6, 28, 28), np.uint8), np.arange(6)
    np.savez(tmp_path / "six.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(DataError, match="domain 'six' has 6 classes and 'mnist' has 10"):
        load_domains("mnist+six", tmp_path)


# the real thing ------------------------------------------------------------------------------------------------------
def test_digit10(data_dir: Path) -> None:
    stream = streams.build({"dataset": "digit10", "scenario": "multi-domain", "tasks": 4, "clients": 3}, 0, 1, data_dir)
    assert stream.input_shape == (1, 28, 28)
    assert stream.describe()["domains"] == ["mnist", "emnist-digits", "usps", "svhn"]


# Tiny-ImageNet -------------------------------------------------------------------------------------------------------
def test_tiny_imagenet_in_its_published_layout(tmp_path: Path) -> None:
    from everfed.data import load

    image = pytest.importorskip("PIL.Image", reason="pip install 'everfed[images]'")
    root = tmp_path / "tiny-imagenet-200"
    lines = []
    for label, wnid in enumerate(("n01", "n02")):
        (root / "train" / wnid / "images").mkdir(parents=True)
        for number in range(3):
            image.new("RGB", (64, 64), (100 * label, 0, 0)).save(root / "train" / wnid / "images" / f"{number}.JPEG")
        (root / "val" / "images").mkdir(parents=True, exist_ok=True)
        image.new("L", (64, 64), 50 * label).save(root / "val" / "images" / f"val_{label}.JPEG")
        lines.append(f"val_{label}.JPEG\t{wnid}\t0\t0\t63\t63")
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines), encoding="utf-8")
    source = load("tiny-imagenet", tmp_path)
    assert source.x_train.shape == (6, 3, 64, 64) and source.y_train.tolist() == [0, 0, 0, 1, 1, 1]
    assert source.x_test.shape == (2, 3, 64, 64) and source.y_test.tolist() == [0, 1]
    assert source.class_names == ("n01", "n02")
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99", encoding="utf-8")
    with pytest.raises(DataError, match="val_annotations.txt: expected a file name and the id of a class"):
        load("tiny-imagenet", tmp_path)
