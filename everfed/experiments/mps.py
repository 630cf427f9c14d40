"""CUDA MPS: lets several processes compute on one GPU at the same time. Without it they take turns."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
START_SECONDS, QUIT_SECONDS = 20, 60
# a daemon that starts may still refuse its clients, in some containers for one
_CLIENT = """
import ctypes, sys
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
sys.exit(bool(cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
              or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)))
"""


def note() -> str:
    """Can processes share the GPU at the same time here?"""
    if shutil.which(CONTROL) is None:
        return f"they take turns on the GPU: {CONTROL} is not installed"
    if runs():
        return "CUDA MPS is running: they share the GPU at the same time"
    return f"they take turns on the GPU; `{CONTROL} -d`, started before, lets them share it at the same time"


def runs() -> bool:
    """Is there a daemon that processes of this environment use?"""
    try:
        asked = _control("get_server_list", os.environ, 10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


@contextmanager
def shared(say: Callable[[str], None]) -> Iterator[Mapping[str, str]]:
    """The environment of processes that share a GPU: that of a daemon for them alone, which ends with the context.
    Empty where one runs already or none can be had. say: takes a line about it."""
    if shutil.which(CONTROL) is None or runs():
        say(f"runs at a time: {note()}")
        yield {}
        return
    with private(say) as environment:
        if environment is not None:
            say("runs at a time: CUDA MPS was started for them: they share the GPU at the same time")
        yield environment or {}


@contextmanager
def private(say: Callable[[str], None]) -> Iterator[dict[str, str] | None]:
    """The environment of processes that use a daemon of their own; None where it cannot be had, and `say` gets why."""
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as place:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": f"{place}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{place}/log"}
        for path in environment.values():
            Path(path).mkdir()
        # the daemon numbers the GPUs that it sees anew, and a client's CUDA_VISIBLE_DEVICES would then name others
        from everfed.engines.slots import take_back

        whole = {**os.environ, **environment}
        take_back(whole)
        daemons = {name: value for name, value in whole.items() if name != "CUDA_VISIBLE_DEVICES"}
        try:
            problem = _start(daemons, whole)
            if problem:
                say(f"no CUDA MPS, processes take turns on the GPU: {problem}")
            yield None if problem else environment
        finally:  # also of a daemon whose start was interrupted
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                _control("quit", daemons, QUIT_SECONDS)


def _start(daemons: Mapping[str, str], clients: Mapping[str, str]) -> str:
    """Start a daemon; why it is of no use, or nothing."""
    try:
        subprocess.run([CONTROL, "-d"], env=daemons, check=True, capture_output=True, timeout=START_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if _serves(clients) else "its daemon serves no process here"


def _serves(clients: Mapping[str, str]) -> bool:
    command = [sys.executable, "-I", "-S", "-c", _CLIENT]
    try:
        return subprocess.run(command, env=clients, check=False, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _control(command: str, environment: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CONTROL], input=f"{command}\n", text=True, env=environment, capture_output=True, check=False, timeout=timeout
    )
