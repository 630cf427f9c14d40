"""Augmentations by hand, and that what is drawn decides every pixel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import everfed
from everfed.data.augment import FINE, Chain, ColourJitter, Crop, Erasing, Flip, PerSample, Rotation, described, parse
from everfed.streams import OptionError, from_arrays

GRID = torch.arange(9, dtype=torch.uint8).reshape(1, 1, 3, 3)


def draws(*numbers: int) -> Tensor:
    return torch.tensor([numbers])


def test_a_crop_by_hand() -> None:
    """Padded by 1 and cut at (0, 2): the image moves down by one and left by one."""
    assert Crop(1).apply(GRID, draws(1, 1)).equal(GRID)
    assert Crop(1).apply(GRID, draws(0, 2))[0, 0].tolist() == [[0, 0, 0], [1, 2, 0], [4, 5, 0]]


def test_a_flip_by_hand() -> None:
    assert Flip().apply(GRID, draws(1))[0, 0].tolist() == [[2, 1, 0], [5, 4, 3], [8, 7, 6]]
    assert Flip().apply(GRID, draws(0)).equal(GRID)


@pytest.mark.parametrize("size", [3, 4, 7, 32])
@pytest.mark.parametrize("quarters", [-1, 0, 1, 2])
def test_quarter_turns_are_exact(size: int, quarters: int) -> None:
    image = torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8)
    cos, sin = [(1, 0), (0, 1), (-1, 0), (0, -1)][quarters % 4]
    turned = Rotation(180).apply(image, torch.tensor([[cos * FINE, sin * FINE]] * 2))
    assert turned.equal(torch.rot90(image, quarters, (-2, -1)))


def test_a_small_rotation_leaves_the_centre_and_zeroes_corners() -> None:
    image = torch.full((1, 1, 9, 9), 7, dtype=torch.uint8)
    angle = np.radians(45)
    turned = Rotation(45).apply(image, draws(round(np.cos(angle) * FINE), round(np.sin(angle) * FINE)))
    assert int(turned[0, 0, 4, 4]) == 7 and int(turned[0, 0, 0, 0]) == 0


def test_colours_by_hand() -> None:
    """Grey image of 100 and 200. Brightness 1.5: 150 and 255 (cut). Contrast 0.5 about the mean of 150: 125 and 175."""
    image = torch.tensor([100, 200], dtype=torch.uint8).reshape(1, 1, 1, 2)
    jitter = ColourJitter(1, 1, 1)
    assert jitter.apply(image, draws(FINE // 2, 0, 0)).flatten().tolist() == [150, 255]
    assert jitter.apply(image, draws(0, -FINE // 2, 0)).flatten().tolist() == [125, 175]
    red = torch.tensor([200, 0, 0], dtype=torch.uint8).reshape(1, 3, 1, 1)
    grey = (299 * 200 + 500) // 1000  # 60
    assert jitter.apply(red, draws(0, 0, -FINE)).flatten().tolist() == [grey, grey, grey]


def test_an_erased_rectangle_by_hand() -> None:
    assert Erasing().apply(GRID + 1, draws(1, 0, 2, 2))[0, 0].tolist() == [[1, 2, 3], [0, 0, 6], [0, 0, 9]]
    assert Erasing().apply(GRID, draws(0, 0, 0, 0)).equal(GRID)


def test_erased_rectangles_lie_inside_and_have_the_share() -> None:
    drawn = Erasing(p=1.0, area=(0.1, 0.2)).draw(np.random.default_rng(0), 500, (3, 32, 40))
    top, left, tall, wide = drawn.T
    assert (top >= 0).all() and (top + tall <= 32).all() and (left >= 0).all() and (left + wide <= 40).all()
    assert (tall * wide / 1280).min() > 0.08 and (tall * wide / 1280).max() < 0.22
    some = Erasing(p=0.25).draw(np.random.default_rng(0), 4000, (3, 32, 32))
    assert 0.22 < (some[:, 2] > 0).mean() < 0.28


ALL = [
    {"kind": "crop", "padding": 2},
    {"kind": "colour-jitter", "brightness": 0.4, "contrast": 0.3, "saturation": 0.2},
    {"kind": "flip"},
    {"kind": "rotation", "degrees": 20},
    {"kind": "erasing", "p": 0.5},
]


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), channels=st.sampled_from([1, 3]), size=st.integers(3, 12))
def test_form_stays_and_samples_are_independent(seed: int, channels: int, size: int) -> None:
    x = torch.randint(
        0, 256, (5, channels, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    chain = Chain(parse(ALL), (channels, size, size))
    drawn = torch.from_numpy(chain.draw(np.random.default_rng(seed), 5))
    whole = chain.apply(x, drawn)
    assert whole.shape == x.shape and whole.dtype == torch.uint8
    one = torch.cat([chain.apply(x[i : i + 1], drawn[i : i + 1]) for i in range(5)])
    assert whole.equal(one)


def test_colours_can_be_switched_off_at_the_end_of_the_draws() -> None:
    x = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    chain = Chain(parse(ALL[:2]), (3, 8, 8))
    drawn = torch.from_numpy(chain.draw(np.random.default_rng(0), 4))
    drawn[:, -chain.colour_draws :] = 0
    assert chain.apply(x, drawn).equal(Crop(2).apply(x, drawn[:, :2]))
    assert chain.apply(x.float(), drawn).equal(Crop(2).apply(x, drawn[:, :2]).float())


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        ([{"kind": "warp"}], "colour-jitter"),
        (["flip"], "a table with kind"),
        ([{"kind": "flip", "q": 1}], "flip.q is not an option; it has p"),
        ([{"kind": "crop", "padding": 0}], "at least 1"),
        ([{"kind": "crop", "padding": "4"}], "must be a number"),
        ([{"kind": "erasing", "area": [0.5, 0.1]}], "the smaller first"),
        ("crop", "not one of the allowed values"),
    ],
)
def test_what_makes_no_sense_is_refused(augment: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        stream(augment)


# in runs --------------------------------------------------------------------------------------------------------------
def stream(augment: Any) -> everfed.method.Stream:
    rng = np.random.default_rng(0)
    y = np.arange(48) % 4
    x = rng.integers(0, 256, (48, 8, 8, 3)).astype(np.uint8)
    options = {"scenario": "class-incremental", "tasks": 2, "clients": 2, "rounds_per_task": 1, "augment": augment}
    return from_arrays(x[:32], y[:32], x[32:], y[32:], **options)


class Noise:
    """As a transform of torchvision: it draws from torch's global generator."""

    def __call__(self, image: Tensor) -> Tensor:
        return torch.where(torch.rand(image.shape) < 0.5, image, torch.zeros_like(image))


@pytest.mark.parametrize("augment", [ALL, Noise()])
def test_engines_agree_and_the_seed_decides(tmp_path: Path, augment: Any) -> None:
    def params(name: str, kind: str, seed: int = 0) -> Tensor:
        engine = {"kind": kind, "device": "cpu", **({"workers": 2} if kind == "processes" else {})}
        table = {"model": {"kind": "mlp"}, "method": {"name": "er"}, "engine": engine, "seed": seed}
        everfed.run(table, tmp_path / name, stream=stream(augment))
        return torch.cat([p.detach().flatten() for p in everfed.load(tmp_path / name).model.parameters()])

    torch.manual_seed(5)
    first, state = params("a", "eager"), torch.get_rng_state()
    torch.manual_seed(6)
    assert first.equal(params("b", "processes"))
    assert not first.equal(params("c", "eager", seed=1))
    torch.manual_seed(5)
    assert torch.get_rng_state().equal(state)


def test_a_transform_has_a_name_and_hides_its_draws() -> None:
    made = stream(Noise())
    assert made.describe()["augment"] == f"{Noise.__module__}.Noise" == described(Noise())
    assert made.identity() == stream(Noise()).identity() != stream("none").identity()
    assert not made.capturable and stream(ALL).capturable


def test_a_transform_that_changes_the_form_is_refused() -> None:
    with pytest.raises(ValueError, match="keeps form and type"):
        PerSample(lambda image: image.float()).apply(GRID, draws(1))
