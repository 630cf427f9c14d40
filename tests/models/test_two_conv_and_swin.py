"""The networks of STAMP: the two-convolution CNN of its code, and Swin-T from random weights."""

from __future__ import annotations

import pytest
import torch

from everfed import models
from everfed.core.layout import Layout


def test_the_two_convolution_cnn() -> None:
    module = models.build("two-conv-cnn", (3, 32, 32), 100, 0)
    sizes = [p.numel() for p in module.parameters()]
    assert sizes == [2400, 32, 51_200, 64, 819_200, 512, 51_200, 100]
    assert sum(sizes) == 924_708
    assert module(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


@pytest.mark.parametrize("side", [4, 8, 28])
def test_it_takes_small_images_too(side: int) -> None:
    assert models.build("two-conv-cnn", (1, side, side), 10, 0)(torch.zeros(2, 1, side, side)).shape == (2, 10)


def test_swin_refuses_small_images() -> None:
    with pytest.raises(models.ModelError, match="224 pixels"):
        models.build("swin-t", (3, 32, 32), 100, 0)


@pytest.mark.slow
def test_swin_from_random_weights() -> None:
    pytest.importorskip("transformers", reason="swin-t needs the package transformers")
    module = models.build("swin-t", (3, 224, 224), 1000, 0)
    layout = Layout.of(module)
    assert layout.size == sum(p.numel() for p in module.parameters()) == 28_288_354
    assert layout.stats == layout.counters == ()  # nothing but parameters is sent
    assert module.eval()(torch.zeros(1, 3, 224, 224)).shape == (1, 1000)
    other = layout.read(models.build("swin-t", (3, 224, 224), 1000, 0))["params"]
    assert torch.equal(layout.read(module)["params"], other)


def test_conv_4_has_the_parameters_of_its_layers() -> None:
    """3 x 64 x 9 + 64, three times 64 x 64 x 9 + 64, four BatchNorms of 128, and 4 x 64 features to 100 classes."""
    module = models.build("conv-4", (3, 32, 32), 100, seed=0)
    assert sum(p.numel() for p in module.parameters()) == 1_792 + 3 * 36_928 + 4 * 128 + 256 * 100 + 100 == 138_788
    assert module(torch.zeros(2, 3, 32, 32)).shape == (2, 100)
    narrow = models.build("conv-4", (1, 16, 16), 10, seed=0, options={"width": 8})
    assert narrow(torch.zeros(2, 1, 16, 16)).shape == (2, 10)


def test_conv_4_refuses_images_that_cannot_be_halved_four_times() -> None:
    with pytest.raises(models.ModelError, match="at least 16 pixels a side, not 8"):
        models.build("conv-4", (1, 8, 8), 10, seed=0)
