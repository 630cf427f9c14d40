"""Every layout a named set may have, written by hand and found again."""

from __future__ import annotations

import bz2
import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from everfed.data import DataError, load
from everfed.data.available import available
from everfed.data.catalogue import KNOWN
from everfed.data.domains import KNOWN as DOMAINS
from everfed.data.published import KNOWN as PUBLISHED
from everfed.data.texts import KNOWN as KNOWN_TEXTS
from everfed.data.utterances import KNOWN as TEXTS


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("EVERFED_DATA", raising=False)


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.tobytes()


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


LABELS = np.arange(12, dtype=np.uint8) % 10


def write_idx_set(folder: Path, names: list[str], compress: bool, seed: int = 0) -> np.ndarray:
    x = pixels(12, 28, 28, seed=seed)
    for name, array in zip(names, (x, LABELS, x[:10], LABELS[:10]), strict=True):
        content = idx(array)
        write(folder / (f"{name}.gz" if compress else name), gzip.compress(content) if compress else content)
    return x


MNIST = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("place", ["", "mnist", "MNIST/raw"])
def test_mnist_idx(tmp_path, place, compress):
    x = write_idx_set(tmp_path / place, MNIST, compress)
    source = load("mnist", tmp_path)
    assert np.array_equal(source.x_train[:, 0].numpy(), x)
    assert source.x_train.dtype == torch.uint8
    assert source.y_test.tolist() == LABELS[:10].tolist()
    assert (source.classes, source.class_names[7]) == (10, "7")


def test_mnist_idx_with_dots(tmp_path):
    write_idx_set(tmp_path, [name.replace("-idx", ".idx") for name in MNIST], compress=False)
    assert len(load("mnist", tmp_path).x_train) == 12


def test_emnist_idx_is_turned_upright(tmp_path):
    names = [f"emnist-digits-{p}-{k}-ubyte" for p in ("train", "test") for k in ("images-idx3", "labels-idx1")]
    x = write_idx_set(tmp_path / "EMNIST/raw", names, compress=True)
    for name in ("emnist", "emnist-digits"):
        assert np.array_equal(load(name, tmp_path).x_train[:, 0].numpy(), x.transpose(0, 2, 1))


def test_cifar10_binary(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    for i, name in enumerate([*(f"data_batch_{b}" for b in range(1, 6)), "test_batch"]):
        records = np.concatenate([np.full((2, 1), i % 5, np.uint8), pixels(2, 3072, seed=i)], axis=1)
        write(folder / f"{name}.bin", records.tobytes())
    source = load("cifar10", tmp_path)
    assert source.y_train.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert source.y_test.tolist() == [0, 0]
    assert np.array_equal(source.x_train[2:4].numpy(), pixels(2, 3072, seed=1).reshape(2, 3, 32, 32))
    assert source.class_names[9] == "truck"


def test_cifar100_binary_uses_the_fine_label_and_its_names(tmp_path):
    folder = tmp_path / "cifar100"
    records = np.concatenate([np.array([[3, 99], [4, 0]], np.uint8), pixels(2, 3072)], axis=1)
    write(folder / "train.bin", records.tobytes())
    write(folder / "test.bin", records.tobytes())
    write(folder / "fine_label_names.txt", "\n".join(f"name{i}" for i in range(100)).encode())
    source = load("cifar100", tmp_path)
    assert source.y_train.tolist() == [99, 0]
    assert (source.classes, source.class_names[99]) == (100, "name99")


def test_pickled_cifar_is_not_read(tmp_path):
    write(tmp_path / "cifar-10-batches-py" / "data_batch_1", b"anything")
    with pytest.raises(DataError, match="BINARY version"):
        load("cifar10", tmp_path)


def test_svhn_mat(tmp_path):
    from scipy import io as scipy_io

    x = pixels(32, 32, 3, 4)
    for part in ("train", "test"):
        scipy_io.savemat(tmp_path / f"{part}_32x32.mat", {"X": x, "y": np.array([[10], [1], [2], [9]], np.uint8)})
    source = load("svhn", tmp_path)
    assert source.y_train.tolist() == [0, 1, 2, 9]
    assert np.array_equal(source.x_train[2, 1].numpy(), x[:, :, 1, 2])


def usps_line(label: int, levels: list[float]) -> str:
    return " ".join([f"{label:.4f}", *(f"{v:.4f}" for v in levels)])


@pytest.mark.parametrize("compress", [True, False])
def test_usps_text(tmp_path, compress):
    text = "\n".join([usps_line(6, [-1.0] * 255 + [1.0]), usps_line(0, [0.0] * 256)]).encode()
    for part in ("train", "test"):
        name = f"zip.{part}.gz" if compress else f"zip.{part}"
        write(tmp_path / "usps" / name, gzip.compress(text) if compress else text)
    source = load("usps", tmp_path)
    assert source.x_train.shape == (2, 1, 16, 16)
    assert source.y_train.tolist() == [6, 0]
    assert source.x_train[0].flatten().tolist() == [0] * 255 + [255]
    assert set(source.x_train[1].flatten().tolist()) == {128}


def test_usps_svmlight(tmp_path):
    line = "7 " + " ".join(f"{i}:{-1.0 if i < 256 else 1.0}" for i in range(1, 257))
    for name in ("usps.bz2", "usps.t.bz2"):
        write(tmp_path / name, bz2.compress(line.encode()))
    source = load("usps", tmp_path)
    assert source.y_train.tolist() == [6]
    assert source.x_train.flatten().tolist() == [0] * 255 + [255]


def test_digits_are_embedded_and_always_split_alike():
    one, two = load("digits"), load("digits")
    assert one.x_train.shape == (1438, 1, 8, 8)
    assert one.x_test.shape == (359, 1, 8, 8)
    assert one.x_train.dtype == torch.uint8
    assert (int(one.x_train.min()), int(one.x_train.max())) == (0, 255)
    assert torch.equal(one.x_test, two.x_test)
    assert torch.bincount(one.y_test).min() >= 34  # every digit in proportion
    from sklearn.datasets import load_digits

    everything = np.sort(load_digits().images.sum(axis=(1, 2)))
    both = torch.cat([one.x_train, one.x_test]).to(torch.float64).mul(16 / 255).round().sum(dim=(1, 2, 3))
    assert np.array_equal(np.sort(both.numpy()), everything)


def test_own_npz_by_path_and_by_name(tmp_path):
    x, y = pixels(20, 6, 6), np.arange(20) % 4
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4], names=list("abcd"))
    for source in (load(tmp_path / "mine.npz"), load("mine", tmp_path)):
        assert (source.name, source.classes, source.class_names) == ("mine", 4, ("a", "b", "c", "d"))
        assert source.x_train.shape == (20, 1, 6, 6)


def test_own_npz_without_a_test_part_is_split_by_class(tmp_path):
    y = np.arange(50) % 5
    np.savez(tmp_path / "mine.npz", x=np.arange(50.0).reshape(50, 1), y=y)
    one, two = load("mine", tmp_path), load("mine", tmp_path)
    assert torch.bincount(one.y_test).tolist() == [2] * 5
    assert sorted([*one.x_train.flatten().tolist(), *one.x_test.flatten().tolist()]) == list(range(50))
    assert torch.equal(one.x_test, two.x_test)


def test_the_environment_names_the_folder_and_the_argument_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("EVERFED_DATA", str(tmp_path / "a"))
    for place, n in (("a", 10), ("b", 20)):
        (tmp_path / place).mkdir()
        x, y = pixels(n, 28, 28), np.arange(n) % 10
        np.savez(tmp_path / place / "mnist.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert len(load("mnist").x_train) == 10
    assert len(load("mnist", tmp_path / "b").x_train) == 20


def test_a_missing_set_names_itself_the_places_and_the_source(tmp_path):
    with pytest.raises(DataError) as caught:
        load("mnist", tmp_path)
    message = str(caught.value)
    for part in ("'mnist'", str(tmp_path / "mnist.npz"), "train-images-idx3-ubyte", "https://", "EVERFED_DATA"):
        assert part in message


def test_no_folder_at_all():
    with pytest.raises(DataError, match="'cifar100': no data folder is named.*EVERFED_DATA"):
        load("cifar100")


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(DataError, match="'mnits' was not found.*Did you mean mnist, emnist or emnist-digits"):
        load("mnits", tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train-images-idx3-ubyte", b"garbage that is no idx"),
        ("train-images-idx3-ubyte", idx(pixels(12, 28, 28))[:-1]),
        ("train-images-idx3-ubyte", b""),
        ("train-images-idx3-ubyte.gz", b"not gzipped"),
        ("train-images-idx3-ubyte.gz", gzip.compress(idx(pixels(12, 28, 28)))[:-20]),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content):
    write_idx_set(tmp_path, MNIST, compress=False)
    (tmp_path / "train-images-idx3-ubyte").unlink()
    write(tmp_path / name, content)
    with pytest.raises(DataError, match=name):
        load("mnist", tmp_path)


def test_a_damaged_npz_is_named(tmp_path):
    write(tmp_path / "mine.npz", b"no zip")
    with pytest.raises(DataError, match="mine.npz"):
        load("mine", tmp_path)
    np.savez(tmp_path / "mine.npz", a=np.ones(3))
    with pytest.raises(DataError, match="mine.npz: needs the arrays x_train.*it has a"):
        load("mine", tmp_path)
    np.savez(tmp_path / "mine.npz", x=np.ones((3, 2)), y=np.ones(4, int))
    with pytest.raises(DataError, match="3 samples but 4 labels"):
        load("mine", tmp_path)


def test_pickles_inside_an_npz_are_refused(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.array([{"run": "me"}], dtype=object), y=np.zeros(1, int))
    with pytest.raises(DataError, match="mine.npz: cannot be read"):
        load("mine", tmp_path)


def test_available_lists_every_named_set_and_the_users_own(tmp_path):
    write_idx_set(tmp_path, MNIST, compress=True)
    np.savez(tmp_path / "mine.npz", x=np.ones((3, 2)), y=np.zeros(3, int))
    for part in ("train", "test"):
        (tmp_path / "photos" / part).mkdir(parents=True)
    rows = {name: (found, where) for name, found, where in available(tmp_path)}
    named = {"digits", *KNOWN, *PUBLISHED, *KNOWN_TEXTS, "digit10", *DOMAINS, *TEXTS, "streets", "carla"}
    assert set(rows) == {*named, "mine", "photos"}
    assert rows["digits"][0]
    assert rows["mnist"] == (True, str(tmp_path / "train-images-idx3-ubyte.gz"))
    assert rows["mine"] == (True, str(tmp_path / "mine.npz"))
    assert not rows["cifar10"][0]
    assert "https://" in rows["cifar10"][1]
    assert [name for name, found, _ in available() if found] == ["digits", "streets"]


def test_available_finds_sets_of_several_domains(tmp_path):
    rows = {name: (found, where) for name, found, where in available(tmp_path)}
    assert rows["digit10"] == (False, "missing: mnist, emnist-digits, usps, svhn")
    assert not rows["pacs"][0] and "https://" in rows["pacs"][1]
    for (domain,) in DOMAINS["pacs"].layouts[0].files:
        (tmp_path / "PACS" / "kfold" / domain).mkdir(parents=True)
    for name in ("mnist", "emnist-digits", "usps", "svhn", "office_caltech10"):
        np.savez(tmp_path / f"{name}.npz", x=np.ones((3, 2)), y=np.zeros(3, int))
    (tmp_path / "chitchat.jsonl").touch()
    rows = {name: where for name, found, where in available(tmp_path) if found}
    assert rows["pacs"] == str(tmp_path / "PACS" / "kfold")
    assert rows["digit10"] == "mnist, emnist-digits, usps, svhn"
    assert rows["office-caltech10"] == str(tmp_path / "office_caltech10.npz")
    assert rows["chitchat"] == str(tmp_path / "chitchat.jsonl")
    assert "office_caltech10" not in rows and "office31" not in rows  # a named set is not listed as one's own, too


def write_images(root: Path, mode: str = "RGB", size: tuple[int, int] = (6, 4)) -> dict[str, np.ndarray]:
    pillow = pytest.importorskip("PIL.Image", reason="pip install 'everfed[images]'")
    written = {}
    for part, count in (("train", 3), ("test", 1)):
        for label, name in enumerate(("cat", "dog")):
            for i in range(count):
                shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
                path = root / part / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                written[f"{part}/{name}/{i}"] = pixels(*shape, seed=10 * label + i)
                pillow.fromarray(written[f"{part}/{name}/{i}"]).save(path)
    return written


def test_image_folder(tmp_path):
    written = write_images(tmp_path / "pets")
    write(tmp_path / "pets" / "train" / "dog" / "notes.txt", b"no image")
    source = load("pets", tmp_path)
    assert source.class_names == ("cat", "dog")
    assert source.x_train.shape == (6, 3, 4, 6)
    assert source.y_train.tolist() == [0, 0, 0, 1, 1, 1]
    assert np.array_equal(source.x_train[4].numpy(), written["train/dog/1"].transpose(2, 0, 1))


def test_grey_image_folder_keeps_one_channel(tmp_path):
    written = write_images(tmp_path, mode="L")
    source = load(tmp_path)
    assert source.x_test.shape == (2, 1, 4, 6)
    assert np.array_equal(source.x_test[0, 0].numpy(), written["test/cat/0"])


def test_image_folder_refusals(tmp_path):
    pillow = pytest.importorskip("PIL.Image", reason="pip install 'everfed[images]'")
    write_images(tmp_path)
    stranger = tmp_path / "test" / "emu"
    stranger.mkdir()
    with pytest.raises(DataError, match="emu: this class has no folder under train"):
        load(tmp_path)
    stranger.rmdir()
    odd = tmp_path / "train" / "cat" / "9.png"
    pillow.fromarray(pixels(5, 5, 3)).save(odd)
    with pytest.raises(DataError, match="9.png: 5x5 pixels where others have 6x4"):
        load(tmp_path)
    odd.write_bytes((tmp_path / "train" / "cat" / "0.png").read_bytes()[:60])
    with pytest.raises(DataError, match="9.png: cannot be read as an image"):
        load(tmp_path)
    with pytest.raises(DataError, match="no images in class folders"):
        load(tmp_path / "train" / "cat")


def test_without_pillow_the_message_says_what_to_install(tmp_path, monkeypatch):
    write_images(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'everfed\[images\]'"):
        load(tmp_path)


@pytest.mark.slow  # test_packaging.py imports every module without these
def test_importing_data_needs_no_optional_package():
    import subprocess

    blocked = ["PIL", "datasets", "flwr_datasets", "flwr", "scipy", "sklearn", "torchvision"]
    code = (
        f"import sys, json; [sys.modules.__setitem__(n, None) for n in {json.dumps(blocked)}];"
        "import everfed.data, everfed.streams; everfed.data.available()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
