"""Images with boxes, by domain: folders with COCO's json or YOLO's text files, the CARLA towns, drawn streets.

Boxes are cut off at the image's edges; what has no area then (outside the image, zero width) is dropped and counted. A
class that is not declared is refused: it would train a wrong detector in silence.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from everfed.data.catalogue import FileLayout, KnownSet, data_folder
from everfed.data.detection import from_corners
from everfed.data.images import SUFFIXES, read_picture
from everfed.errors import DataError
from everfed.naming import places

Size = tuple[int, int]  # height, width
PARTS = ("train", "test")
# widths and heights of anchor boxes, as shares of the image
ANCHORS = ((0.03, 0.05), (0.06, 0.10), (0.05, 0.22), (0.14, 0.17), (0.32, 0.35))


@dataclass(frozen=True)
class Scene:
    """A drawn image (3, h, w) uint8 or the file of one, and its boxes (n, 5) as rows of `everfed.data.detection`."""

    image: Path | np.ndarray
    boxes: np.ndarray


@dataclass(frozen=True)
class Scenes(ABC):
    """Images with boxes by domain. home, away: the domains of a recipe that names none. anchors: shapes, shares."""

    name: str
    origin: str
    class_names: tuple[str, ...]
    home: tuple[str, ...] = ()
    away: tuple[str, ...] = ()
    anchors: tuple[tuple[float, float], ...] = ANCHORS

    @property
    @abstractmethod
    def domains(self) -> tuple[str, ...]:
        """All of them, by name."""

    @abstractmethod
    def part(self, domain: str, part: str, size: Size, most: int | None) -> tuple[list[Scene], dict[str, int]]:
        """The scenes of a domain's train or test part, at most so many, and how many boxes were left out, by reason."""


@dataclass(frozen=True)
class Folder(Scenes):
    """Scenes of files. scenes: by domain and part."""

    scenes: Mapping[tuple[str, str], Sequence[Scene]] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(domain for domain, _ in self.scenes))

    def part(self, domain: str, part: str, size: Size, most: int | None) -> tuple[list[Scene], dict[str, int]]:
        return list(self.scenes.get((domain, part), ()))[:most], dict(self.left_out)


def load_scenes(name_or_path: str | Path, data_dir: str | Path | None = None) -> Scenes:
    """`streets` (drawn, needs no data), `carla` of the data folder, or a folder of one's own. Raises DataError."""
    from everfed.data.streets import NAME, Streets

    name, folder = str(name_or_path), data_folder(data_dir)
    if name == NAME:
        return Streets()
    if name == "carla":
        carla: Folder = CARLA.load(name, folder)[0]
        return carla
    found = places(name, folder)
    root = next((place for place in found if place.is_dir()), None)
    if root is None:
        raise DataError(
            f"scenes {name!r} were not found. Looked for a folder at: {', '.join(map(str, found))}. "
            f"Allowed: {NAME}, carla, or the path of a folder with train.json (COCO) or classes.txt (YOLO)"
        )
    if (root / "train.json").is_file():
        return read_coco(root)
    if (root / "classes.txt").is_file():
        return read_yolo(root)
    raise DataError(f"{root}: holds neither train.json (COCO) nor classes.txt (YOLO)")


# COCO ------------------------------------------------------------------------------------------------------------


def read_coco(root: Path) -> Folder:
    """train.json, test.json and perhaps val.json, which is another test part of its domains. An image's domain is its
    field `domain`, else "all"."""
    scenes: dict[tuple[str, str], list[Scene]] = {}
    left_out: dict[str, int] = {}
    names: tuple[str, ...] | None = None
    for file, part in (("train.json", "train"), ("val.json", "test"), ("test.json", "test")):
        path = root / file
        if not path.is_file():
            continue
        table = _json(path)
        names = _same_classes(path, names, table)
        for domain, scene in _coco_scenes(root, path, table, left_out):
            scenes.setdefault((domain, part), []).append(scene)
    return Folder(root.name, str(root.absolute()), names or (), scenes=scenes, left_out=left_out)


def _carla(read: Folder) -> Folder:
    """The authors test on Town05 alone, which has the highway: here the last two fifths of its images are for testing,
    and the other towns are tested on the authors' validation images."""
    away = "Town05"
    whole = list(read.scenes.get((away, "test"), ()))
    cut = math.ceil(0.6 * len(whole))
    scenes = {**read.scenes, (away, "train"): whole[:cut], (away, "test"): whole[cut:]}
    home = tuple(domain for domain in read.domains if domain != away)
    anchors = ((0.006, 0.024), (0.012, 0.039), (0.031, 0.063), (0.098, 0.083), (0.156, 0.313))
    return Folder("carla", read.origin, read.class_names, home, (away,), anchors, scenes, read.left_out)


CARLA = KnownSet(
    (FileLayout(("carla",), (("train.json",),), lambda files: _carla(read_coco(files[0].parent))),),
    "https://github.com/DanielHfnr/Carla-Object-Detection-Dataset",
)


def _json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise DataError(f"{path}: cannot be read as JSON ({problem})") from problem
    missing = [key for key in ("images", "annotations", "categories") if not isinstance(table.get(key), list)]
    if missing:
        raise DataError(f"{path}: COCO's json has the lists images, annotations and categories; missing: {missing[0]}")
    return dict(table)


def _same_classes(path: Path, names: tuple[str, ...] | None, table: dict[str, Any]) -> tuple[str, ...]:
    own = tuple(str(one["name"]) for one in sorted(table["categories"], key=lambda one: int(one["id"])))
    if not own:
        raise DataError(f"{path}: declares no categories")
    if names is not None and own != names:
        raise DataError(f"{path}: its categories {list(own)} are not those of the other parts, {list(names)}")
    return own


def _coco_scenes(root: Path, path: Path, table: dict[str, Any], left_out: dict[str, int]) -> list[tuple[str, Scene]]:
    number = {int(one["id"]): i for i, one in enumerate(sorted(table["categories"], key=lambda one: int(one["id"])))}
    by_image: dict[int, list[tuple[int, Sequence[float]]]] = {int(image["id"]): [] for image in table["images"]}
    for one in table["annotations"]:
        where = f"{path}: annotation {one.get('id')}"
        if one.get("category_id") not in number:
            raise DataError(f"{where}: category {one.get('category_id')!r} is not declared; known: {sorted(number)}")
        if one.get("image_id") not in by_image:
            raise DataError(f"{where}: image {one.get('image_id')!r} is not declared")
        if one.get("iscrowd"):
            _count(left_out, "crowds")
            continue
        by_image[one["image_id"]].append((number[one["category_id"]], _four(one.get("bbox"), where)))
    found = []
    for image in table["images"]:
        boxes = by_image[int(image["id"])]
        corner = np.array([(x, y, x + w, y + h) for _, (x, y, w, h) in boxes], dtype=np.float64).reshape(-1, 4)
        scale = np.array([image["width"], image["height"]] * 2, dtype=np.float64)
        labels = np.array([label for label, _ in boxes], dtype=np.float64)
        scene = Scene(root / str(image["file_name"]), sound(labels, corner / scale, left_out))
        found.append((str(image.get("domain", "all")), scene))
    return found


# YOLO ------------------------------------------------------------------------------------------------------------


def read_yolo(root: Path) -> Folder:
    """<domain>/images/{train,test}/* with <domain>/labels/{train,test}/*.txt (class, centre x, centre y, width, height
    in shares of the image on every line), and classes.txt with a name on every line. An image without a file of labels
    has no box."""
    names = tuple(
        line.strip() for line in (root / "classes.txt").read_text(encoding="utf-8").splitlines() if line.strip()
    )
    if not names:
        raise DataError(f"{root / 'classes.txt'}: names no class")
    scenes: dict[tuple[str, str], list[Scene]] = {}
    left_out: dict[str, int] = {}
    for domain in sorted(folder for folder in root.iterdir() if (folder / "images").is_dir()):
        for part in PARTS:
            images = sorted(p for p in (domain / "images" / part).glob("*") if p.suffix.lower() in SUFFIXES)
            labels = domain / "labels" / part
            read = [Scene(image, _yolo_boxes(labels / f"{image.stem}.txt", len(names), left_out)) for image in images]
            scenes[domain.name, part] = read
    if not scenes:
        raise DataError(f"{root}: holds no folder <domain>/images/train")
    return Folder(root.name, str(root.absolute()), names, scenes=scenes, left_out=left_out)


def _yolo_boxes(path: Path, classes: int, left_out: dict[str, int]) -> np.ndarray:
    labels, corner = [], []
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        label, *rest = line.split()
        if not label.isdecimal() or int(label) >= classes:
            raise DataError(f"{where}: class {label!r} is not within 0..{classes - 1} of classes.txt")
        x, y, w, h = _four(rest, where)
        labels.append(int(label))
        corner.append((x - w / 2, y - h / 2, x + w / 2, y + h / 2))
    return sound(np.array(labels, dtype=np.float64), np.array(corner, dtype=np.float64).reshape(-1, 4), left_out)


# boxes -----------------------------------------------------------------------------------------------------------


def sound(labels: np.ndarray, corner: np.ndarray, left_out: dict[str, int]) -> np.ndarray:
    """(n, 5) rows of the boxes that have an area inside the image."""
    upright = (corner[:, 2:] > corner[:, :2]).all(1)
    inside = np.clip(corner, 0.0, 1.0)
    visible = (inside[:, 2:] > inside[:, :2]).all(1)
    _count(left_out, "boxes without an area", int((~upright).sum()))
    _count(left_out, "boxes outside the image", int((upright & ~visible).sum()))
    keep = upright & visible
    return from_corners(labels[keep], inside[keep])


def _four(values: Any, where: str) -> tuple[float, float, float, float]:
    try:
        a, b, c, d = (float(value) for value in values)
    except (TypeError, ValueError) as problem:
        raise DataError(f"{where}: a box is four numbers; got {values!r}") from problem
    if not all(map(math.isfinite, (a, b, c, d))):
        raise DataError(f"{where}: a box is four finite numbers; got {values!r}")
    return a, b, c, d


def _count(left_out: dict[str, int], reason: str, how_many: int = 1) -> None:
    if how_many:
        left_out[reason] = left_out.get(reason, 0) + how_many


def pixels(scenes: Sequence[Scene], size: Size) -> np.ndarray:
    """(n, 3, height, width) uint8, files decoded and resized."""
    x = np.empty((len(scenes), 3, *size), np.uint8)
    for slot, scene in zip(x, scenes, strict=True):
        slot[:] = scene.image if isinstance(scene.image, np.ndarray) else read_picture(scene.image, size[::-1])
    return x
