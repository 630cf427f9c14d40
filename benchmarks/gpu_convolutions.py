"""Convolutions of ResNet-18 on one GPU: everfed's kernels beside cuDNN's, layer by layer, in turns.

Microseconds of each pass alone and, as a client's among others, with ten streams at it (the time of all, by their
number); cuDNN chooses its kernels by trying (cudnn.benchmark), as in a run. The sum is of a whole step's convolutions.

python -m benchmarks.gpu_convolutions [--batch 32] [--streams 10] [--out FILE]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.measure import machine, write

REPEATS, TURNS = 50, 3  # calls in one graph, so that launches of graphs count little; measurements: the best counts
PASSES = ("forward", "input", "weights")


class Layer(NamedTuple):
    """A kind of convolution, and how many a network has of it."""

    inputs: int
    outputs: int
    pixels: int
    side: int
    stride: int
    number: int


LAYERS = [
    Layer(64, 64, 32, 3, 1, 4),
    *(Layer(2 * c, 2 * c, p // 2, 3, 1, 3) for c, p in ((64, 32), (128, 16), (256, 8))),
    *(Layer(c, 2 * c, p, side, 2, 1) for c, p in ((64, 32), (128, 16), (256, 8)) for side in (3, 1)),
]


def tensors(layer: Layer, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, dy."""
    out = layer.pixels // layer.stride
    shapes = (
        (batch, layer.inputs, layer.pixels, layer.pixels),
        (layer.outputs, layer.inputs, layer.side, layer.side),
        (batch, layer.outputs, out, out),
    )
    x, w, dy = (torch.randn(s, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last) for s in shapes)
    return x, w, dy


def cudnn(layer: Layer, name: str, x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
    stride, padding = [layer.stride] * 2, [layer.side // 2] * 2
    if name == "forward":
        return functional.conv2d(x, w, None, stride, padding)
    wanted = [name == "input", name == "weights", False]
    both = torch.ops.aten.convolution_backward(dy, x, w, None, stride, padding, [1, 1], False, [0, 0], 1, wanted)
    found: Tensor = both[0] if wanted[0] else both[1]
    return found


def ours(layer: Layer, name: str, x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
    from everfed.kernels import convolution

    how = ((layer.side // 2,) * 2, (layer.stride,) * 2)
    if name == "forward":
        return convolution.forward(x, w, *how)
    gradient = convolution.input_gradient if name == "input" else convolution.weights_gradient
    return gradient(dy, x, w, *how)


def captured(work: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    with torch.cuda.stream(stream):
        work()  # chooses or compiles the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(REPEATS):
            work()
    return graph


def microseconds(graphs: list[torch.cuda.CUDAGraph], streams: list[torch.cuda.Stream], replays: int = 5) -> float:
    """Of one call, while all graphs are replayed."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(replays):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - begun) / (replays * len(graphs) * REPEATS)


def measure(layer: Layer, name: str, batch: int, streams: list[torch.cuda.Stream]) -> dict[str, dict[str, float]]:
    """{kernels: {"alone": microseconds, "together": microseconds}}."""
    data = [tensors(layer, batch) for _ in streams]
    graphs = {
        kernels.__name__: [
            captured(lambda kernels=kernels, own=own: kernels(layer, name, *own), stream)  # type: ignore[misc]
            for own, stream in zip(data, streams, strict=True)
        ]
        for kernels in (cudnn, ours)
    }
    found = {kernels: {"alone": float("inf"), "together": float("inf")} for kernels in graphs}
    for _ in range(TURNS + 1):  # the first ones load
        for kernels, own in graphs.items():
            row = found[kernels]
            row["alone"] = min(row["alone"], microseconds(own[:1], streams[:1], 20))
            row["together"] = min(row["together"], microseconds(own, streams))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--streams", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    torch.backends.cudnn.benchmark = True
    streams = [torch.cuda.Stream() for _ in range(arguments.streams)]
    rows: list[dict[str, Any]] = []
    sums = {(kernels, when): 0.0 for kernels in ("cudnn", "ours") for when in ("alone", "together")}
    for layer in LAYERS:
        for name in PASSES:
            us = measure(layer, name, arguments.batch, streams)
            rows.append({**layer._asdict(), "pass": name, **us})
            for kernels, when in sums:
                sums[kernels, when] += layer.number * us[kernels][when]
            shown = ", ".join(f"{k} {v['alone']:.1f} alone, {v['together']:.2f} together" for k, v in us.items())
            print(f"{layer.inputs:4} to {layer.outputs:3}, {layer.pixels:2} pixels, {layer.side}x{layer.side}, "
                  f"stride {layer.stride}, {name:8} us: {shown}", flush=True)  # fmt: skip
    step = {f"{kernels} {when}": total for (kernels, when), total in sums.items()}
    ratio = sums["cudnn", "together"] / sums["ours", "together"]
    print("a step's convolutions, us:", {k: round(v, 1) for k, v in step.items()}, f"together {ratio:.2f} times")
    found = {**machine(), "batch": arguments.batch, "streams": arguments.streams, "step": step, "layers": rows}
    write(found, arguments.out)


if __name__ == "__main__":
    main()
