"""The samples a client holds, in storage form; the minibatches of a local training, drawn before it; rows and caches.

What a client will do is decided before it starts, on the host: which samples in which step, and every discrete draw of
its parts. That keeps random draws equal on every engine and device, and leaves the training step with nothing but
gathers, arithmetic and scatters of known shapes, which is what a captured step needs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everfed.kernels import load_kernels

rows_kernel = load_kernels("everfed.kernels.rows")


@dataclass(frozen=True)
class Data:
    """`n` samples in storage form: uint8 images, float features or token ids.

    x: (n, ...) any dtype. y: (n, ...) targets, int64 class ids for classification.
    ids: (n,) int64, unique for one client over its whole life; the same base image
    under another task's transform is another sample and has another id.
    """

    x: Tensor
    y: Tensor
    ids: np.ndarray

    def __post_init__(self) -> None:
        if not len(self.x) == len(self.y) == len(self.ids):
            raise ValueError(
                f"x, y and ids must have one entry per sample, got {len(self.x)}, {len(self.y)}, {len(self.ids)}"
            )

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: np.ndarray) -> Data:
        """The samples at `rows` (positions, not ids)."""
        index = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64)).to(self.x.device)
        return Data(self.x[index], self.y[index], self.ids[rows])

    def to(self, device: torch.device) -> Data:
        """The same samples on `device`."""
        return Data(self.x.to(device), self.y.to(device), self.ids)

    @staticmethod
    def union(parts: Sequence[Data]) -> Data:
        """All samples of `parts`, in order, on the device of the last."""
        device = parts[-1].x.device
        return Data(
            torch.cat([p.x.to(device) for p in parts]),
            torch.cat([p.y.to(device) for p in parts]),
            np.concatenate([p.ids for p in parts]),
        )


# draws planned ahead --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Table:
    """One row of integers per step. values: (steps, width, ...) padded with zeros; lengths: (steps,)."""

    values: np.ndarray
    lengths: np.ndarray

    @staticmethod
    def of(rows: Sequence[np.ndarray]) -> Table:
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        tail = rows[0].shape[1:] if rows else ()
        values = np.zeros((len(rows), int(lengths.max(initial=0)), *tail), dtype=np.int64)
        for step, row in enumerate(rows):
            values[step, : len(row)] = row
        return Table(values, lengths)

    def row(self, step: int) -> np.ndarray:
        return np.asarray(self.values[step, : self.lengths[step]])


@dataclass(frozen=True)
class Schedule:
    """Minibatches of a local training. rows: positions into the data; ids: (n,) ids of the data's samples."""

    rows: Table
    ids: np.ndarray

    @property
    def steps(self) -> int:
        return len(self.rows.lengths)

    def ids_of(self, step: int) -> np.ndarray:
        """The sample ids of a step's minibatch."""
        return np.asarray(self.ids[self.rows.row(step)])


def minibatches(
    ids: np.ndarray, epochs: int, batch_size: int, rng: np.random.Generator, drop_last: bool = False
) -> Schedule:
    """`epochs` passes in random order. A last minibatch of one sample joins the one before (BatchNorm needs two)."""
    rows: list[np.ndarray] = []
    for _ in range(epochs):
        rows.extend(_cut(rng.permutation(len(ids)), batch_size, drop_last))
    return Schedule(Table.of(rows), ids)


def _cut(order: np.ndarray, size: int, drop_last: bool) -> list[np.ndarray]:
    rows = [order[i : i + size] for i in range(0, len(order), size)]
    if drop_last and len(rows) > 1 and len(rows[-1]) < size:
        return rows[:-1]
    if size > 1 and len(rows) > 1 and len(rows[-1]) == 1:
        rows[-2:] = [np.concatenate(rows[-2:])]
    return rows


# rows of several tensors at the same places -----------------------------------------------------------------------
def take_rows(tensors: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    """The rows `index` of each tensor, as index_select along the first axis. On a GPU one kernel for all."""
    if _has_rows_kernel(index, tensors):
        made: list[Tensor] = rows_kernel.gather(tensors, index)
        return made
    return [tensor.index_select(0, index) for tensor in tensors]


def put_rows(places: Sequence[Tensor], index: Tensor, values: Sequence[Tensor]) -> None:
    """Write values[i] into the rows `index` of places[i], in place, as index_copy_ along the first axis."""
    same = all(place.dtype == value.dtype for place, value in zip(places, values, strict=True))
    if same and _has_rows_kernel(index, [*places, *values], len(places)):
        rows_kernel.scatter(places, index, values)
        return
    for place, value in zip(places, values, strict=True):
        place.index_copy_(0, index, value)


def _has_rows_kernel(index: Tensor, tensors: Sequence[Tensor], count: int | None = None) -> bool:
    return (
        rows_kernel is not None
        and all(tensor.is_cuda for tensor in (index, *tensors))
        and index.dtype == torch.int64
        and index.is_contiguous()
        and len(index) > 0
        and (count or len(tensors)) <= rows_kernel.MOST
        and all(rows_kernel.fits(tensor) for tensor in tensors)
        and not torch.compiler.is_compiling()
    )


# memory ---------------------------------------------------------------------------------------------------------------
def device_memory(device: torch.device) -> tuple[int, int]:
    """(free, in all) bytes that this process may have on a CUDA device: one of several that share it has a part only
    (torch.cuda.set_per_process_memory_fraction)."""
    free, total = torch.cuda.mem_get_info(device)
    number = torch.cuda.current_device() if device.index is None else device.index
    allowed = int(torch.cuda.get_per_process_memory_fraction(number) * total)
    return max(0, min(free, allowed - torch.cuda.memory_reserved(device))), allowed


class DataCache:
    """Least recently used data goes first once `limit` bytes of samples are exceeded; the newest always stays."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._held: OrderedDict[Hashable, Data] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Data]) -> Data:
        """The data under `key`, made when it is not held."""
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        data = self._held[key] = make()
        self.bytes += _size(data)
        while self.bytes > self.limit and len(self._held) > 1:
            self.bytes -= _size(self._held.popitem(last=False)[1])
        return data


def _size(data: Data) -> int:
    return data.x.nbytes + data.y.nbytes + data.ids.nbytes
