"""The published sets themselves, where the data folder has them."""

from __future__ import annotations

import pytest
import torch

from everfed.data import load
from everfed.data.available import available

FOUND = {name for name, found, _ in available() if found}


def real(name: str):
    if name not in FOUND:
        pytest.skip(f"{name} is not in the data folder that EVERFED_DATA names")
    return load(name)


def test_mnist_is_the_whole_of_it():
    source = real("mnist")
    assert source.x_train.shape == (60000, 1, 28, 28)
    assert source.x_test.shape == (10000, 1, 28, 28)
    assert torch.bincount(source.y_train).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert torch.bincount(source.y_test).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert source.x_train.float().div(255).mean().item() == pytest.approx(0.1307, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("emnist-digits", (1, 28, 28), 10),
        ("usps", (1, 16, 16), 10),
        ("svhn", (3, 32, 32), 10),
        ("cifar10", (3, 32, 32), 10),
        ("cifar100", (3, 32, 32), 100),
    ],
)
def test_shapes_and_classes(name, shape, classes):
    source = real(name)
    assert tuple(source.x_train.shape[1:]) == shape
    assert source.x_train.dtype == torch.uint8
    assert (source.classes, len(source.class_names)) == (classes, classes)
    assert (torch.bincount(source.y_train, minlength=classes) > 0).all()


def test_cifar100_has_the_colours_the_recipes_normalise_by():
    x = real("cifar100").x_train
    assert x.float().div(255).mean(dim=(0, 2, 3)).tolist() == pytest.approx([0.5071, 0.4865, 0.4409], abs=2e-3)


def test_usps_keeps_its_official_split():
    source = real("usps")
    assert (len(source.x_train), len(source.x_test)) == (7291, 2007)
