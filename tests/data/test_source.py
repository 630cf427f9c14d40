"""Arrays in the layouts people have, brought to storage form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from everfed.data import DataError, make_source
from everfed.data.source import storage_form, storage_labels


@pytest.mark.parametrize(
    ("shape", "dtype", "result", "stored"),
    [
        ((5, 28, 28), np.uint8, (5, 1, 28, 28), torch.uint8),
        ((5, 32, 30, 3), np.uint8, (5, 3, 32, 30), torch.uint8),
        ((5, 3, 32, 32), np.uint8, (5, 3, 32, 32), torch.uint8),
        ((5, 32, 32, 1), np.float64, (5, 1, 32, 32), torch.float32),
        ((5, 13, 64, 64), np.float32, (5, 13, 64, 64), torch.float32),
        ((5, 800), np.uint8, (5, 800), torch.float32),
        ((5, 7, 4), np.float32, (5, 7, 4), torch.float32),
        ((5, 16), np.int32, (5, 16), torch.int64),
        ((5, 16), ">f8", (5, 16), torch.float32),
    ],
)
def test_storage_form(shape, dtype, result, stored):
    x = storage_form(np.ones(shape, dtype))
    assert tuple(x.shape) == result
    assert x.dtype == stored
    assert x.is_contiguous()


def test_channels_last_pixels_land_where_they_belong():
    x = np.arange(2 * 6 * 5 * 3, dtype=np.uint8).reshape(2, 6, 5, 3)
    assert np.array_equal(storage_form(x).numpy(), x.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("x", [np.ones(4), np.ones((2, 2), bool), np.ones((2, 2), complex), np.array([["a"], ["b"]])])
def test_samples_that_are_none_are_refused(x):
    with pytest.raises(DataError):
        storage_form(x)


@pytest.mark.parametrize("y", [np.ones(3), np.ones((3, 2), int), np.array([True, False])])
def test_labels_must_be_whole_numbers(y):
    with pytest.raises(DataError, match="one whole number per sample"):
        storage_labels(y)


def test_labels_of_any_integer_type_and_column_shape():
    for y in (np.array([[1], [2]], np.uint8), np.array([1, 2], ">i4"), torch.tensor([1, 2])):
        labels = storage_labels(y)
        assert labels.dtype == torch.int64
        assert labels.tolist() == [1, 2]


def arrays(**change):
    given = {
        "x_train": np.zeros((4, 2), np.float32),
        "y_train": np.array([0, 1, 2, 4]),
        "x_test": np.zeros((2, 2), np.float32),
        "y_test": np.array([0, 4]),
    }
    return given | change


def test_classes_come_from_the_labels_of_both_parts_or_from_the_names():
    found = make_source("own", **arrays(), origin="here")
    assert (found.classes, found.class_names) == (4, ("0", "1", "2", "4"))  # no sample is of class 3
    assert make_source("own", **arrays(), origin="here", classes=5).classes == 5
    named = make_source("own", **arrays(), origin="here", class_names=list("abcdefg"))
    assert (named.classes, named.class_names[6]) == (7, "g")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y_train": np.array([0, 1])}, "own: 4 train samples but 2 train labels"),
        ({"x_test": np.zeros((2, 3), np.float32)}, "they must be alike"),
        ({"x_test": np.zeros((2, 2), np.int64)}, "they must be alike"),
        ({"y_test": np.array([0, -1])}, "test labels run from -1 to 0"),
        ({"x_test": np.zeros((0, 2), np.float32), "y_test": np.zeros(0, int)}, "the test part is empty"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    with pytest.raises(DataError, match=message):
        make_source("own", **arrays(**change), origin="here")


def test_labels_beyond_the_classes_are_refused():
    with pytest.raises(DataError, match="train labels run from 0 to 4, allowed: 0 to 2"):
        make_source("own", **arrays(), origin="here", classes=3)


def test_read_only_memory_is_copied_not_written():
    x = np.zeros((4, 2), np.float32)
    x.flags.writeable = False
    source = make_source("own", **arrays(x_train=x), origin="here")
    source.x_train[0, 0] = 1.0
    assert x[0, 0] == 0.0
