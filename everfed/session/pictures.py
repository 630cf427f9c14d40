"""Pictures that a finished run leaves beside its numbers, where the stream draws them, as PNG files."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from everfed.core.engine import Engine
from everfed.core.server import RunState
from everfed.core.stream import Stream
from everfed.store.run import RunFolder

PICTURES = 4  # of every task
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def save_pictures(folder: RunFolder, stream: Stream, engine: Engine, state: RunState) -> None:
    """Some test samples of every task as the stream draws them, with the trained model's predictions."""
    if not stream.has_pictures:
        return
    trainer = engine.workbench()
    drawn: dict[str, bytes] = {}
    for task in range(stream.tasks):
        data = stream.test(task).take(np.arange(min(PICTURES, len(stream.test(task)))))
        found = stream.pictures(trainer.outputs(state.model, data.x).cpu(), data)
        drawn |= {f"task{task + 1}-{number + 1}": png(picture) for number, picture in enumerate(found)}
    folder.write_pictures(drawn)


def png(pixels: np.ndarray) -> bytes:
    """The file of an image (height, width, 3) of uint8, made without a package for images."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(f"expected (height, width, 3) of uint8, got {pixels.dtype} {pixels.shape}")
    height, width, _ = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, colour
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # 0: no filter
    return (
        _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
