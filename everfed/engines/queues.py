"""How many queues of a GPU the streams of a process share."""

from __future__ import annotations

import os
from pathlib import Path

_VARIABLE, _MANY = "CUDA_DEVICE_MAX_CONNECTIONS", "32"


def choose_queues() -> None:
    """Ask CUDA for a queue for every slot's stream, unless the user has chosen. CUDA's own number is 8, and streams
    that share a queue wait for each other. To be called before CUDA starts. Under MPS it stays at CUDA's own number, 2
    a process: processes share a limit there, and beyond it they do not start."""
    if _under_mps():
        if os.environ.get(_VARIABLE) == _MANY:  # from the process that started this one
            del os.environ[_VARIABLE]
    else:
        os.environ.setdefault(_VARIABLE, _MANY)


def _under_mps() -> bool:
    """Is there an MPS daemon that CUDA in this process would use?"""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps", "control").exists()
