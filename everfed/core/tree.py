"""Named tensors: nested dicts of tensors and plain scalars, their sizes and their bytes.

Everything that crosses a process, a wire or a disk is a tree. Bytes are safetensors with the structure in the header:
no code is ever executed when a tree is read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

Leaf = Tensor | int | float | bool | str | None
Tree = dict[str, Any]  # str -> Leaf | Tree
Chunk = bytes | memoryview  # one of the buffers that make up a tree's bytes

_TENSOR, _SCALAR = "tensor", "scalar"
HEADER_LIMIT = 100_000_000  # what safetensors itself allows
_DIMENSIONS = 64  # what torch's kernels take
# safetensors' names, in the order in which it writes: larger elements first, so that every tensor is aligned
_DTYPES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64",
    torch.float32: "F32", torch.uint32: "U32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
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


def on_device(state: Tree, device: torch.device) -> Tree:
    """The state on `device`; the sub-tree "host" stays where it is."""
    moved = map_tensors(lambda tensor: tensor.to(device), {k: v for k, v in state.items() if k != "host"})
    return {**moved, "host": state["host"]} if "host" in state else moved


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
        return bool(torch.equal(_flat(a.detach()), _flat(b.detach())))
    return type(a) is type(b) and (bool(a == b) or (a != a and b != b))


def to_bytes(tree: Tree) -> bytes:
    """Serialise. The structure (with scalars in place) goes into the header, the tensors into the body."""
    return b"".join(to_chunks(tree))


def to_chunks(tree: Tree) -> Iterator[Chunk]:
    """The buffers that make up `to_bytes`: the header, then each tensor's memory, not copied where it is contiguous and
    on the host. Others are copied when they are reached, so that one at a time is in memory twice.

    `safetensors.torch.save` copies all tensors while it holds the GIL, and every other thread waits; writing or hashing
    a large buffer releases it. A tree that has no bytes raises TreeError here, before the first chunk.
    """
    tensors: dict[str, Tensor] = {}
    order = list(_DTYPES)
    try:
        structure = json.dumps(_skeleton(tree, tensors))
        ordered = sorted(tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0]))
        header = _header(structure, ordered)
    except RuntimeError as error:  # nested too deeply, or a kind of tensor without a shape
        raise TreeError(f"this tree has no bytes: {error}") from error
    return chain([header], (_memory(tensor) for _, tensor in ordered))


def _header(structure: str, tensors: list[tuple[str, Tensor]]) -> bytes:
    """The length of the header in 8 bytes, then the header: JSON, padded with spaces to a multiple of 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"tree": structure}}
    start = 0
    for name, tensor in tensors:
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a tensor as they are in a file."""
    try:
        data = _flat(tensor)
    except RuntimeError as error:  # of the device
        raise TreeError(f"this tree has no bytes: {error}") from error
    if sys.byteorder == "big":  # the format is little-endian
        number = tensor.element_size() // (2 if tensor.is_complex() else 1)
        data = data.reshape(-1, number).flip(1).reshape(-1)
    return data.numpy().data.toreadonly()


def _flat(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, not copied if it is contiguous and on the host. uint8 (bytes,)."""
    host = tensor.resolve_conj().resolve_neg().contiguous().cpu()
    # `reshape(-1)` keeps the stride of a single element, which counts as contiguous whatever it is, and `view` needs 1
    return host.as_strided((host.numel(),), (1,)).view(torch.uint8)


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
            if value.dtype not in _DTYPES or value.layout is not torch.strided or value.is_meta:
                kind = f"{value.dtype} and {value.layout} on {value.device}"
                raise TreeError(f"{path}: this tree has no bytes: safetensors holds no tensor of {kind}")
            name = str(len(tensors))
            tensors[name] = value.detach()
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
