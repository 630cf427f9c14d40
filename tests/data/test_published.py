"""Published image sets: every layout is read as it is published, and images are decoded only when asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from everfed import streams
from everfed.data import published
from everfed.data.domains import load_domains
from everfed.data.published import KNOWN, Source, read_imagenet
from everfed.data.sources import load
from everfed.errors import DataError

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


def imagenet(name: str, root: Path, train: int, test: int) -> Source:
    """ImageNet with fewer images of every class than the 600 + 100 of the real one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_imagenet, "__defaults__", (train, test))
        source: Source = KNOWN[name].load(name, root)[0]
        return source


@pytest.mark.parametrize("place", [layout.folders[0] for layout in KNOWN["imagenet-32"].layouts])
def test_the_first_train_and_the_next_test(tmp_path: Path, place: str) -> None:
    source = imagenet("imagenet-32", folder(tmp_path, place=place), train=4, test=2)
    assert (len(source.x_train), len(source.x_test), source.classes) == (12, 6, 3)
    assert source.y_train.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert source.class_names == ("n00000000", "n00000001", "n00000002")
    every = source.x_train[torch.arange(12)]
    assert (every.shape, every.dtype) == ((12, 3, 32, 32), torch.uint8)
    assert every[:, 0, 0, 0].tolist() == [10 * k + i for k in range(3) for i in range(4)]
    assert source.x_test[torch.arange(6)][:, 2, 5, 9].tolist() == [4, 5, 14, 15, 24, 25]


def test_images_have_the_size_of_the_name(tmp_path: Path) -> None:
    source = imagenet("imagenet-224", folder(tmp_path, images=2), train=1, test=1)
    assert source.x_train[torch.tensor([2])].shape == source.x_train.shape[:0] + (1, 3, 224, 224)


def test_nothing_is_decoded_before_it_is_asked_for(tmp_path: Path) -> None:
    broken = folder(tmp_path) / "imagenet/train/n00000001/002.png"
    broken.write_bytes(b"no image")
    source = imagenet("imagenet-32", tmp_path, train=4, test=2)
    assert source.x_train[torch.tensor([0, 1])].shape[0] == 2
    with pytest.raises(DataError, match=r"002\.png"):
        source.x_train[torch.tensor([6])]
    assert source.x_train[torch.zeros(0, dtype=torch.int64)].shape == (0, 3, 32, 32)


def test_too_few_images_and_no_folder_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERFED_DATA", raising=False)
    with pytest.raises(DataError, match=r"n00000000: 7 images where 600 \+ 100 are needed"):
        load("imagenet-32", folder(tmp_path))
    with pytest.raises(DataError, match=r"'imagenet-224' was not found.*imagenet/train"):
        load("imagenet-224", tmp_path / "imagenet")
    with pytest.raises(DataError, match="no data folder is named"):
        load("imagenet-32", None)


def test_a_task_pool_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published.read_imagenet, "__defaults__", (4, 2))
    options = {"dataset": "imagenet-32", "scenario": "task-pool", "clients": 2, "tasks": 3, "classes_per_task": 1}
    stream = streams.build(options, 0, 1, folder(tmp_path))
    data = stream.data(1, 0)
    (label,) = stream.labels_of(1, 0)  # type: ignore[attr-defined]
    assert data.x[:, 0, 0, 0].tolist() == [10 * label + i for i in range(4)]
    assert stream.input_shape == (3, 32, 32) and len(stream.test_of(1, 0)) == 2  # type: ignore[attr-defined]
    assert stream.inputs(data.x).max() <= 1.0


# layouts ------------------------------------------------------------------------------------------------------------
def write(path: Path, grey: int, size: tuple[int, int] = (40, 50)) -> None:
    """An image of one brightness. The suffix says the format; JPEG keeps such an image exactly."""
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.fromarray(np.full((*size, 3), grey, np.uint8)).save(path)


def brightness(source: Source) -> tuple[list[int], list[int]]:
    """One pixel of every image of both parts."""
    parts = (source.x_train, source.x_test)
    return tuple(x[torch.arange(len(x))][:, 0, 3, 3].tolist() for x in parts)  # type: ignore[return-value]


def test_the_centre_of_an_image_is_taken_not_the_whole_squeezed(tmp_path: Path) -> None:
    """60 x 120: black, white in the middle half of the longer side. A square from the centre is white."""
    pixels = np.zeros((60, 120, 3), np.uint8)
    pixels[:, 30:90] = 255
    for label, number in ((label, number) for label in "ab" for number in range(5)):
        path = tmp_path / "imagenet-r" / label / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.fromarray(pixels).save(path)
    source = load("imagenet-r", tmp_path)
    assert source.x_train.shape == (8, 3, 224, 224)
    assert int(source.x_train[torch.tensor([0])].min()) == 255


@pytest.mark.parametrize("name", ["imagenet-r", "imagenet-a"])
def test_class_folders_without_a_test_part_give_a_fifth_of_every_class(tmp_path: Path, name: str) -> None:
    for label in range(2):
        for number in range(5):
            write(tmp_path / name / f"n0{label}" / f"{number}.jpg", 20 * label + number)
    source = load(name, tmp_path)
    train, test = brightness(source)
    assert source.y_train.tolist() == [0] * 4 + [1] * 4 and source.y_test.tolist() == [0, 1]
    assert sorted(train + test) == [0, 1, 2, 3, 4, 20, 21, 22, 23, 24]
    assert source.class_names == ("n00", "n01")


def test_parts_that_are_there_are_used(tmp_path: Path) -> None:
    for part, grey in (("train", 10), ("test", 90)):
        write(tmp_path / "imagenet-r" / part / "n01" / "a.jpg", grey)
    assert brightness(load("imagenet-r", tmp_path)) == ([10], [90])


def test_eurosat_keeps_its_64_pixels_whole(tmp_path: Path) -> None:
    for name in ("AnnualCrop", "Forest"):
        for number in range(5):
            write(tmp_path / "EuroSAT/2750" / name / f"{name}_{number}.jpg", number, (64, 64))
    source = load("eurosat", tmp_path)
    assert source.x_train.shape == (8, 3, 64, 64) and source.class_names == ("AnnualCrop", "Forest")


def test_cub_is_divided_by_its_own_list(tmp_path: Path) -> None:
    root = tmp_path / "CUB_200_2011"
    names = ["001.Black_footed_Albatross", "002.Laysan_Albatross"]
    images = [f"{names[0]}/a.jpg", f"{names[1]}/b.jpg", f"{names[1]}/c.jpg"]
    for number, image in enumerate(images):
        write(root / "images" / image, 10 * number)
    lists = {
        "images.txt": images,
        "image_class_labels.txt": [1, 2, 2],
        "train_test_split.txt": [1, 0, 1],
        "classes.txt": names,
    }
    for name, values in lists.items():
        (root / name).write_text("".join(f"{number} {value}\n" for number, value in enumerate(values, start=1)))
    source = load("cub200", tmp_path)
    assert brightness(source) == ([0, 20], [10])
    assert (source.y_train.tolist(), source.y_test.tolist()) == ([0, 1], [1])
    assert source.class_names == tuple(names)
    (root / "train_test_split.txt").write_text("1 1\n2 0\n")
    with pytest.raises(DataError, match=r"image 3 of images\.txt has no line"):
        load("cub200", tmp_path)


def cars(rows: list[tuple[str, int, int]], key: str) -> np.ndarray:
    """Annotations as Stanford's files have them: a struct array."""
    made = np.zeros((1, len(rows)), [(key, "O"), ("bbox_x1", "O"), ("class", "O"), ("test", "O")])
    for place, (name, label, test) in enumerate(rows):
        made[0, place] = (name, 1, label, test)
    return made


def test_cars_in_one_folder(tmp_path: Path) -> None:
    rows = [("car_ims/000001.jpg", 1, 0), ("car_ims/000002.jpg", 2, 1), ("car_ims/000003.jpg", 2, 0)]
    for number, (name, _, _) in enumerate(rows):
        write(tmp_path / "stanford_cars" / name, 10 * number)
    names = np.array(["AM General Hummer", "Acura RL"], object)
    content = {"annotations": cars(rows, "relative_im_path"), "class_names": names}
    savemat(tmp_path / "stanford_cars/cars_annos.mat", content)
    source = load("cars", tmp_path)
    assert brightness(source) == ([0, 20], [10])
    assert (source.y_train.tolist(), source.y_test.tolist()) == ([0, 1], [1])
    assert source.class_names == ("AM General Hummer", "Acura RL")


def test_cars_in_two_folders_need_the_test_labels(tmp_path: Path) -> None:
    root = tmp_path / "cars"
    (root / "devkit").mkdir(parents=True)
    for part, grey in (("train", 10), ("test", 90)):
        write(root / f"cars_{part}" / "00001.jpg", grey)
        write(root / f"cars_{part}" / "00002.jpg", grey + 1)
    savemat(root / "devkit/cars_meta.mat", {"class_names": np.array(["a", "b"], object)})
    savemat(
        root / "devkit/cars_train_annos.mat", {"annotations": cars([("00001.jpg", 2, 0), ("00002.jpg", 1, 0)], "fname")}
    )
    with pytest.raises(DataError, match=r"cars_test_annos_withlabels\.mat"):
        load("cars", tmp_path)
    savemat(
        root / "cars_test_annos_withlabels.mat",
        {"annotations": cars([("00001.jpg", 1, 1), ("00002.jpg", 2, 1)], "fname")},
    )
    source = load("cars", tmp_path)
    assert brightness(source) == ([10, 11], [90, 91])
    assert (source.y_train.tolist(), source.y_test.tolist()) == ([1, 0], [0, 1])


def isic(root: Path, metadata: bool) -> Path:
    """Twenty images of ten lesions, two classes; of the unknown class there is none."""
    folder = root / "isic2019"
    truth, meta = ["image,MEL,NV,UNK"], ["image,age_approx,lesion_id"]
    for number in range(20):
        lesion = number // 2
        write(folder / f"ISIC_2019_Training_Input/ISIC_{number:04}.jpg", number)
        truth.append(f"ISIC_{number:04},{float(lesion < 5)},{float(lesion >= 5)},0.0")
        meta.append(f"ISIC_{number:04},50,{'HAM' if lesion % 2 else 'BCN'}_{lesion:07}")
    (folder / "ISIC_2019_Training_GroundTruth.csv").write_text("\n".join(truth))
    if metadata:
        (folder / "ISIC_2019_Training_Metadata.csv").write_text("\n".join(meta))
    return root


def test_images_of_one_lesion_are_in_one_part(tmp_path: Path) -> None:
    source = load("isic2019", isic(tmp_path, metadata=True))
    train, test = brightness(source)
    assert sorted(train + test) == list(range(20)) and len(test) == 4
    assert not {one // 2 for one in train} & {one // 2 for one in test}
    assert source.y_test.tolist() == [int(one >= 10) for one in test] and set(source.y_test.tolist()) == {0, 1}
    centers = {0: "BCN", 1: "HAM"}
    assert source.columns["center"][1].tolist() == [centers[one // 2 % 2] for one in test]


def test_the_centers_are_clients(tmp_path: Path) -> None:
    table = {"dataset": "isic2019", "scenario": "class-incremental", "tasks": 1}
    stream = streams.build({**table, "partition": {"kind": "column", "column": "center"}}, 0, 1, isic(tmp_path, True))
    assert stream.clients == 2
    assert sum(len(stream.data(client, 0)) for client in range(2)) == 16


def test_without_metadata_every_image_is_a_lesion_of_its_own(tmp_path: Path) -> None:
    source = load("isic2019", isic(tmp_path, metadata=False))
    assert (len(source.x_train), len(source.x_test), dict(source.columns)) == (16, 4, {})


def test_two_diagnoses_are_refused(tmp_path: Path) -> None:
    path = isic(tmp_path, metadata=False) / "isic2019/ISIC_2019_Training_GroundTruth.csv"
    path.write_text(path.read_text().replace("ISIC_0003,1.0,0.0", "ISIC_0003,1.0,1.0"))
    with pytest.raises(DataError, match=r"GroundTruth\.csv: ISIC_0003 has 2 diagnoses; expected one"):
        load("isic2019", tmp_path)


DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")


def domainnet(root: Path) -> Path:
    for number, domain in enumerate(DOMAINS):
        for part, below in (("train", 0), ("test", 1)):
            lines = []
            for label, name in enumerate(("aircraft_carrier", "ant")):
                image = f"{domain}/{name}/{domain}_{part}.jpg"
                write(root / "domainnet" / image, 30 * number + 10 * below + label)
                lines.append(f"{image} {label}\n")
            (root / "domainnet" / f"{domain}_{part}.txt").write_text("".join(lines))
    return root


def test_domainnet_is_divided_by_its_lists(tmp_path: Path) -> None:
    domains = load_domains("domainnet", domainnet(tmp_path))
    assert domains.names == DOMAINS
    assert [brightness(source) for source in domains.sources] == [
        ([30 * n, 30 * n + 1], [30 * n + 10, 30 * n + 11]) for n in range(6)
    ]
    assert domains.sources[0].class_names == ("aircraft_carrier", "ant")


def test_a_stream_of_domains_decodes_on_demand(tmp_path: Path) -> None:
    """One image of the last domain is broken, which a client of the first task never sees."""
    (domainnet(tmp_path) / "domainnet/sketch/ant/sketch_train.jpg").write_bytes(b"no image")
    options = {"dataset": "domainnet", "scenario": "multi-domain", "clients": 1, "image_size": 16}
    stream = streams.build(options, 0, 1, tmp_path)
    assert (stream.tasks, stream.input_shape) == (6, (3, 16, 16))
    assert sorted(stream.data(0, 1).x[:, 0, 0, 0].tolist()) == [30, 31]
    with pytest.raises(DataError, match="sketch_train"):
        stream.data(0, 5)
