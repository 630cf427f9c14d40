"""Triton kernels for a GPU, a module for each purpose; callers have PyTorch's operations beside them, as the reference.

`models/fused.py` calls batchnorm, moments, pooling and dense, `models/convolution.py` thin (few channels) and
convolution (many), `core/stream.py` loss, `core/replica.py` sgd, `core/optimizer.py` adam, `core/data.py` rows, and
`data/transforms.py` images.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch


def load_kernels(module: str) -> Any:
    """A module of kernels; None where PyTorch was built without CUDA or there is no Triton."""
    return importlib.import_module(module) if _available() else None


def to_be_compiled() -> str:
    """A sentence for the user where Triton has compiled nothing on this machine yet: the first step takes long then."""
    base = os.environ.get("TRITON_HOME") or Path.home()
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(base) / ".triton" / "cache")
    if not _available() or (folder.is_dir() and any(folder.iterdir())):
        return ""
    return f"the first run on a machine compiles its GPU kernels: about a minute; later runs find them in {folder}"


def _available() -> bool:
    return torch.backends.cuda.is_built() and importlib.util.find_spec("triton") is not None
