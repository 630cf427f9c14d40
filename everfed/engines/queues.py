"""How many queues of a GPU the streams of a process share."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

VARIABLE, _MANY = "CUDA_DEVICE_MAX_CONNECTIONS", "32"
_MARK = "EVERFED_CHOSE_CONNECTIONS"  # the variable is everfed's choice, not the user's


def choose_queues() -> None:
    """Ask CUDA for a queue for every slot's stream, unless the user has chosen. CUDA's own number is 8, and streams
    that share a queue wait for each other. To be called before CUDA starts. Under MPS it stays at CUDA's own number, 2
    a process: processes share a limit there, and beyond it they do not start."""
    if _under_mps():
        take_back(os.environ)  # it may be from the process that started this one
    elif VARIABLE not in os.environ:
        os.environ[VARIABLE] = os.environ[_MARK] = _MANY


def take_back(environment: MutableMapping[str, str]) -> None:
    """Remove everfed's own choice from an environment."""
    if environment.pop(_MARK, None) is not None:
        del environment[VARIABLE]


def _under_mps() -> bool:
    """Is there an MPS daemon that CUDA in this process would use?"""
    # not pathlib: Python 3.11's raises where a folder of another user may not be entered
    return os.path.exists(os.path.join(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps", "control"))
