"""Triton kernels for a convolution of few inputs (an image's colours), as a network begins with.

    y = P W^T,   dW = dy^T P      P: (positions, taps), what each position of the output sees of the input

The libraries' kernels are made for many channels; for one or three they pad, copy and transform.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

MOST = 32  # taps: input channels x height x width of the window
_ROWS = 128  # positions of one tile
_PARTS = 128  # blocks of positions over which the weights' gradient is summed, at most


@triton.jit
def _patches(
    x_ptr, at, M, high, wide, out_high, out_wide, sn, sc, sh, sw,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """P for some positions; tap (i KW + j) C + c is input channel c at (i, j) of the window."""
    tap = tl.arange(0, TAPS)
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


@triton.jit(do_not_specialize=["M", "parts"])
def _forward(
    x_ptr, w_ptr, y_ptr, M, high, wide, out_high, out_wide, sn, sc, sh, sw, wo, wc, wh, ww,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    TAPS: tl.constexpr, O: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * R + tl.arange(0, R)
    patches = _patches(x_ptr, at, M, high, wide, out_high, out_wide, sn, sc, sh, sw, C, KH, KW, PH, PW, TAPS)
    tap, channel = tl.arange(0, TAPS)[:, None], tl.arange(0, O)[None, :]
    w = tl.load(w_ptr + _weights(tap, channel, wo, wc, wh, ww, C, KW), tap < C * KH * KW, 0.0)
    y = tl.dot(patches.to(w.dtype), w, input_precision="ieee")
    tl.store(y_ptr + at[:, None] * O + channel, y, (at < M)[:, None])


@triton.jit(do_not_specialize=["M", "parts"])
def _partial_weights(
    dy_ptr, x_ptr, partial_ptr, M, high, wide, out_high, out_wide, sn, sc, sh, sw,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    TAPS: tl.constexpr, O: tl.constexpr, TILES: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    channel = tl.arange(0, O)[None, :]
    total = tl.zeros((TAPS, O), tl.float32)
    for tile in range(TILES):
        at = (tl.program_id(0) * TILES + tile) * R + tl.arange(0, R)
        dy = tl.load(dy_ptr + at[:, None] * O + channel, (at < M)[:, None], 0.0)
        patches = _patches(x_ptr, at, M, high, wide, out_high, out_wide, sn, sc, sh, sw, C, KH, KW, PH, PW, TAPS)
        total = tl.dot(tl.trans(patches.to(dy.dtype)), dy, total, input_precision="ieee")
    place = tl.arange(0, TAPS)[:, None] * O + channel
    tl.store(partial_ptr + tl.program_id(0) * (TAPS * O) + place, total)


@triton.jit(do_not_specialize=["M", "parts"])
def _sum_weights(
    partial_ptr, dw_ptr, parts, wo, wc, wh, ww,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, TAPS: tl.constexpr, O: tl.constexpr,
    P: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * K + tl.arange(0, K)
    part = tl.arange(0, P)[:, None]
    dw = tl.sum(tl.load(partial_ptr + part * (TAPS * O) + index[None, :], part < parts, 0.0), 0)
    tap, channel = index // O, index % O
    tl.store(dw_ptr + _weights(tap, channel, wo, wc, wh, ww, C, KW), dw, tap < C * KH * KW)


def fits(convolution: nn.Conv2d) -> bool:
    """Is the convolution one for these kernels?"""
    inputs, outputs = convolution.in_channels, convolution.out_channels
    return (
        inputs * convolution.kernel_size[0] * convolution.kernel_size[1] <= MOST
        and outputs in (16, 32, 64, 128)
        and convolution.stride == convolution.dilation == (1, 1)
        and convolution.groups == 1
        and convolution.padding_mode == "zeros"
        and not isinstance(convolution.padding, str)
    )


def outputs(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> int:
    """How many elements the output has; 0 where the image is smaller than the window."""
    (high, wide), (kh, kw) = x.shape[2:], weight.shape[2:]
    positions = max(0, high + 2 * padding[0] - kh + 1) * max(0, wide + 2 * padding[1] - kw + 1)
    return len(x) * len(weight) * positions


def forward(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
    """(n, O, h', w'), channels-last, of the weights' type; no bias."""
    images, _, high, wide = x.shape
    outputs, _, kh, kw = weight.shape
    shape = (images, outputs, high + 2 * padding[0] - kh + 1, wide + 2 * padding[1] - kw + 1)
    y = torch.empty(shape, dtype=weight.dtype, device=x.device, memory_format=torch.channels_last)
    rows = images * shape[2] * shape[3]
    _forward[(-(-rows // _ROWS),)](
        x, weight, y, rows, high, wide, *shape[2:], *x.stride(), *weight.stride(),
        **_window(weight, padding), R=_ROWS, num_warps=4,
    )  # fmt: skip
    return y


def backward(dy: Tensor, x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
    """The gradient of the weights, in their memory order."""
    dy = dy.contiguous(memory_format=torch.channels_last)
    rows = dy.numel() // dy.shape[1]
    tiles = -(-rows // (_ROWS * _PARTS))
    parts = -(-rows // (_ROWS * tiles))
    window = _window(weight, padding)
    partial = torch.empty((parts, window["TAPS"] * window["O"]), device=x.device)
    _partial_weights[(parts,)](
        dy, x, partial, rows, *x.shape[2:], *dy.shape[2:], *x.stride(),
        **window, TILES=tiles, R=_ROWS, num_warps=4, num_stages=2,
    )  # fmt: skip
    dw = torch.empty_like(weight)
    del window["PH"], window["PW"]
    _sum_weights[(partial.shape[1] // 64,)](
        partial, dw, parts, *weight.stride(), **window, P=int(triton.next_power_of_2(max(parts, 2))), K=64, num_warps=4
    )
    return dw


def _window(weight: Tensor, padding: tuple[int, int]) -> dict[str, int]:
    outputs, inputs, kh, kw = weight.shape
    return {"C": inputs, "KH": kh, "KW": kw, "PH": padding[0], "PW": padding[1], "TAPS": MOST, "O": outputs}
