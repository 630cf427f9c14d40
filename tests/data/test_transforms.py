"""Transforms against Pillow, against loops written out, and against themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from everfed.data import transforms
from everfed.data.transforms import (
    brighten,
    crop_and_flip,
    draw_brightness,
    draw_crop_and_flip,
    permute_pixels,
    rotate,
    scale,
    to_format,
)


def images(n: int, channels: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (n, channels, height, width), dtype=np.uint8))


@given(
    st.floats(0, 360, allow_nan=False),
    st.sampled_from([(28, 28), (8, 8), (16, 16), (7, 12), (1, 1)]),
    st.integers(0, 9),
)
@example(90.0, (28, 28), 0)
@example(90.0, (7, 12), 0)
@example(180.0, (8, 8), 0)
@example(45.0, (32, 32), 0)
@example(-30.0, (28, 28), 0)
@example(179.99999999999997, (28, 28), 0)
@settings(deadline=None, max_examples=150)
def test_rotation_equals_pillow_pixel_by_pixel(degrees, size, seed):
    pillow = pytest.importorskip("PIL.Image", reason="pip install 'everfed[images]'")
    x = images(2, 1, *size, seed)
    expected = np.stack([np.asarray(pillow.fromarray(image[0].numpy()).rotate(degrees)) for image in x])
    turned = rotate(x, degrees)
    assert turned.dtype == torch.uint8
    assert np.array_equal(turned[:, 0].numpy(), expected)


def test_rotation_of_colour_turns_every_channel_alike():
    x = images(3, 3, 9, 9)
    for c in range(3):
        assert torch.equal(rotate(x, 37.0)[:, c : c + 1], rotate(x[:, c : c + 1], 37.0))


def test_quarter_turns_are_counter_clockwise_and_exact():
    x = images(2, 1, 6, 6)
    for turns in range(4):
        assert torch.equal(rotate(x, 90.0 * turns), torch.rot90(x, turns, (2, 3)))


def test_rotation_leaves_its_input_and_empty_batches_alone():
    x = images(2, 1, 5, 5)
    before = x.clone()
    rotate(x, 20.0)
    assert torch.equal(x, before)
    assert rotate(x[:0], 20.0).shape == (0, 1, 5, 5)


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_a_permutation_is_undone_by_its_inverse(seed):
    x = images(2, 3, 4, 5, 1)
    order = np.random.default_rng(seed).permutation(20)
    assert torch.equal(permute_pixels(permute_pixels(x, order), np.argsort(order)), x)


def test_permutation_by_hand_and_on_features():
    order = np.array([2, 0, 1])
    assert permute_pixels(torch.tensor([[10.0, 20.0, 30.0]]), order).tolist() == [[30.0, 10.0, 20.0]]
    x = torch.tensor([[[[1, 2, 3]], [[4, 5, 6]]]], dtype=torch.uint8)
    assert permute_pixels(x, order).tolist() == [[[[3, 1, 2]], [[6, 4, 5]]]]


def cropped_by_loops(x: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Pad, cut, mirror, one image after the other."""
    out = np.empty_like(x)
    for i, (dy, dx, flip) in enumerate(draws):
        padded = np.pad(x[i], ((0, 0), (4, 4), (4, 4)))
        cut = padded[:, dy : dy + x.shape[2], dx : dx + x.shape[3]]
        out[i] = cut[:, :, ::-1] if flip else cut
    return out


@given(st.integers(0, 2**32 - 1), st.sampled_from([(3, 32, 32), (1, 7, 5)]))
@settings(deadline=None, max_examples=40)
def test_crop_and_flip_equals_padding_cutting_and_mirroring(seed, shape):
    x = images(6, *shape, seed % 1000)
    draws = draw_crop_and_flip(np.random.default_rng(seed), 6)
    result = crop_and_flip(x, torch.from_numpy(draws))
    assert result.dtype == torch.uint8
    assert np.array_equal(result.numpy(), cropped_by_loops(x.numpy(), draws))


def test_the_centre_crop_without_flip_is_the_image_itself():
    x = images(4, 3, 8, 8)
    assert torch.equal(crop_and_flip(x, torch.tensor([[4, 4, 0]] * 4)), x)


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=20)
def test_brightness_equals_pillow_s(seed):
    x = images(6, 3, 9, 9, seed % 1000)
    draws = draw_brightness(np.random.default_rng(seed), 6)
    result = brighten(x, torch.from_numpy(draws[:, 0]))
    for image, draw, out in zip(x, draws[:, 0], result, strict=True):
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        theirs = np.asarray(ImageEnhance.Brightness(picture).enhance(1 + float(draw) / 65536))
        assert np.array_equal(out.permute(1, 2, 0).numpy(), theirs)


def test_brightness_is_uniform_around_1_and_0_leaves_an_image_alone():
    factors = 1 + draw_brightness(np.random.default_rng(0), 20_000)[:, 0] / 65536
    assert factors.min() == pytest.approx(1 - 63 / 255, abs=1e-3) and factors.min() >= 1 - 63 / 255
    assert factors.max() == pytest.approx(1 + 63 / 255, abs=1e-3) and factors.max() <= 1 + 63 / 255
    assert factors.std() == pytest.approx(63 / 255 / np.sqrt(3), rel=0.02)
    x = images(4, 3, 8, 8)
    assert torch.equal(brighten(x, torch.zeros(4)), x)
    assert torch.equal(brighten(x.float(), torch.zeros(4)), x.float())


def test_draws_cover_all_positions_and_both_sides_evenly():
    draws = draw_crop_and_flip(np.random.default_rng(0), 20_000)
    assert draws.shape == (20_000, 3)
    for c, values in enumerate((9, 9, 2)):
        shares = np.bincount(draws[:, c], minlength=values) / 20_000
        assert len(shares) == values
        assert shares == pytest.approx(np.full(values, 1 / values), abs=0.015)


def test_augmentation_and_scaling_never_look_at_a_value():
    # Tensors on the meta device have no values: reading one back to the host, or a shape that depends on one, raises.
    x, draws = images(4, 3, 8, 8).to("meta"), torch.zeros((4, 4), dtype=torch.int64, device="meta")
    out = scale(brighten(crop_and_flip(x, draws[:, :3]), draws[:, 3]), (0.1, 0.2, 0.3), (0.1, 0.2, 0.3))
    assert (tuple(out.shape), out.dtype) == ((4, 3, 8, 8), torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_augmentation_and_scaling_can_be_captured():
    x, draws = images(8, 3, 32, 32).cuda(), torch.from_numpy(draw_crop_and_flip(np.random.default_rng(0), 8)).cuda()
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    scale(crop_and_flip(x, draws), mean, std)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = scale(crop_and_flip(x, draws), mean, std)
    x.copy_(images(8, 3, 32, 32, 1).cuda())
    graph.replay()
    torch.testing.assert_close(captured, scale(crop_and_flip(x, draws), mean, std))
    torch.testing.assert_close(captured.cpu(), scale(crop_and_flip(x.cpu(), draws.cpu()), mean, std))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rotation_and_permutation_are_the_same_on_the_device():
    x, order = images(5, 1, 28, 28), np.random.default_rng(0).permutation(784)
    assert torch.equal(rotate(x.cuda(), 33.3).cpu(), rotate(x, 33.3))
    assert torch.equal(permute_pixels(x.cuda(), order).cpu(), permute_pixels(x, order))


def test_scale_by_hand():
    x = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(1, 3, 1, 1)
    assert scale(x).flatten().tolist() == pytest.approx([0.0, 0.2, 1.0])
    assert scale(x, (0.5,), (0.5,)).flatten().tolist() == pytest.approx([-1.0, -0.6, 1.0])
    assert scale(x, (0.1, 0.2, 0.5), (0.2, 0.5, 0.25)).flatten().tolist() == pytest.approx([-0.5, 0.0, 2.0], abs=1e-7)
    assert x.flatten().tolist() == [0, 51, 255]


def test_scale_leaves_float_inputs_untouched():
    x = torch.tensor([[2.0, 4.0]])
    assert scale(x).tolist() == [[2.0, 4.0]]
    assert scale(x, (1.0, 2.0), (1.0, 2.0)).tolist() == [[1.0, 1.0]]
    assert x.tolist() == [[2.0, 4.0]]


def test_grey_to_colour_and_back():
    grey = images(3, 1, 8, 8)
    colour = to_format(grey, 3, 8)
    assert colour.shape == (3, 3, 8, 8)
    assert all(torch.equal(colour[:, c : c + 1], grey) for c in range(3))
    assert torch.equal(to_format(colour, 1, 8), grey)


def test_colour_to_grey_is_pillows_to_one_level():
    pillow = pytest.importorskip("PIL.Image", reason="pip install 'everfed[images]'")
    x = images(2, 3, 16, 16)
    expected = np.stack([np.asarray(pillow.fromarray(i.permute(1, 2, 0).numpy()).convert("L")) for i in x])
    assert np.abs(to_format(x, 1, 16)[:, 0].numpy().astype(int) - expected.astype(int)).max() <= 1


@pytest.mark.parametrize(("height", "width", "size"), [(28, 28, 32), (8, 8, 28), (32, 32, 16), (16, 12, 16)])
def test_resizing_is_pillows_bilinear_to_two_levels(height, width, size):
    pillow = pytest.importorskip("PIL.Image", reason="pip install 'everfed[images]'")
    x = images(2, 1, height, width)
    expected = np.stack(
        [np.asarray(pillow.fromarray(i[0].numpy()).resize((size, size), pillow.Resampling.BILINEAR)) for i in x]
    )
    resized = to_format(x, 1, size)
    assert resized.dtype == torch.uint8
    assert np.abs(resized[:, 0].numpy().astype(int) - expected.astype(int)).max() <= 2


def test_resizing_in_chunks_changes_nothing(monkeypatch):
    x = images(10, 1, 8, 8)
    whole = to_format(x, 3, 12)
    monkeypatch.setattr(transforms, "CHUNK", 3)
    assert torch.equal(to_format(x, 3, 12), whole)


def test_channels_that_cannot_be_made_are_refused():
    with pytest.raises(ValueError, match="4 channels cannot be given 3"):
        to_format(images(1, 4, 2, 2), 3, 2)
