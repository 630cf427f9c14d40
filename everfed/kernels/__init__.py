"""Triton kernels for a GPU, a module for each purpose; callers have PyTorch's operations beside them, as the reference.

`models/fused.py` calls batchnorm, pooling and thin (convolutions of few inputs), `core/loss.py` loss,
`core/replica.py` sgd, and `core/rows.py` rows.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch


def load_kernels(module: str) -> Any:
    """A module of kernels; None where PyTorch was built without CUDA or there is no Triton."""
    if not torch.backends.cuda.is_built() or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(module)
