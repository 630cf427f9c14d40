"""The profile by kind of kernel: how many blocks fit, and what a kernel takes of the GPU, in literal numbers."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu_kernels import KINDS, REST, Multiprocessors, by_kind, kind_of

H200 = Multiprocessors(count=132, threads=2048, registers=65536, shared_memory=233472)


@pytest.mark.parametrize(
    ("threads", "registers", "memory", "fit"),
    [
        (384, 168, 231424, 1),  # a convolution of cuDNN's: registers and shared memory for one
        (128, 164, 73728, 3),  # 128 threads of 168 registers: three of 21,504; three of 74,752 bytes
        (128, 80, 0, 6),  # registers, 10,240 each
        (1024, 16, 0, 2),  # threads
        (32, 8, 0, 32),  # no more than 32 blocks
        (1024, 128, 0, 1),  # half of a block is none, but it runs
    ],
)
def test_blocks_that_fit_on_a_multiprocessor(threads: int, registers: int, memory: int, fit: int) -> None:
    assert H200.fit(threads, registers, memory) == fit


def event(name: str, duration: float, grid: list[int], **args: Any) -> dict[str, Any]:
    block = {"block": [128, 1, 1], "registers per thread": 32, "shared memory": 0, "grid": grid, **args}
    return {"cat": "kernel", "name": name, "dur": duration, "args": block}


def test_a_kernel_takes_its_time_times_the_places_that_it_fills() -> None:
    """16 blocks of 128 threads with 32 registers fit; 1,056 blocks are half of 132 x 16 places."""
    events = [
        event("sm90_wgrad_x", 8.0, [1056, 1, 1]),
        event("_moments", 4.0, [132, 16, 2]),  # twice as many as there are places
        {"cat": "gpu_memcpy", "name": "copy", "dur": 100.0, "args": {}},
    ]
    found = by_kind(events, H200, steps=2)
    assert found["weight gradients of convolutions"] == {"kernels": 0.5, "us": 4.0, "us_of_gpu": 2.0}
    assert found["BatchNorm, ReLU and residual sums"] == {"kernels": 0.5, "us": 2.0, "us_of_gpu": 2.0}
    assert found["all"] == {"kernels": 1.0, "us": 6.0, "us_of_gpu": 4.0}
    assert found[REST]["kernels"] == 0


def test_kinds_are_those_of_our_kernels_and_cudnns() -> None:
    from pathlib import Path

    import everfed.kernels

    folder = Path(everfed.kernels.__file__).parent
    written = "".join(path.read_text() for path in folder.glob("*.py"))
    ours = [piece for pieces in KINDS.values() for piece in pieces if piece.startswith("_")]
    assert all(f"def {piece}" in written for piece in ours), "a kernel of this name is gone"
    assert kind_of("sm90_xmma_dgrad_implicit_gemm") == "input gradients of convolutions"
    assert kind_of("void at::native::reduce_kernel") == REST
