"""Kernels as on a GPU, for tests under Triton's interpreter."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
from torch import Tensor

from everfed.models import convolution, fused


@pytest.fixture(scope="module")
def batchnorm() -> ModuleType:
    return importlib.import_module("everfed.kernels.batchnorm")


@pytest.fixture(scope="module")
def tiles() -> ModuleType:
    return importlib.import_module("everfed.kernels.tiles")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are computed by kernels for the tensors of a test, as for those on a Hopper GPU."""
    for owner, name, kernels in (
        (fused, "batchnorm", "batchnorm"),
        (fused, "tiles", "tiles"),
        (fused, "moments", "moments"),
        (fused, "pooling", "pooling"),
        (fused, "dense", "dense"),
        (convolution, "thin", "thin"),
        (convolution, "many", "convolution"),
    ):
        monkeypatch.setattr(owner, name, importlib.import_module(f"everfed.kernels.{kernels}"))
    monkeypatch.setattr(convolution, "_is_hopper", lambda _: True)
    monkeypatch.setattr(Tensor, "is_cuda", True)
