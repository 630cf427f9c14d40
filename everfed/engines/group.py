"""The processes of one run under torchrun, and plain data between them: JSON and safetensors, never pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from everfed.core.tree import Tree, leaves


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

    def share(self, tree: Tree | None) -> Tree:
        """The leader's tree, for everybody; the others give None. Tensors that it has on its device they get on theirs,
        without a way through the host."""
        if tree is None:
            return rebuild(json.loads(self._from_leader(None)), self._next_tensor)
        self._from_leader(json.dumps(describe(tree)).encode())
        for tensor in _tensors(tree):
            dist.broadcast(_as_bytes(tensor.to(self.device)), 0)
        return tree

    def _from_leader(self, data: bytes | None) -> bytes:
        """The leader's bytes; the others give None."""
        size = torch.tensor([len(data or b"")], device=self.device)
        dist.broadcast(size, 0)
        box = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        if data is not None:
            box.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(box, 0)
        return bytes(box.cpu().numpy())

    def _next_tensor(self, shape: list[int], dtype: torch.dtype, on_device: bool) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        dist.broadcast(_as_bytes(tensor), 0)
        return tensor if on_device else tensor.cpu()

    def close(self) -> None:
        dist.destroy_process_group()


def describe(tree: Tree) -> Any:
    """The tree for JSON: of a tensor only its shape, its dtype and whether it is on a device other than the host."""
    return {key: _described(value) for key, value in tree.items()}


def _described(value: Any) -> Any:
    if isinstance(value, dict):
        return {"tree": describe(value)}
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [list(value.shape), dtype, value.device.type != "cpu"]}
    return {"is": value}


def rebuild(note: Any, take: Callable[[list[int], torch.dtype, bool], torch.Tensor]) -> Tree:
    """The tree again; `take` is asked for its tensors, in order."""
    found: Tree = {}
    for key, value in note.items():
        if "tree" in value:
            found[key] = rebuild(value["tree"], take)
        elif "tensor" in value:
            shape, dtype, on_device = value["tensor"]
            found[key] = take(shape, getattr(torch, dtype), on_device)
        else:
            found[key] = value["is"]
    return found


def _tensors(tree: Tree) -> list[torch.Tensor]:
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, where the tensor lies in one piece: not every way to send tensors knows every dtype."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def launched() -> bool:
    """Was this process started by torchrun?"""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_rank() -> int:
    """Which of this machine's processes, and so which of its GPUs."""
    return int(os.environ.get("LOCAL_RANK", "0"))
