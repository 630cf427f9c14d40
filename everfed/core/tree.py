"""Named tensors: nested dicts of tensors and plain scalars, their sizes and their bytes.

Everything that crosses a process, a wire or a disk is a tree. Bytes are safetensors with the structure in the header:
no code is ever executed when a tree is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

Leaf = Tensor | int | float | bool | str | None
Tree = dict[str, Any]  # str -> Leaf | Tree

_TENSOR, _SCALAR = "tensor", "scalar"
HEADER_LIMIT = 100_000_000  # what safetensors itself allows
_DIMENSIONS = 64  # what torch's kernels take
# what damaged bytes make safetensors, json, torch and our own code raise
_DAMAGE = (safetensors.SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError,
           OverflowError, MemoryError)  # fmt: skip


class TreeError(ValueError):
    """Bytes that are not a tree, or a value a tree cannot hold."""


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """Every leaf with its path, in insertion order; paths are joined by '/'."""
    for key, value in tree.items():
        path = f"{prefix}/{key}" if prefix else key
        if isinstance(value, dict):
            yield from leaves(value, path)
        else:
            yield path, value


def map_tensors(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """A new tree with `function` applied to every tensor; other leaves are kept."""
    return {
        key: map_tensors(function, value)
        if isinstance(value, dict)
        else function(value)
        if isinstance(value, Tensor)
        else value
        for key, value in tree.items()
    }


def clone(tree: Tree) -> Tree:
    """A deep copy: no tensor of it shares memory with the original."""
    return map_tensors(lambda tensor: tensor.detach().clone(), tree)


def on_device(slots: Tree, device: torch.device) -> Tree:
    """The slots on `device`; the sub-tree "host" stays where it is."""
    moved = map_tensors(lambda tensor: tensor.to(device), {k: v for k, v in slots.items() if k != "host"})
    return {**moved, "host": slots["host"]} if "host" in slots else moved


def tensor_bytes(tree: Tree) -> int:
    """Payload bytes: numel x itemsize of every tensor. Scalars travel in the header and are not counted."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(tree) if isinstance(leaf, Tensor))


def equal(a: Tree, b: Tree) -> bool:
    """Same structure, same dtypes and shapes, same bits (NaN equals NaN)."""
    if a.keys() != b.keys():
        return False
    return all(_equal_leaf(a[key], b[key]) for key in a)


def _equal_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return equal(a, b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.numel() == 0:
            return True
        left, right = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        return bool(torch.equal(left, right))
    return type(a) is type(b) and (bool(a == b) or (a != a and b != b))


def to_bytes(tree: Tree) -> bytes:
    """Serialise. The structure (with scalars in place) goes into the header, the tensors into the body."""
    tensors: dict[str, Tensor] = {}
    try:
        structure = json.dumps(_skeleton(tree, tensors))
        structure.encode()
        return safetensors.torch.save(tensors, metadata={"tree": structure})
    except (KeyError, RuntimeError, UnicodeEncodeError, safetensors.SafetensorError) as error:
        raise TreeError(f"this tree has no bytes: {error}") from error


def from_bytes(data: bytes, header_limit: int = HEADER_LIMIT) -> Tree:
    """Inverse of `to_bytes`; tensors arrive on the CPU and own their memory.

    Safe on bytes from anywhere: it raises nothing but TreeError, and needs memory in proportion to what is there, not
    to what a header claims. header_limit: for bytes of strangers; a parsed header takes many times its own size.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        if length > min(header_limit, len(data)):
            raise TreeError(f"a header of {length} bytes, at most {min(header_limit, len(data))}")
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + length])
        found = _fill(json.loads(header["__metadata__"]["tree"]), tensors)
    except TreeError:
        raise
    except _DAMAGE as error:
        raise TreeError(f"not a tree in safetensors format: {error}") from error
    if tensors:  # every tensor is at exactly one place, as `to_bytes` writes it
        raise TreeError(f"{len(tensors)} tensors that the structure does not name")
    return found


def _skeleton(tree: Tree, tensors: dict[str, Tensor], prefix: str = "") -> Tree:
    structure: Tree = {}
    for key, value in tree.items():
        path = f"{prefix}/{key}"
        if not isinstance(key, str):
            raise TreeError(f"{path}: the keys of a tree are strings, not {type(key).__name__}")
        if isinstance(value, dict):
            structure[key] = _skeleton(value, tensors, path)
        elif isinstance(value, Tensor):
            name = str(len(tensors))
            # safetensors refuses tensors that share memory, so each gets its own; what comes from a device has it
            host = value.detach().contiguous()
            tensors[name] = host.clone() if host.device.type == "cpu" else host.cpu()
            structure[key] = {"$": _TENSOR, "at": name}
        elif value is None or isinstance(value, bool | int | float | str):
            structure[key] = {"$": _SCALAR, "is": value}
        else:
            raise TreeError(f"{path}: a tree holds tensors, numbers, strings and None, not {type(value).__name__}")
    return structure


def _fill(structure: Any, tensors: dict[str, Tensor]) -> Tree:
    if not isinstance(structure, dict):
        raise TreeError("a tree is a mapping")
    return {key: _filled(value, tensors) for key, value in structure.items()}


def _filled(value: Any, tensors: dict[str, Tensor]) -> Any:
    kind = value.get("$")
    if kind is None or isinstance(kind, dict):
        return _fill(value, tensors)
    if kind == _TENSOR:
        return _checked(tensors.pop(value["at"]))
    scalar = value["is"]
    if kind != _SCALAR or isinstance(scalar, list | dict):
        raise TreeError(f"unknown kind of leaf: {kind!r}")
    return scalar


def _checked(tensor: Tensor) -> Tensor:
    """What torch can work with: a bool is 0 or 1, whatever byte arrived."""
    if tensor.dim() > _DIMENSIONS:
        raise TreeError(f"a tensor of {tensor.dim()} dimensions, at most {_DIMENSIONS}")
    if tensor.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        raise TreeError("a bool tensor that holds neither 0 nor 1")
    return tensor
