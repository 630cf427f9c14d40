"""The process that runs ClientApps."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="pip install 'everfed[flower]'")

EXECUTOR = """
import os, time
from everfed.federation.flower import executor

def app(address, token, **options):
    print(os.getpid(), flush=True)
    time.sleep(60)

executor.run_clientapp = app
executor._fork("127.0.0.1:1", "a task")
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_an_app_ends_with_its_executor_and_says_nothing(tmp_path: Path) -> None:
    """Flower replaces what fell silent; an app that says goodbye without a reply leaves its message unanswered."""
    with _running() as process:
        assert process.stdout is not None
        app = int(process.stdout.readline())
        assert Path(f"/proc/{app}").exists()
        process.kill()
        assert process.stdout.read() == ""  # ends when both are gone, for they share it


@contextlib.contextmanager
def _running() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", EXECUTOR], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
