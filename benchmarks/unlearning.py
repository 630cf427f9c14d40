"""What it costs to forget one client: exactly, by subtraction, and by training again without it.

Run as `python -m benchmarks.unlearning --out benchmarks/results/unlearning.json`: digits, five tasks of two classes,
ten clients, client 3 withdrawn. equal: are the bits of the model those of the run that never saw the client?
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import everfed
from everfed.core.tree import equal

METHODS: dict[str, dict[str, Any]] = {"ridge": {}, "ranpac": {"width": 500}, "fedavg": {}, "er": {}}
EXACT = ("ridge", "ranpac")


def recipe(method: str, without: dict[str, Any] | None = None) -> dict[str, Any]:
    stream = {"dataset": "digits", "scenario": "class-incremental", "tasks": 5, "clients": 10}
    return {
        "stream": {**stream, **({"withdrawn": without} if without else {})},
        "model": {"kind": "mlp", "hidden": [100]},
        "train": {"rounds_per_task": 1 if method in EXACT else 5, "optimizer": {"lr": 0.1}},
        "method": {"name": method, "defaults": METHODS},
        "engine": {"kind": "eager"},
    }


def timed(table: dict[str, Any], folder: Path) -> tuple[everfed.Result, float]:
    began = time.process_time()
    return everfed.run(table, folder, progress=False), time.process_time() - began


def measured(method: str, folder: Path) -> dict[str, Any]:
    """Accuracies (%) before and after, and CPU seconds of forgetting and of training again."""
    first, _ = timed(recipe(method), folder / "run")
    again, retrained = timed(recipe(method, {"clients": [3]}), folder / "again")
    row = {"method": method, "acc": 100 * first.metrics["acc"], "acc_again": 100 * again.metrics["acc"],
           "seconds_again": retrained}  # fmt: skip
    if method in EXACT:
        began = time.process_time()
        everfed.forget(first.folder, clients=[3])
        row |= {"seconds_forget": time.process_time() - began}
        row["equal"] = equal(*(load_file(run.folder / "model.safetensors") for run in (first, again)))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("unlearning.json"))
    options = parser.parse_args()
    rows = []
    for method in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measured(method, Path(folder)))
        print(json.dumps(rows[-1]), flush=True)
    options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
