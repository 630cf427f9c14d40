"""A table on real MNIST from an empty folder, killed halfway and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import everfed

COMMAND = ("reproduce", "fedgp/table1", "--scale", "small", "--columns", "MNIST", "--methods", "fedavg,fedgp")
OPTIONS = ("--seeds", "1", "--jobs", "1", "--engine", "eager", "--checkpoint-every", "0", "--out", "table")


def command(data: Path) -> list[str]:
    return [sys.executable, "-m", "everfed", *COMMAND, *OPTIONS, "--data", str(data)]


@pytest.mark.slow
def test_a_table_on_mnist_killed_halfway_and_resumed(data_dir: Path, tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command(data_dir), cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
    halfway = tmp_path / "table/fedgp-table1-rotated-mnist/fedgp-0/events.jsonl"
    while child.poll() is None and not (halfway.exists() and '"evaluation"' in halfway.read_text()):
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, "it ended before it was killed"
    finished = tmp_path / "table/fedgp-table1-rotated-mnist/fedavg-0/result.json"
    kept = finished.stat().st_mtime_ns
    assert len(list(tmp_path.rglob("result.json"))) == 1

    again = subprocess.run(command(data_dir), cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert "4 runs (1 finished already); 4 of 4 cells can be run" in again.stdout
    assert finished.stat().st_mtime_ns == kept
    assert '"event": "resume"' in halfway.read_text()
    table = json.loads((tmp_path / "table/fedgp-table1.json").read_text())
    assert [cell["seeds"] for cell in table["cells"]] == [1, 1, 1, 1]
    assert [cell["paper"] for cell in table["cells"]] == [68.02, 79.46, 25.92, 34.23]

    unbroken = everfed.run(
        everfed.read_recipe("fedgp/table1-rotated-mnist", method="fedgp", seed=0, sets=["engine.kind=eager"]),
        tmp_path / "unbroken",
        data_dir=data_dir,
        scale=0.05,
    )
    resumed = json.loads((halfway.parent / "result.json").read_text())
    assert resumed["accuracy_matrix"] == unbroken.data["accuracy_matrix"]
    assert (halfway.parent / "model.safetensors").read_bytes() == (tmp_path / "unbroken/model.safetensors").read_bytes()
