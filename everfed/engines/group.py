"""The processes of one run under torchrun, and plain data between them: JSON and safetensors, never pickle."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist

from everfed.core import tree
from everfed.core.tree import Tree, on_device


class Group:
    """All ranks of a run. Every method is collective: each rank must call it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @property
    def leads(self) -> bool:
        """Rank 0 writes the run folder and talks to the user."""
        return self.rank == 0

    def owns(self, client: int) -> bool:
        """Does this rank run this client and keep its state?"""
        return client % self.size == self.rank

    def add(self, value: torch.Tensor) -> None:
        """The sum over ranks, in place."""
        dist.all_reduce(value)

    def gather(self, note: Any) -> list[Any]:
        """Everybody's `note`, by rank."""
        return [json.loads(data) for data in self.gather_bytes(json.dumps(note).encode())]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Everybody's bytes, by rank."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(mine)], device=self.device))
        padded = torch.zeros(int(torch.stack(sizes).max()), dtype=torch.uint8, device=self.device)
        padded[: len(mine)] = mine
        boxes = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(boxes, padded)
        return [bytes(box[: int(n)].cpu().numpy()) for box, n in zip(boxes, sizes, strict=True)]

    def share(self, state: Tree | None) -> Tree:
        """The leader's state, for everybody; the others give None, and get it on their device."""
        if state is None:
            return on_device(tree.from_bytes(self._from_leader(None)), self.device)
        self._from_leader(tree.to_bytes(state))
        return state

    def _from_leader(self, data: bytes | None) -> bytes:
        """The leader's bytes; the others give None."""
        size = torch.tensor([len(data or b"")], device=self.device)
        dist.broadcast(size, 0)
        box = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        if data is not None:
            box.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(box, 0)
        return bytes(box.cpu().numpy())

    def close(self) -> None:
        dist.destroy_process_group()


def launched() -> bool:
    """Was this process started by torchrun?"""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_rank() -> int:
    """Which of this machine's processes, and so which of its GPUs."""
    return int(os.environ.get("LOCAL_RANK", "0"))
