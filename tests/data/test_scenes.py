"""Images with boxes: COCO's json, YOLO's text files, drawn streets; odd boxes are dropped and counted, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everfed.data.scenes import load_scenes, pixels
from everfed.data.streets import Streets
from everfed.errors import DataError

CATEGORIES = [{"id": 3, "name": "bike"}, {"id": 1, "name": "car"}]


def write_image(path: Path, size: tuple[int, int] = (40, 20)) -> None:
    image = pytest.importorskip("PIL.Image", reason="pip install 'everfed[images]'")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new("RGB", size, (255, 0, 0)).save(path)


def write_coco(root: Path, *annotations: dict[str, Any], **changes: Any) -> Path:
    for number in range(2):
        write_image(root / "images" / f"{number}.png")
    images = [
        {"id": 7 + n, "file_name": f"images/{n}.png", "width": 40, "height": 20, "domain": "city"} for n in range(2)
    ]
    table = {"images": images, "annotations": list(annotations), "categories": CATEGORIES, **changes}
    for part in ("train", "test"):
        (root / f"{part}.json").write_text(json.dumps(table))
    return root


def box(category: Any, *bbox: Any, image: int = 7, **more: Any) -> dict[str, Any]:
    return {"id": 5, "image_id": image, "category_id": category, "bbox": list(bbox), **more}


def test_coco_boxes_become_shares_of_the_image(tmp_path: Path) -> None:
    scenes = load_scenes(write_coco(tmp_path, box(3, 10, 5, 20, 10), box(1, 0, 0, 4, 4)))
    assert (scenes.class_names, scenes.domains) == (("car", "bike"), ("city",))
    (first, second), left_out = scenes.part("city", "train", (32, 64), None)
    np.testing.assert_allclose(first.boxes, [[1, 0.5, 0.5, 0.5, 0.5], [0, 0.05, 0.1, 0.1, 0.2]])
    assert second.boxes.shape == (0, 5) and left_out == {}
    x = pixels([first, second], (32, 64))
    assert x.shape == (2, 3, 32, 64) and (x[:, 0] == 255).all() and (x[:, 1:] == 0).all()


def test_boxes_are_cut_at_the_edges_and_those_without_an_area_are_dropped_and_counted(tmp_path: Path) -> None:
    odd = [
        box(1, -10, -10, 20, 20),  # a quarter is inside
        box(1, 50, 5, 10, 10),  # beside the image
        box(1, 5, 5, 0, 10),  # no width
        box(1, 5, 5, 10, -3),  # upside down
        box(1, 0, 0, 40, 20, iscrowd=1),
    ]
    (first, _), left_out = load_scenes(write_coco(tmp_path, *odd)).part("city", "train", (32, 64), None)
    np.testing.assert_allclose(first.boxes, [[0, 0.125, 0.25, 0.25, 0.5]])
    # both parts hold the same file here
    assert left_out == {"boxes outside the image": 2, "boxes without an area": 4, "crowds": 2}


@pytest.mark.parametrize(
    ("annotation", "said"),
    [
        (box(2, 0, 0, 1, 1), r"annotation 5: category 2 is not declared; known: \[1, 3\]"),
        (box(1, 0, 0, 1, 1, image=9), "annotation 5: image 9 is not declared"),
        (box(1, 0, 0, 1), "annotation 5: a box is four numbers"),
        (box(1, 0, 0, 1, float("nan")), "annotation 5: a box is four finite numbers"),
        (box(1, 0, 0, 1, "wide"), "annotation 5: a box is four numbers"),
    ],
)
def test_boxes_that_make_no_sense_are_refused(tmp_path: Path, annotation: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=rf"train.json: {said}"):
        load_scenes(write_coco(tmp_path, annotation))


def test_files_that_are_no_coco_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="declares no categories"):
        load_scenes(write_coco(tmp_path, categories=[]))
    (tmp_path / "train.json").write_text("{}")
    with pytest.raises(DataError, match="missing: images"):
        load_scenes(tmp_path)
    (tmp_path / "train.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read as JSON"):
        load_scenes(tmp_path)


def write_yolo(root: Path, lines: str) -> Path:
    (root / "classes.txt").write_text("car\nbike\n")
    for domain in ("city", "country"):
        for part in ("train", "test"):
            for name in "ab":
                write_image(root / domain / "images" / part / f"{name}.png")
            labels = root / domain / "labels" / part
            labels.mkdir(parents=True)
            (labels / "a.txt").write_text(lines)
    return root


def test_a_yolo_folder(tmp_path: Path) -> None:
    scenes = load_scenes(write_yolo(tmp_path, "1 0.5 0.5 0.2 0.4\n\n0 0.0 0.0 0.2 0.2\n"))
    assert (scenes.class_names, scenes.domains) == (("car", "bike"), ("city", "country"))
    (first, second), _ = scenes.part("country", "test", (32, 64), None)
    np.testing.assert_allclose(first.boxes, [[1, 0.5, 0.5, 0.2, 0.4], [0, 0.05, 0.05, 0.1, 0.1]], rtol=1e-6)
    assert len(second.boxes) == 0  # no file of labels: nothing to see


@pytest.mark.parametrize("line", ["2 0.5 0.5 0.2 0.4", "car 0.5 0.5 0.2 0.4", "-1 0.5 0.5 0.2 0.4"])
def test_unknown_classes_of_a_yolo_folder_are_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(DataError, match=r"a.txt, line 1: class '.*' is not within 0..1"):
        load_scenes(write_yolo(tmp_path, line))


def test_folders_that_are_neither_or_missing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds neither train.json"):
        load_scenes(tmp_path)
    with pytest.raises(DataError, match=r"not found.*Carla-Object-Detection-Dataset"):
        load_scenes("carla", tmp_path)
    (tmp_path / "images").mkdir()
    coco = write_coco(tmp_path / "mine", box(1, 0, 0, 4, 4))
    (coco / "images" / "0.png").write_bytes(b"no image")
    scenes, _ = load_scenes(coco).part("city", "train", (32, 64), None)
    with pytest.raises(DataError, match=r"0.png: cannot be read as an image"):
        pixels(scenes, (32, 64))


# streets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("domain", Streets().domains)
def test_streets_are_the_same_every_time_and_their_boxes_inside(domain: str) -> None:
    streets = Streets()
    scenes, _ = streets.part(domain, "train", (96, 160), 12)
    again, _ = streets.part(domain, "train", (96, 160), 3)
    other, _ = streets.part(domain, "test", (96, 160), 3)
    assert len(scenes) == 12
    for one, same, test in zip(scenes, again, other, strict=False):
        np.testing.assert_array_equal(one.image, same.image)
        assert not np.array_equal(one.image, test.image)
    rows = np.concatenate([scene.boxes for scene in scenes])
    low, high = rows[:, 1:3] - rows[:, 3:] / 2, rows[:, 1:3] + rows[:, 3:] / 2
    assert (rows[:, 3:] > 0).all() and low.min() > -1e-6 and high.max() < 1 + 1e-6
    assert all(scene.image.shape == (3, 96, 160) and scene.image.dtype == np.uint8 for scene in scenes)


def test_the_highway_has_neither_bikes_nor_lights_and_nights_are_dark() -> None:
    def look(domain: str) -> tuple[set[int], float]:
        scenes, _ = Streets().part(domain, "train", (96, 160), 40)
        return {int(c) for s in scenes for c in s.boxes[:, 0]}, float(np.mean([s.image.mean() for s in scenes]))

    (town, day), (highway, night) = look("town-day"), look("highway-night")
    assert town == {0, 1, 2, 3, 4} and highway == {0, 2, 4}
    assert night < 0.3 * day


def test_a_box_is_exactly_what_is_drawn() -> None:
    """The traffic sign's red frame is the outline of its box."""
    scenes, _ = Streets().part("highway-day", "train", (96, 160), 60)
    looked_at = 0
    for scene in scenes:
        signs = scene.boxes[scene.boxes[:, 0] == 4]
        for _, x, y, w, h in signs:
            left, right, top, bottom = (x - w / 2) * 160, (x + w / 2) * 160, (y - h / 2) * 96, (y + h / 2) * 96
            edges = [round(v) for v in (left, right, top, bottom)]
            if edges[0] == 0 or edges[1] == 160 or edges[2] == 0 or w * 160 < 6 or abs(w * 160 - h * 96) > 1.01:
                continue  # cut off, small, or partly hidden
            looked_at += 1
            frame = scene.image[:, edges[2], edges[0] : edges[1]].astype(int)
            outside = scene.image[:, edges[2] - 1, edges[0] : edges[1]].astype(int)
            assert (frame[0] - frame[1] > 100).all() and not (outside[0] - outside[1] > 100).any()
    assert looked_at >= 3


@pytest.mark.parametrize("part", ["train", "test"])
def test_carlas_images(data_dir: Path, part: str) -> None:
    if not (data_dir / "carla").is_dir():
        pytest.skip("carla is not in the folder that EVERFED_DATA names")
    scenes = load_scenes("carla", data_dir)
    assert scenes.class_names == ("vehicle", "bike", "motobike", "traffic_light", "traffic_sign")
    assert (scenes.home, scenes.away) == (("Town01", "Town02", "Town03", "Town04"), ("Town05",))
    counts = [len(scenes.part(domain, part, (192, 320), None)[0]) for domain in scenes.domains]
    assert sum(counts) == {"train": 623 + 150, "test": 156 + 99}[part]
