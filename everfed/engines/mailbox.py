"""Trees in memory that processes share: written by one, read by the other without a copy.

A mailbox is an anonymous shared mapping, so it vanishes with its processes, however they end. Only a small header
(JSON) travels through a pipe; the tensors stay where they are.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from everfed.core.tree import Tree

_ALIGN = 64
_KINDS = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
# address space, not memory: pages are taken when they are first written
CAPACITY = 8 << 30


class Mailbox:
    """One tree at a time. Make it before forking."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._map = mmap.mmap(-1, capacity, flags=flags)
        self._capacity = capacity

    def write(self, tree: Tree) -> Any:
        """Copy a tree in; returns the header with which another process reads it."""
        header, _ = self._write(tree, 0)
        return header

    def _write(self, tree: Tree, offset: int) -> tuple[dict[str, Any], int]:
        header: dict[str, Any] = {}
        for key, value in tree.items():
            if isinstance(value, dict):
                inner, offset = self._write(value, offset)
                header[key] = {"tree": inner}
            elif isinstance(value, Tensor):
                header[key] = {
                    "at": offset,
                    "kind": str(value.dtype).removeprefix("torch."),
                    "shape": list(value.shape),
                }
                self._view(offset, value.dtype, list(value.shape)).copy_(value.detach())
                offset += -(-value.numel() * value.element_size() // _ALIGN) * _ALIGN
            else:
                header[key] = {"is": value}
        return header, offset

    def read(self, header: Any, copy: bool) -> Tree:
        """The tree that `header` describes; without `copy` its tensors are views that the next write changes."""
        tree: Tree = {}
        for key, entry in header.items():
            if "tree" in entry:
                tree[key] = self.read(entry["tree"], copy)
            elif "at" in entry:
                view = self._view(entry["at"], _KINDS[entry["kind"]], entry["shape"])
                tree[key] = view.clone() if copy else view
            else:
                tree[key] = entry["is"]
        return tree

    def _view(self, offset: int, kind: torch.dtype, shape: list[int]) -> Tensor:
        count = prod(shape)
        if offset + count * kind.itemsize > self._capacity:
            raise MemoryError(f"a message of more than {self._capacity >> 30} GiB does not fit between two processes")
        if count == 0:  # a buffer may not be empty
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(self._map, dtype=kind, count=count, offset=offset).view(shape)


@dataclass(frozen=True)
class Lane:
    """The mailboxes of one call: a client's state on its way in, state and reply on their way out."""

    inbox: Mailbox
    outbox: Mailbox
