"""Triton kernels for convolutions of few channels: a network's first one, of an image's colours, and those of networks
with fewer than 32 channels.

    y = P W^T,   dW = dy^T P      P: (positions, taps), what each position of the output sees of the input

The input's gradient is such a convolution as well, of dy with the window turned around. The libraries' kernels are made
for many channels, in multiples of 8; for others they pad, copy and transform.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from everfed.kernels.tiles import power, power_for_products

MOST = 32  # taps (input channels x height x width of the window) of a convolution with few inputs
LEAST, MOST_CHANNELS, MOST_SIDE = 8, 31, 7  # of one with few outputs: channels, and sides of the window
_CHUNK = 32  # taps at a time
_ROWS = 128  # positions of one tile
_PARTS = 128  # blocks of positions over which the weights' gradient is summed, at most
_PRECISION = tl.constexpr("tf32x3")  # three products of matrix units for one in float32, as exact as it


@triton.jit
def _patches(
    x_ptr, at, tap, M, high, wide, out_high, out_wide, sn, sc, sh, sw,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
):  # fmt: skip
    """P for some positions and taps; tap (i KW + j) C + c is input channel c at (i, j) of the window."""
    row = ((at // out_wide) % out_high)[:, None] + (tap // (C * KW) - PH)[None, :]
    column = (at % out_wide)[:, None] + ((tap // C) % KW - PW)[None, :]
    inside = (at < M)[:, None] & (tap < C * KH * KW)[None, :]
    inside &= (row >= 0) & (row < high) & (column >= 0) & (column < wide)
    image = (at // (out_high * out_wide))[:, None]
    return tl.load(x_ptr + image * sn + (tap % C)[None, :] * sc + row * sh + column * sw, inside, 0.0)


@triton.jit
def _weights(tap, channel, wo, wc, wh, ww, C: tl.constexpr, KW: tl.constexpr):
    """Where the weights of some taps (rows) and output channels (columns) lie."""
    return channel * wo + (tap % C) * wc + (tap // (C * KW)) * wh + ((tap // C) % KW) * ww


@triton.jit(do_not_specialize=["M"])
def _of_few_inputs(
    x_ptr, w_ptr, y_ptr, M, high, wide, out_high, out_wide, sn, sc, sh, sw, wo, wc, wh, ww,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    O: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """All taps at once."""
    at, tap, channel = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, K), tl.arange(0, WIDTH)[None, :]
    patches = _patches(x_ptr, at, tap, M, high, wide, out_high, out_wide, sn, sc, sh, sw, C, KH, KW, PH, PW)
    there = (tap < C * KH * KW)[:, None] & (channel < O)
    w = tl.load(w_ptr + _weights(tap[:, None], channel, wo, wc, wh, ww, C, KW), there, 0.0)
    y = tl.dot(patches.to(w.dtype), w, input_precision=_PRECISION)
    tl.store(y_ptr + at[:, None] * O + channel, y, (at < M)[:, None] & (channel < O))


@triton.jit(do_not_specialize=["M"])
def _of_few_channels(
    x_ptr, w_ptr, y_ptr, M, first, high, wide, out_high, out_wide, wo, wc, wh, ww,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    O: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One place of the window after the other: the channels that are read there lie side by side in a channels-last
    input. first: where the weights of the first place lie."""
    at, inner, channel = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, K), tl.arange(0, WIDTH)[None, :]
    image, top, left = at // (out_high * out_wide), (at // out_wide) % out_high - PH, at % out_wide - PW
    y = tl.zeros((R, WIDTH), tl.float32)
    for place in range(KH * KW):
        i, j = place // KW, place % KW
        row, column = top + i, left + j
        inside = (at < M) & (row >= 0) & (row < high) & (column >= 0) & (column < wide)
        pixel = (image * high + row) * wide + column
        x = tl.load(x_ptr + (pixel * C)[:, None] + inner[None, :], inside[:, None] & (inner < C)[None, :], 0.0)
        there = (inner < C)[:, None] & (channel < O)
        w = tl.load(w_ptr + first + inner[:, None] * wc + channel * wo + i * wh + j * ww, there, 0.0)
        y = tl.dot(x.to(w.dtype), w, y, input_precision=_PRECISION)
    tl.store(y_ptr + at[:, None] * O + channel, y, (at < M)[:, None] & (channel < O))


@triton.jit(do_not_specialize=["M"])
def _partial_weights(
    dy_ptr, x_ptr, partial_ptr, M, high, wide, out_high, out_wide, sn, sc, sh, sw,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    O: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, WIDTH)[None, :]
    tap = tl.program_id(1) * K + tl.arange(0, K)
    total = tl.zeros((K, WIDTH), tl.float32)
    for tile in range(TILES):
        at = (tl.program_id(0) * TILES + tile) * R + tl.arange(0, R)
        dy = tl.load(dy_ptr + at[:, None] * O + channel, (at < M)[:, None] & (channel < O), 0.0)
        patches = _patches(x_ptr, at, tap, M, high, wide, out_high, out_wide, sn, sc, sh, sw, C, KH, KW, PH, PW)
        total = tl.dot(tl.trans(patches.to(dy.dtype)), dy, total, input_precision="ieee")
    tl.store(partial_ptr + tl.program_id(0) * (CHUNKS * K * WIDTH) + tap[:, None] * WIDTH + channel, total)


@triton.jit(do_not_specialize=["parts"])
def _sum_weights(
    partial_ptr, dw_ptr, parts, wo, wc, wh, ww,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, O: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    P: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * K + tl.arange(0, K)
    part = tl.arange(0, P)[:, None]
    dw = tl.sum(tl.load(partial_ptr + part * SIZE + index[None, :], part < parts, 0.0), 0)
    tap, channel = index // WIDTH, index % WIDTH
    tl.store(dw_ptr + _weights(tap, channel, wo, wc, wh, ww, C, KW), dw, (tap < C * KH * KW) & (channel < O))


def fits(convolution: nn.Conv2d) -> bool:
    """Is the convolution one of few inputs, for these kernels?"""
    return _taps(convolution) <= MOST and convolution.out_channels in (16, 32, 64, 128) and _is_simple(convolution)


def fits_narrow(convolution: nn.Conv2d) -> bool:
    """Has it few outputs, too, so that these kernels also have the gradient of its input?"""
    inputs, outputs = convolution.in_channels, convolution.out_channels
    return (
        (_taps(convolution) <= MOST or LEAST <= inputs <= MOST_CHANNELS)
        and LEAST <= outputs <= MOST_CHANNELS
        and max(convolution.kernel_size) <= MOST_SIDE
        and _is_simple(convolution)
    )


def _taps(convolution: nn.Conv2d) -> int:
    return convolution.in_channels * convolution.kernel_size[0] * convolution.kernel_size[1]


def _is_simple(convolution: nn.Conv2d) -> bool:
    return (
        convolution.stride == convolution.dilation == (1, 1)
        and convolution.groups == 1
        and convolution.padding_mode == "zeros"
        and not isinstance(convolution.padding, str)
    )


class _Window(NamedTuple):
    """What a convolution reads. strides: of the weights, by output channel, input channel, row and column. first: where
    the weight of the window's first place lies."""

    inputs: int
    outputs: int
    size: tuple[int, int]
    padding: tuple[int, int]
    strides: tuple[int, int, int, int]
    first: int = 0

    @staticmethod
    def of(weight: Tensor, padding: tuple[int, int]) -> _Window:
        outputs, inputs, kh, kw = weight.shape
        a, b, c, d = weight.stride()
        return _Window(inputs, outputs, (kh, kw), padding, (a, b, c, d))

    def turned(self) -> _Window:
        """That of the input's gradient: the channels change places, and the window is turned around."""
        wo, wc, wh, ww = self.strides
        kh, kw = self.size
        padding = (kh - 1 - self.padding[0], kw - 1 - self.padding[1])
        first = (kh - 1) * wh + (kw - 1) * ww
        return _Window(self.outputs, self.inputs, self.size, padding, (wc, wo, -wh, -ww), first)

    @property
    def chunks(self) -> int:
        """Of taps."""
        return -(-self.inputs * self.size[0] * self.size[1] // _CHUNK)

    def constants(self) -> dict[str, int]:
        width = power_for_products(self.outputs)
        return {"C": self.inputs, "KH": self.size[0], "KW": self.size[1], "O": self.outputs, "WIDTH": width}

    def pads(self) -> dict[str, int]:
        return {"PH": self.padding[0], "PW": self.padding[1]}


def forward(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
    """(n, O, h', w'), channels-last, of the weights' type; no bias."""
    return _convolved(x, weight, _Window.of(weight, padding), weight.dtype)


def input_gradient(dy: Tensor, x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
    """(n, C, h, w), channels-last."""
    return _convolved(dy, weight, _Window.of(weight, padding).turned(), x.dtype)


def _convolved(x: Tensor, weight: Tensor, window: _Window, dtype: torch.dtype) -> Tensor:
    images, _, high, wide = x.shape
    size = (high + 2 * window.padding[0] - window.size[0] + 1, wide + 2 * window.padding[1] - window.size[1] + 1)
    shape, order = (images, window.outputs, *size), torch.channels_last
    y = torch.empty(shape, dtype=dtype, device=x.device, memory_format=order)
    rows, constants = images * size[0] * size[1], {**window.constants(), **window.pads()}
    if window.chunks == 1 and not window.first:
        _of_few_inputs[(-(-rows // _ROWS),)](
            x, weight, y, rows, high, wide, *size, *x.stride(), *window.strides,
            **constants, K=_CHUNK, R=_ROWS, num_warps=4,
        )  # fmt: skip
        return y
    # as many positions: for 10 inputs that is the fastest by itself, for 20 among many slots (benchmarks/README.md)
    inner = power_for_products(window.inputs)
    _of_few_channels[(-(-rows // inner),)](
        x.contiguous(memory_format=order), weight, y, rows, window.first, high, wide, *size, *window.strides,
        **constants, K=inner, R=inner, num_warps=2, num_stages=3,
    )  # fmt: skip
    return y


def weights_gradient(dy: Tensor, x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
    """In the weights' memory order. dy: channels-last."""
    rows = dy.numel() // dy.shape[1]
    tile = _ROWS // 2 if weight.dtype == torch.float32 else _ROWS
    tiles = -(-rows // (tile * _PARTS))
    parts = -(-rows // (tile * tiles))
    window = _Window.of(weight, padding)
    constants = window.constants()
    size = window.chunks * _CHUNK * constants["WIDTH"]
    partial = torch.empty((parts, size), dtype=torch.float32, device=x.device)
    _partial_weights[(parts, window.chunks)](
        dy, x, partial, rows, *x.shape[2:], *dy.shape[2:], *x.stride(),
        **constants, **window.pads(), CHUNKS=window.chunks, K=_CHUNK, TILES=tiles, R=tile, num_warps=4, num_stages=2,
    )  # fmt: skip
    dw = torch.empty_like(weight)
    _sum_weights[(size // 64,)](
        partial, dw, parts, *window.strides,
        **constants, SIZE=size, P=power(parts), K=64, num_warps=4,
    )  # fmt: skip
    return dw
