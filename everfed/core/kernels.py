"""Which modules of Triton kernels can be used here."""

from __future__ import annotations

import importlib
from typing import Any

import torch


def load_kernels(module: str) -> Any:
    """A module of Triton kernels; None where PyTorch was built without CUDA or there is no Triton."""
    if not torch.backends.cuda.is_built():
        return None
    try:
        return importlib.import_module(module)
    except ImportError:
        return None
