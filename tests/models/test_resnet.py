"""ResNet-18 (He et al., 2016) as published, and the variant for small images."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from everfed import models
from everfed.models.resnet import BasicBlock
from everfed.recipe import read
from everfed.recipe import shipped as recipes


def work(kind: str, side: int) -> int:
    """Floating-point operations of one forward pass."""
    module = models.build(kind, (3, side, side), 31, 0).to("meta")
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(1, 3, side, side, device="meta"))
    return counter.get_total_flops()


@pytest.mark.parametrize(("classes", "parameters"), [(10, 11_181_642), (31, 11_192_415), (1000, 11_689_512)])
def test_as_published_it_has_the_published_number_of_parameters(classes: int, parameters: int) -> None:
    module = models.build("resnet18-imagenet", (3, 224, 224), classes, 0)
    assert sum(p.numel() for p in module.parameters()) == parameters


def test_the_published_stem_divides_the_side_by_four() -> None:
    module = models.build("resnet18-imagenet", (3, 224, 224), 10, 0)
    assert [x.shape for x in module.stem(torch.zeros(1, 3, 224, 224))] == 2 * [(1, 64, 56, 56)]  # type: ignore[operator]
    assert module(torch.zeros(2, 3, 224, 224)).shape == (2, 10)


def test_at_224_pixels_it_does_the_published_work() -> None:
    """1.8 billion multiply-adds (He et al., 2016, Table 1), two operations each."""
    assert work("resnet18-imagenet", 224) / 2 == pytest.approx(1.8e9, rel=0.02)


def test_at_300_pixels_the_small_stem_costs_14_times_as_much() -> None:
    assert 14 < work("resnet18", 300) / work("resnet18-imagenet", 300) < 15


@pytest.mark.parametrize("name", [name for name in recipes.names() if name.startswith(("fedssi/", "stamp/"))])
def test_recipes_with_large_images_use_the_published_network(name: str) -> None:
    recipe = read(name)
    large = (recipe.stream.model_extra or {}).get("image_size", 0) >= 224 or recipe.stream.dataset == "office31"
    if large and recipe.model.kind.startswith("resnet18"):
        assert recipe.model.kind == "resnet18-imagenet"


def test_a_block_adds_its_input() -> None:
    """With nothing from its convolutions the shortcut is all there is: relu(x), or the 1x1 convolution of every other
    pixel where the size changes."""
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    same, smaller = (BasicBlock(3, outputs, stride).eval() for outputs, stride in ((3, 1), (5, 2)))
    for block in (same, smaller):
        torch.nn.init.zeros_(block.bn2.weight)
    nothing = torch.zeros_like(x)  # the convolutions have an input of their own
    assert all(torch.equal(output, x.relu()) for output in same((nothing, x)))
    conv = smaller.shortcut[0]
    expected = torch.einsum("oi,nihw->nohw", conv.weight[:, :, 0, 0], x[:, :, ::2, ::2])
    for output in smaller((nothing, x)):
        torch.testing.assert_close(output, (expected / (1 + 1e-5) ** 0.5).relu())
