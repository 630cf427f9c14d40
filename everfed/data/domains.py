"""Data sets that come as several domains with the same classes: Digit10, Office-31, Office-Caltech-10, PACS, own ones.

Every domain is a `Source` of its own, in the order in which tasks will follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from everfed.data import published
from everfed.data.catalogue import FileLayout, Files, KnownSet, data_folder
from everfed.data.formats import Arrays, names_the_file, split_arrays
from everfed.data.images import class_folders, decoded, listed
from everfed.data.source import Source, make_source
from everfed.data.sources import load
from everfed.errors import DataError
from everfed.naming import places

DIGIT10 = ("mnist", "emnist-digits", "usps", "svhn")
JOINED = "+"  # "mnist+usps" names two sets that follow each other


@dataclass(frozen=True)
class Domains:
    """Domains with the same classes. format: default (channels, size) that images are brought to."""

    name: str
    names: tuple[str, ...]
    sources: tuple[Source, ...]
    format: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name, source in zip(self.names, self.sources, strict=True):
            if source.classes != self.sources[0].classes:
                raise DataError(
                    f"{self.name}: domain {name!r} has {source.classes} classes and {self.names[0]!r} has "
                    f"{self.sources[0].classes}; domains must share their classes"
                )

            if source.targets != self.sources[0].targets:
                raise DataError(
                    f"{self.name}: the targets of domain {name!r} are {source.targets} and those of {self.names[0]!r} "
                    f"{self.sources[0].targets}; domains must share their kind"
                )

    @property
    def targets(self) -> str:
        """Of all domains, one of `everfed.data.targets.KINDS`."""
        return self.sources[0].targets

    def chosen(self, names: tuple[str, ...]) -> Domains:
        """Only these domains, in this order."""
        for name in names:
            if name not in self.names:
                raise DataError(f"{self.name} has no domain {name!r}; it has {', '.join(self.names)}")
        return Domains(self.name, names, tuple(self.sources[self.names.index(n)] for n in names), self.format)


def load_domains(name_or_path: str | Path, data_dir: str | Path | None = None) -> Domains:
    """The domains of that name.

    `digit10` and names joined by "+" are made of data sets; the named sets come from the data folder; anything else is
    a folder <domain>/[train|test/]<class>/*.png|jpg, as a path or as a name in the data folder.
    """
    name = str(name_or_path)
    if name == "digit10":
        return joined(name, DIGIT10, data_dir, (1, 28))
    if JOINED in name:
        return joined(name, tuple(part.strip() for part in name.split(JOINED)), data_dir)
    folder = data_folder(data_dir)
    if name not in KNOWN:
        return _load_own(name, folder)
    found: Domains = KNOWN[name].load(name, folder)[0]
    return found


def joined(
    name: str, sets: tuple[str, ...], data_dir: str | Path | None, form: tuple[int, int] | None = None
) -> Domains:
    """Whole data sets as domains."""
    return Domains(name, sets, tuple(load(one, data_dir) for one in sets), form)


def read_domain_folders(name: str, root: Path, domains: tuple[str, ...], size: int) -> Domains:
    """root/<domain>/ each with class folders, directly, below images/, or below train/ and test/."""
    return Domains(name, domains, tuple(_read_domain(root / domain, size) for domain in domains), (3, size))


def _read_domain(folder: Path, size: int) -> Source:
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        classes = class_folders(folder / "train")
        parts = [decoded(listed(folder / part, classes), (size, size)) for part in ("train", "test")]
        arrays = Arrays(*parts[0], *parts[1], tuple(classes))
    else:
        root = folder / "images" if (folder / "images").is_dir() else folder
        classes = class_folders(root)
        if not classes:
            raise DataError(f"{root}: a domain needs one folder of images per class")
        arrays = split_arrays(*decoded(listed(root, classes), (size, size)), classes)
    return make_source(folder.name, *arrays[:4], class_names=arrays.class_names, origin=str(folder.absolute()))


def _load_own(name: str, folder: Path | None) -> Domains:
    found = places(name, folder)
    for place in found:
        if place.is_dir():
            return read_domain_folders(place.name, place, tuple(class_folders(place)), 64)
    allowed = ", ".join(("digit10", *KNOWN, "sets joined by '+'"))
    raise DataError(
        f"domains {name!r} were not found. Looked for a folder at: {', '.join(map(str, found))}. "
        f"Allowed: {allowed}, or a path"
    )


# Office-Caltech-10 as SURF features ---------------------------------------------------------------------------------
_OFFICE_CALTECH = ("amazon", "caltech", "dslr", "webcam")
_SURF_FILES = ("amazon_SURF_L10.mat", "Caltech10_SURF_L10.mat", "dslr_SURF_L10.mat", "webcam_SURF_L10.mat")


def _from_mats(files: Files) -> Domains:
    parts = [_read_surf(path) for path in files]
    return _features([x for x, _ in parts], [y for _, y in parts], files[0].parent)


def _from_npz(files: Files) -> Domains:
    """x (n, 800), y (n,) and domain (n,), as numbers or names."""
    (path,) = files
    with np.load(path, allow_pickle=False) as file:
        if not {"x", "y", "domain"} <= set(file.files):
            raise DataError(f"{path}: needs the arrays x, y and domain; it has {', '.join(file.files)}")
        x, y, domain = file["x"], file["y"], file["domain"]
        table = file["domains"] if "domains" in file.files else np.array(_OFFICE_CALTECH)
    names = domain if domain.dtype.kind in "US" else table[domain]
    members = [np.flatnonzero(names == name) for name in _OFFICE_CALTECH]
    return _features([x[rows] for rows in members], [y[rows] for rows in members], path)


@names_the_file
def _read_surf(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(features, labels) of one domain in the files that go with geodesic flow kernels; labels run from 1 to 10."""
    from scipy.io import loadmat

    content = loadmat(path)
    return content["fts"].astype(np.float32), content["labels"].reshape(-1).astype(np.int64) - 1


def _features(xs: list[np.ndarray], ys: list[np.ndarray], path: Path) -> Domains:
    """Histograms of visual words, as shares of a sample's words times the number of different words: 1 on average."""
    sources = []
    for name, x, y in zip(_OFFICE_CALTECH, xs, ys, strict=True):
        share = x.astype(np.float32) / np.maximum(x.sum(1, keepdims=True), 1) * x.shape[1]
        arrays = split_arrays(share, y)
        sources.append(make_source(name, *arrays[:4], classes=10, origin=str(path.absolute())))
    return Domains("office-caltech10", _OFFICE_CALTECH, tuple(sources))


# DomainNet ------------------------------------------------------------------------------------------------------------
_DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")


def _read_domainnet(files: Files) -> Domains:
    """<domain>/<class>/*, divided by the published lists <domain>_train.txt and <domain>_test.txt: `path label`."""
    root = files[0].parent
    lists = {
        (domain, part): _listed_by(root / f"{domain}_{part}.txt") for domain in _DOMAINNET for part in ("train", "test")
    }
    named = {label: path.parent.name for files in lists.values() for path, label in files}
    classes = [named.get(label, str(label)) for label in range(max(named, default=-1) + 1)]
    sources = (
        published.lazy_images(
            domain, published.Listing(lists[domain, "train"], lists[domain, "test"], classes), root, 224, crop=True
        )
        for domain in _DOMAINNET
    )
    return Domains("domainnet", _DOMAINNET, tuple(sources))


def _listed_by(path: Path) -> published.Files:
    rows = [line.rsplit(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if wrong := next((row for row in rows if len(row) != 2 or not row[1].isdigit()), None):
        raise DataError(f"{path}: expected a path and the number of a class, got {' '.join(wrong)!r}")
    return [(path.parent / name, int(label)) for name, label in rows]


def _folders(name: str, domains: tuple[str, ...], places: tuple[str, ...], size: int) -> FileLayout:
    """A folder of every domain. size: of decoded images."""
    files = tuple((domain,) for domain in domains)
    return FileLayout(places, files, lambda found: read_domain_folders(name, found[0].parent, domains, size))


_PLACES = ("", "office_caltech10", "surf")
_OFFICE_FOLDERS = ("office_caltech10", "office-caltech10", "office_caltech_10", "OfficeCaltech10")
KNOWN: Mapping[str, KnownSet] = {
    "office31": KnownSet(
        (
            _folders(
                "office31",
                ("amazon", "dslr", "webcam"),
                ("office31", "Office31", "office-31", "office_31", "office"),
                300,
            ),
        ),
        "https://faculty.cc.gatech.edu/~judy/domainadapt/ (domain_adaptation_images.tar.gz)",
    ),
    "office-caltech10": KnownSet(
        (
            FileLayout(_PLACES, (("office_caltech10.npz",),), _from_npz),
            FileLayout(_PLACES, tuple((name,) for name in _SURF_FILES), _from_mats),
            _folders("office-caltech10", _OFFICE_CALTECH, _OFFICE_FOLDERS, 300),
        ),
        "https://github.com/jindongwang/transferlearning/tree/master/data (images, or SURF features)",
    ),
    "pacs": KnownSet(
        (
            _folders(
                "pacs",
                ("photo", "art_painting", "cartoon", "sketch"),
                ("pacs", "PACS", "pacs/kfold", "PACS/kfold"),
                227,
            ),
        ),
        "https://sketchx.eecs.qmul.ac.uk/downloads/ (PACS)",
    ),
    "domainnet": KnownSet(
        (FileLayout(("domainnet", "DomainNet"), (("clipart_train.txt",),), _read_domainnet),),
        "https://ai.bu.edu/M3SDA/ (the six archives and their train and test lists)",
    ),
}
