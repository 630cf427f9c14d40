"""Published sets of images that do not fit in memory, in the layouts in which they are published, decoded on demand.

A reader lists the files and labels of both parts; `Samples` decodes an image when a client first needs it. A set that
is published without a test part gets a fixed fifth of every class.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from everfed.data.catalogue import FileLayout, KnownSet
from everfed.data.formats import TEST_FRACTION, names_the_file
from everfed.data.images import class_folders, listed, read_picture
from everfed.data.lazy import Samples, cache_folder
from everfed.data.source import Columns, Source, make_targets, trained
from everfed.data.targets import SPLIT_SEED, held_out
from everfed.errors import DataError

Files = list[tuple[Path, int]]  # (file, class id)


class Listing(NamedTuple):
    """The files of both parts, the names of the classes, and what else is known of every image."""

    train: Files
    test: Files
    classes: Sequence[str]
    columns: Columns = MappingProxyType({})


def image_set(
    name: str,
    folders: Sequence[tuple[str, str]],
    read: Callable[[Path], Listing],
    get_it: str,
    size: int = 224,
    crop: bool = True,
) -> KnownSet:
    """folders: places below the data folder, as (folder, what must be in it). read: folder -> Listing. size: of
    decoded images. crop: resize the shorter side to 8/7 of that and take the centre, as the papers' test transform
    does; else both sides are resized."""

    def load(needed: str, files: tuple[Path, ...]) -> Source:
        root = files[0].parent if needed else files[0]
        return lazy_images(name, read(root), root, size, crop)

    return KnownSet(
        tuple(FileLayout((below,), ((needed,),), partial(load, needed)) for below, needed in folders), get_it
    )


def lazy_images(name: str, listing: Listing, root: Path, size: int, crop: bool) -> Source:
    """A source whose images are decoded when they are asked for."""
    for part, files in (("training", listing.train), ("test", listing.test)):
        if not files:
            raise DataError(f"{root}: data set {name!r} has no {part} images there")
    y_train, y_test = _labels(listing.train), _labels(listing.test)
    targets = make_targets(name, y_train, y_test, len(listing.classes), listing.classes)
    folder = cache_folder(None)
    x: list[Any] = [
        Samples(partial(_picture, files, size, crop), len(files), folder, name=f"{name} {part}", workers=4)
        for part, files in (("train", listing.train), ("test", listing.test))
    ]
    names, columns = targets.names, listing.columns
    y = targets.train, targets.test
    return trained(Source(name, x[0], y[0], x[1], y[1], targets.classes, names, str(root), columns=columns))


def _picture(files: Files, size: int, crop: bool, index: int) -> np.ndarray:
    return read_picture(files[index][0], (size, size), crop=crop)


def divided(files: Files, root: Path) -> tuple[Files, Files]:
    """(train, test): a fixed fifth of every class is for testing."""
    if not files:
        raise DataError(f"{root}: there are no images in class folders")
    kept, held = held_out(_labels(files), TEST_FRACTION, np.random.default_rng(SPLIT_SEED))
    return [files[i] for i in kept], [files[i] for i in held]


def _labels(files: Files) -> np.ndarray:
    return np.array([label for _, label in files], np.int64)


# layouts ------------------------------------------------------------------------------------------------------------
def _class_folders(root: Path) -> Listing:
    """<root>/<class>/*, or the same below train/ and test/."""
    parts = (root / "train").is_dir() and (root / "test").is_dir()
    classes = class_folders(root / "train" if parts else root)
    if parts:
        return Listing(listed(root / "train", classes), listed(root / "test", classes), classes)
    return Listing(*divided(listed(root, classes), root), classes)


def read_imagenet(root: Path, train: int = 600, test: int = 100) -> Listing:
    """ILSVRC2012's training folder. Its test part has no labels and its validation part 50 images a class; STAMP's pool
    has 600 + 100 of every class. Here these are the first 600 and the next 100 by file name."""
    classes = class_folders(root)
    by_class: list[Files] = [[] for _ in classes]
    for path, label in listed(root, classes):
        by_class[label].append((path, label))
    for wnid, files in zip(classes, by_class, strict=True):
        if len(files) < train + test:
            raise DataError(f"{root / wnid}: {len(files)} images where {train} + {test} are needed")
    return Listing(
        [one for files in by_class for one in files[:train]],
        [one for files in by_class for one in files[train : train + test]],
        classes,
    )


def _cub(root: Path) -> Listing:
    """CUB_200_2011/: images.txt, image_class_labels.txt, train_test_split.txt, classes.txt; each line `id value`."""
    tables = ("images", "image_class_labels", "train_test_split", "classes")
    images, label, trains, classes = (_numbered(root / f"{name}.txt") for name in tables)
    files: tuple[Files, Files] = [], []
    for number, path in images.items():
        if number not in label or number not in trains:
            raise DataError(f"{root}: image {number} of images.txt has no line in both other lists")
        files[trains[number] != "1"].append((root / "images" / path, int(label[number]) - 1))
    return Listing(*files, list(classes.values()))


def _numbered(path: Path) -> dict[str, str]:
    lines = (line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    return {number: value.strip() for number, value in lines}


def _cars(root: Path) -> Listing:
    """Stanford Cars: cars_annos.mat beside car_ims/; or devkit/ beside cars_train/ and cars_test/, with the labels of
    the test part in cars_test_annos_withlabels.mat."""
    if (root / "cars_annos.mat").is_file():
        content = _mat(root / "cars_annos.mat")
        rows = [(root / one["relative_im_path"], int(one["class"]) - 1, one["test"]) for one in content["annotations"]]
        parts = [[(path, label) for path, label, test in rows if bool(test) is wanted] for wanted in (False, True)]
        return Listing(parts[0], parts[1], _words(content["class_names"]))
    with_labels = "cars_test_annos_withlabels.mat"
    test = next((place for place in (root / with_labels, root / "devkit" / with_labels) if place.is_file()), None)
    if test is None:
        raise DataError(f"{root}: needs {with_labels}, which has the labels of the test part")
    annotations = (("cars_train", root / "devkit" / "cars_train_annos.mat"), ("cars_test", test))
    found = [
        [(root / below / one["fname"], int(one["class"]) - 1) for one in _mat(path)["annotations"]]
        for below, path in annotations
    ]
    return Listing(found[0], found[1], _words(_mat(root / "devkit" / "cars_meta.mat")["class_names"]))


def _words(names: Any) -> list[str]:
    return [str(name) for name in np.atleast_1d(names)]


@names_the_file
def _mat(path: Path) -> dict[str, Any]:
    from scipy.io import loadmat

    return dict(loadmat(path, simplify_cells=True))


_ISIC = "ISIC_2019_Training_{}"


def _isic(root: Path) -> Listing:
    """ISIC 2019: the table of diagnoses beside the folder of images. With the table of metadata all images of a lesion
    are in one part, and the column `center` says where they were taken (HAM, BCN, MSK)."""
    header, *rows = _csv(root / _ISIC.format("GroundTruth.csv"))
    names = [name for name in header[1:] if name != "UNK"]
    files: Files = []
    for image, *flags in rows:
        classes = [
            names.index(name) for name, flag in zip(header[1:], flags, strict=True) if float(flag) and name in names
        ]
        if len(classes) != 1:
            raise DataError(
                f"{root / _ISIC.format('GroundTruth.csv')}: {image} has {len(classes)} diagnoses; expected one"
            )
        files.append((root / _ISIC.format("Input") / f"{image}.jpg", classes[0]))
    lesions = _lesions(root / _ISIC.format("Metadata.csv"))
    lesion = np.array([lesions.get(path.stem) or path.stem for path, _ in files])
    _, first, group = np.unique(lesion, return_index=True, return_inverse=True)
    held = held_out(_labels(files)[first], TEST_FRACTION, np.random.default_rng(SPLIT_SEED))[1]
    tested = np.isin(group, held)
    parts = [[files[i] for i in np.flatnonzero(tested == wanted)] for wanted in (False, True)]
    if not lesions:
        return Listing(parts[0], parts[1], names)
    center = np.array([(lesions.get(path.stem) or "unknown").split("_")[0][:3] for path, _ in files])
    return Listing(parts[0], parts[1], names, {"center": (center[~tested], center[tested])})


def _lesions(path: Path) -> dict[str, str]:
    """The lesion of every image; nothing without the table."""
    if not path.is_file():
        return {}
    header, *rows = _csv(path)
    image, lesion = header.index("image"), header.index("lesion_id")
    return {row[image]: row[lesion] for row in rows}


def _csv(path: Path) -> list[list[str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return [row for row in csv.reader(file) if row]


_IMAGENET = tuple(
    (below, "") for below in ("imagenet/train", "imagenet/ILSVRC/Data/CLS-LOC/train", "ILSVRC/Data/CLS-LOC/train")
)
_ILSVRC = "https://image-net.org/download.php (ILSVRC2012, training images), unpacked"

_SETS: Mapping[str, tuple[Any, ...]] = {
    "imagenet-32": (_IMAGENET, read_imagenet, _ILSVRC, 32, False),
    "imagenet-224": (_IMAGENET, read_imagenet, _ILSVRC, 224, False),
    "imagenet-r": (
        (("imagenet-r", ""),),
        _class_folders,
        "https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar, unpacked",
    ),
    "imagenet-a": (
        (("imagenet-a", ""),),
        _class_folders,
        "https://people.eecs.berkeley.edu/~hendrycks/imagenet-a.tar, unpacked",
    ),
    "cub200": (
        (("CUB_200_2011", "images.txt"), ("cub200/CUB_200_2011", "images.txt"), ("cub200", "images.txt")),
        _cub,
        "https://data.caltech.edu/records/65de6-vp158 (CUB_200_2011.tgz), unpacked",
    ),
    "cars": (
        tuple((below, needed) for needed in ("cars_annos.mat", "devkit") for below in ("cars", "stanford_cars")),
        _cars,
        "Stanford Cars (car_ims.tgz with cars_annos.mat; or cars_train, cars_test, devkit and the test labels)",
    ),
    "eurosat": (
        tuple((below, "AnnualCrop") for below in ("EuroSAT/2750", "eurosat/2750", "EuroSAT", "eurosat", "EuroSAT_RGB")),
        _class_folders,
        "https://zenodo.org/records/7711810 (EuroSAT_RGB.zip), unpacked",
        64,
        False,
    ),
    "isic2019": (
        tuple((below, _ISIC.format("GroundTruth.csv")) for below in ("isic2019", "ISIC2019", "ISIC_2019")),
        _isic,
        "https://challenge.isic-archive.com/data/#2019 (training images, ground truth and metadata)",
    ),
}
KNOWN = {name: image_set(name, *how) for name, how in _SETS.items()}
