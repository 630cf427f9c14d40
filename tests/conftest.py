"""What every test shares: one thread, repeatable properties, and the folder of data sets where there is one."""

import functools
import gc
import os
import random
import tempfile
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
import torch
import typer.testing
from hypothesis import settings

from tests.support import cpu
from tests.support.site import build_once

# Bit-exactness holds at one intra-op thread, so that is what the tests run at.
torch.set_num_threads(1)

# Triton's kernels run in its interpreter where there is no GPU; it has to know before it is imported.
if not torch.backends.cuda.is_built():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Features of texts are cached; tests keep theirs out of the user's folder.
os.environ.setdefault("EVERFED_CACHE", tempfile.mkdtemp(prefix="everfed-cache-"))

# CliRunner makes all commands of an app anew for every call, which takes as long as many a command itself.
typer.testing._get_command = functools.cache(typer.testing._get_command)

# Derandomised: a red run is red again for whoever looks into it. No deadline: shared machines are slow at times.
settings.register_profile("everfed", derandomize=True, deadline=None, database=None)
settings.load_profile("everfed")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder that EVERFED_DATA names; a test that asks for it skips where the variable is not set."""
    named = os.environ.get("EVERFED_DATA")
    if not named:
        pytest.skip("EVERFED_DATA is not set: it names the folder of data sets")
    folder = Path(named)
    if not folder.is_dir():
        pytest.fail(f"EVERFED_DATA names {folder}, which is not a folder")
    return folder


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of commands, whatever the engine: the one that is chosen where there is one core forks no processes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built once for all workers of a session; a broken link fails every test that asks for it."""
    base = tmp_path_factory.getbasetemp()
    return build_once((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Global generators are the same at the beginning of every test and of its fixtures, whatever ran before it here:
    which tests a worker gets, and in which order, depends on how long the others take."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """What was imported stays to the end: the garbage collector need not look through it again and again."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Where EVERFED_CPU_TIMES names a file, it gets a line with the CPU time of every test (support/cpu.py)."""
    named = os.environ.get("EVERFED_CPU_TIMES")
    before = cpu.used() if named else 0.0
    done = yield
    if named:
        with Path(named).open("a") as file:
            # never below 0: a process that ended and was waited for by no one takes its seconds along
            file.write(f"{max(cpu.used() - before, 0.0):.2f}\t{item.nodeid}\n")
    return done
