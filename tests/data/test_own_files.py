"""Data of a user's own as it lies on disk: folders of images, tables; and published sets that are fetched."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from everfed import streams
from everfed.cli import app
from everfed.data import DataError, load
from everfed.data import download as downloads
from everfed.data.available import available
from everfed.data.download import Archive, fetch
from everfed.streams.options import OptionError

Image = pytest.importorskip("PIL.Image", reason="the extra `images` is not installed")


# images --------------------------------------------------------------------------------------------------------------
def picture(path: Path, size: tuple[int, int] = (8, 8), mode: str = "L", value: Any = 100) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


def test_a_folder_of_class_folders_splits_itself(tmp_path: Path) -> None:
    for label, value in (("ant", 10), ("bee", 200)):
        for number in range(10):
            picture(tmp_path / "zoo" / label / f"{number}.png", value=value + number)
    source = load(tmp_path / "zoo")
    assert source.class_names == ("ant", "bee") and source.x_train.shape == (16, 1, 8, 8)
    assert source.y_test.tolist() == [0, 0, 1, 1]  # a fifth of every class
    seen = sorted([*source.x_train[:, 0, 0, 0].tolist(), *source.x_test[:, 0, 0, 0].tolist()])
    assert seen == [*range(10, 20), *range(200, 210)]
    assert ("zoo", True, str(tmp_path / "zoo")) in available(tmp_path)


def test_mixed_sizes_need_a_size_and_mixed_modes_become_colour(tmp_path: Path) -> None:
    kinds = [((8, 8), "L", 60), ((16, 4), "RGB", (60, 60, 60)), ((5, 9), "RGBA", (60, 60, 60, 255)), ((8, 8), "P", 0)]
    for label in ("ant", "bee"):
        for number, (size, mode, value) in enumerate(kinds * 2):
            picture(tmp_path / label / f"{number}.png", size, mode, value)
    with pytest.raises(DataError, match=r"1.png: 16x4 pixels where others have 8x8; set stream.image_size"):
        load(tmp_path)
    source = load(tmp_path, image_size=6)
    assert source.x_train.shape[1:] == (3, 6, 6)
    assert set(source.x_train.unique().tolist()) == {0, 60}
    stream = streams.build(
        {"dataset": str(tmp_path), "scenario": "domain-incremental", "image_size": 6, "tasks": 1, "clients": 2}, 0, 1
    )
    assert stream.input_shape == (3, 6, 6)


def test_sixteen_bit_grey_keeps_its_range(tmp_path: Path) -> None:
    for label in ("ant", "bee"):
        for number in range(5):
            path = tmp_path / label / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(np.full((4, 4), 256 * 77, dtype=np.uint16)).save(path)
    assert load(tmp_path).x_train.unique().tolist() == [77]


def test_a_folder_without_images_says_what_is_needed(tmp_path: Path) -> None:
    (tmp_path / "zoo/ant").mkdir(parents=True)
    with pytest.raises(DataError, match=r"no images in class folders; an image folder has root/<class>/\*, or"):
        load(tmp_path / "zoo")


# tables --------------------------------------------------------------------------------------------------------------
ROWS = [(number, -number / 2, "well" if number % 2 else "ill") for number in range(20)]


def write_csv(path: Path, header: str = "age,dose,label", rows: Any = ROWS, delimiter: str = ",") -> Path:
    lines = [header.replace(",", delimiter), *(delimiter.join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_csv_with_labels_of_text(tmp_path: Path, delimiter: str) -> None:
    source = load(write_csv(tmp_path / "clinic.csv", delimiter=delimiter))
    assert (source.class_names, source.x_train.shape, source.x_train.dtype.is_floating_point) == (
        ("ill", "well"),
        (16, 2),
        True,
    )
    both = np.concatenate([source.x_train, source.x_test])
    assert sorted(both[:, 0]) == list(range(20)) and (both[:, 1] == -both[:, 0] / 2).all()
    assert (source.y_train.numpy() == source.x_train[:, 0].numpy() % 2).all()
    assert source.y_test.bincount().tolist() == [2, 2]


def test_a_parquet_table_gives_the_same_and_is_found_by_name(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="the extra `notebooks` is not installed")
    pytest.importorskip("pyarrow", reason="the extra `tables` is not installed")
    pandas.DataFrame(ROWS, columns=["age", "dose", "label"]).to_parquet(tmp_path / "clinic.parquet")
    one, two = load("clinic", tmp_path), load(write_csv(tmp_path / "other.csv"))
    assert (one.x_train == two.x_train).all() and (one.y_test == two.y_test).all()
    assert ("clinic", True, str(tmp_path / "clinic.parquet")) in available(tmp_path)


def test_a_column_divides_the_rows_and_another_may_be_the_label(tmp_path: Path) -> None:
    rows = [(number, number % 3 + 5, "test" if number >= 6 else "train") for number in range(9)]
    path = write_csv(tmp_path / "t.csv", "age,grade,split", rows)
    source = load(path, label="grade")
    assert (source.x_train.flatten().tolist(), source.x_test.flatten().tolist()) == ([0, 1, 2, 3, 4, 5], [6, 7, 8])
    assert source.class_names == ("5", "6", "7") and source.y_test.tolist() == [0, 1, 2]
    table = {"dataset": str(path), "scenario": "domain-incremental", "tasks": 1, "clients": 1, "label": "grade"}
    assert streams.build({**table, "transform": "permute"}, 0, 1).classes == 3
    with pytest.raises(OptionError, match=r"stream.label: names a column of a table \(.csv.*\); digits is none"):
        streams.build({**table, "dataset": "digits"}, 0, 1)


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        ("age,dose,outcome", ROWS, "which column has the labels.*stream.label; the columns are age, dose, outcome"),
        ("age,label,class", ROWS, "which column has the labels"),
        ("age,dose,label", [("1", "x", "ill")], "column 'dose' holds text such as 'x'; features are numbers"),
        ("age,dose,label", [("1", "nan", "ill")], "line 2: column 'dose' says 'nan'; fill it in, or remove the row"),
        ("age,dose,label", [("1", "2", "ill"), ("1", "inf", "ill")], "line 3: column 'dose' has no finite number"),
        ("age,dose,label", [("1", "", "ill")], "line 2: column 'dose' is empty; fill it in, or remove the row"),
        ("age,dose,label", [("1", " ", "ill")], "line 2: column 'dose' is empty"),
        ("age,dose,label", [("1", "2", "0"), ("1", "NA", "1")], "line 3: column 'dose' says 'NA'"),
        ("age,dose,label", [("1", "2", "0"), ("1", "2", "NA")], "line 3: column 'label' says 'NA'"),
        ("age,dose,label", [("1", "2", "inf")], "line 2: column 'label' has no finite number"),
        ("age,dose,label", [("1", "2", "")], "line 2: column 'label' is empty"),
        ('age,"do\nse",label', [("1", "2", "0"), ("1", "", "1")], "line 4: column 'do.*se' is empty"),
        ("age,dose,label", [("1", "2")], "line 2 has 2 values where the first line has 3"),
        ("age,dose,label", [], "needs a first line with the names"),
        ("age,split,label", [("1", "dev", "ill")], "column 'split' must hold train or test; it has 'dev'"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(tmp_path: Path, header: str, rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"(?s)t.csv: .*{message}"):
        load(write_csv(tmp_path / "t.csv", header, rows))


def test_damaged_tables_are_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra `tables` is not installed")
    for name in ("t.parquet", "t.csv"):
        (tmp_path / name).write_bytes(b"\xff\xfe nothing")
        with pytest.raises(DataError, match=f"{name}: cannot be read"):
            load(tmp_path / name)


# published sets ------------------------------------------------------------------------------------------------------
def idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return gzip.compress(header + array.tobytes(), mtime=0)


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with four files of MNIST's names, and an archive; their checksums are those that are expected."""
    place = tmp_path / "published"
    place.mkdir()
    x, y = np.arange(20 * 28 * 28, dtype=np.uint8).reshape(20, 28, 28), np.arange(20, dtype=np.uint8) % 10
    for part in ("train", "t10k"):
        (place / f"{part}-images-idx3-ubyte.gz").write_bytes(idx(x))
        (place / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(y))
    with tarfile.open(place / "cifar-100-binary.tar.gz", "w:gz") as archive:
        for name in ("train.bin", "test.bin"):
            member = tarfile.TarInfo(f"cifar-100-binary/{name}")
            member.size = 2 * 3074
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    for name, known in downloads.ARCHIVES.items():
        files = {f: hashlib.md5((place / f).read_bytes()).hexdigest() for f in known.files if (place / f).exists()}
        if files:
            monkeypatch.setitem(downloads.ARCHIVES, name, Archive(known.base, files, known.folder))
    return place


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]


@pytest.fixture
def server(published: Path) -> Iterator[tuple[str, list[str]]]:
    """(address, paths that were asked for) of a web server with the published files."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(published))) as web:
        web.asked = []  # type: ignore[attr-defined]
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{web.server_port}", web.asked  # type: ignore[attr-defined]
        web.shutdown()


def test_a_set_is_downloaded_checked_and_found(server: tuple[str, list[str]], tmp_path: Path) -> None:
    address, asked = server
    arguments = ["data", "get", "mnist", "--data", str(tmp_path / "data"), "--from", address]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    assert f"mnist: {tmp_path / 'data/mnist'}" in found.stdout and len(asked) == 4
    assert load("mnist", tmp_path / "data").x_train.shape == (20, 1, 28, 28)
    assert CliRunner().invoke(app, arguments).exit_code == 0 and len(asked) == 4  # what is there and whole is kept
    (tmp_path / "data/mnist/t10k-labels-idx1-ubyte.gz").write_bytes(b"half")
    assert CliRunner().invoke(app, arguments).exit_code == 0 and len(asked) == 5


def test_an_archive_is_unpacked(server: tuple[str, list[str]], tmp_path: Path) -> None:
    reported: list[tuple[str, int, int | None]] = []
    fetch("cifar100", tmp_path, server[0], lambda *progress: reported.append(progress))
    assert load("cifar100", tmp_path).x_train.shape == (2, 3, 32, 32)
    name, done, size = reported[-1]
    assert name == "cifar-100-binary.tar.gz" and done == size


def test_a_file_with_another_checksum_is_not_kept(
    server: tuple[str, list[str]], published: Path, tmp_path: Path
) -> None:
    (published / "train-images-idx3-ubyte.gz").write_bytes(b"something else")
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz: its checksum is \w{32}, not \w{32}.*--from"):
        fetch("mnist", tmp_path / "data", server[0])
    assert list((tmp_path / "data/mnist").iterdir()) == []


def test_without_a_network_files_are_brought_by_hand(published: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="127.0.0.1:9/train-images.* cannot be fetched .* name its folder with --from"):
        fetch("mnist", tmp_path, "http://127.0.0.1:9")
    fetch("mnist", tmp_path, str(published))
    assert len(load("mnist", tmp_path).x_test) == 20
    with pytest.raises(DataError, match="--from .*: there is no usps.bz2"):
        fetch("usps", tmp_path, str(published))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", "get", "mnits", "--data", "x"], "there is no address for a data set 'mnits'. Did you mean mnist, "),
        (["data", "get", "mnist"], "no data folder is named; use --data DIR, or set EVERFED_DATA"),
    ],
)
def test_what_cannot_be_got_is_refused(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERFED_DATA", raising=False)
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2 and message in found.stderr


def test_published_addresses_and_checksums_are_whole() -> None:
    for archive in downloads.ARCHIVES.values():
        assert archive.base.startswith("http") and not archive.base.endswith("/")
        assert all(len(checksum) == 32 and int(checksum, 16) for checksum in archive.files.values())
