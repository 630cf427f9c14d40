"""Fetching published sets into the data folder: downloaded or copied, checked by their checksums, unpacked."""

from __future__ import annotations

import contextlib
import hashlib
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from everfed.errors import DataError

CHUNK = 1 << 20  # bytes
TIMEOUT = 60.0  # seconds without a byte
Report = Callable[[str, int, int | None], None]  # file, bytes so far, of how many


@dataclass(frozen=True)
class Archive:
    """Files of a set. base: the address that they are below. files: {name: md5, as it is published}. folder: where they
    belong in the data folder; archives are unpacked there."""

    base: str
    files: Mapping[str, str]
    folder: str


_TORONTO = "https://www.cs.toronto.edu/~kriz"
ARCHIVES: Mapping[str, Archive] = {
    "mnist": Archive(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
        "mnist",
    ),
    "usps": Archive(
        "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass",
        {"usps.bz2": "ec16c51db3855ca6c91edd34d0e9b197", "usps.t.bz2": "8ea070ee2aca1ac39742fdd1ef5ed118"},
        "usps",
    ),
    "svhn": Archive(
        "http://ufldl.stanford.edu/housenumbers",
        {"train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373", "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3"},
        "svhn",
    ),
    "cifar10": Archive(_TORONTO, {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}, "cifar10"),
    "cifar100": Archive(_TORONTO, {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"}, "cifar100"),
    "tiny-imagenet": Archive(
        "http://cs231n.stanford.edu", {"tiny-imagenet-200.zip": "90528d7ca1a48142e341f4ef8d21d0de"}, "tiny-imagenet"
    ),
}


def fetch(name: str, root: Path, source: str | None = None, report: Report = lambda *_: None) -> Path:
    """Bring a set into the data folder `root`; returns its folder. source: a folder that has the files, or another
    address. A file that is there and whole is kept. Raises DataError."""
    archive = ARCHIVES[name]
    place = root / archive.folder
    with _named(place):
        place.mkdir(parents=True, exist_ok=True)
        for file, checksum in archive.files.items():
            target = place / file
            if not (target.is_file() and _md5(target) == checksum):
                _fetch_file(source or archive.base, target, checksum, report)
            _unpack(target)
    return place


def _fetch_file(source: str, target: Path, checksum: str, report: Report) -> None:
    """Into a temporary file, which gets its name once its checksum is right."""
    partial = target.with_name(f"{target.name}.part")
    try:
        with _opened(source, target.name) as (stream, size), open(partial, "wb") as file:
            done = 0
            while chunk := stream.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                report(target.name, done, size)
        found = _md5(partial)
        if found != checksum:
            raise DataError(
                f"{source.rstrip('/')}/{target.name}: its checksum is {found}, not {checksum}; it is damaged or "
                "another file, and was not kept. Try again, or give a copy with --from"
            )
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(source: str, name: str) -> Iterator[tuple[IO[bytes], int | None]]:
    """(stream, size) of a file below an address or in a folder."""
    if "://" not in source:
        path = Path(source).expanduser() / name
        if not path.is_file():
            raise DataError(f"--from {source}: there is no {name}")
        with open(path, "rb") as file:
            yield file, path.stat().st_size
        return
    url = f"{source.rstrip('/')}/{name}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            length = response.headers.get("Content-Length")
            yield response, int(length) if length else None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as problem:
        reason = getattr(problem, "reason", problem)
        raise DataError(
            f"{url} cannot be fetched ({reason}). Without a network, bring {name} by hand and name its folder with "
            "--from"
        ) from problem


def _md5(path: Path) -> str:
    """As the sets' publishers give it: against damage, not against malice."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _unpack(path: Path) -> None:
    """An archive beside itself; anything else is left alone. Members outside the folder are refused."""
    marker = path.with_name(f".{path.name}.unpacked")
    if marker.exists():
        return
    if path.name.endswith(".tar.gz"):
        with tarfile.open(path) as archive:
            archive.extractall(path.parent, filter="data")
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            archive.extractall(path.parent)
    else:
        return
    marker.touch()


@contextlib.contextmanager
def _named(place: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as problem:
        raise DataError(f"{place}: {problem}") from problem
