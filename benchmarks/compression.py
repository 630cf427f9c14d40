"""Final accuracy over the bytes that clients send, for updates that are sent whole and compressed.

Run as `python -m benchmarks.compression --out benchmarks/results/compression.json --plot docs/images/compression.png`:
rotated digits as in the recipe `demo`, with 2 local epochs and 6 rounds a task. A run that the record has is not made
again. `model.lora` is FedAvg on factors of rank 8 of the same network, whose own weights stay random.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import everfed

MLP = {"kind": "mlp", "hidden": [100, 100]}
LORA = {**MLP, "lora": {"rank": 8}}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fedavg", MLP),
    "FedGP+DER": ("fedgp+der", MLP),
    "FedSSI": ("fedssi", MLP),
    "model.lora": ("fedavg", LORA),
}
CODES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"kind": "bf16"},
    "int8": {"kind": "int8"},
    "top-k 10 %": {"kind": "top-k", "share": 0.1},
    "top-k 2 %": {"kind": "top-k", "share": 0.02},
}


def recipe(name: str, code: str, seed: int) -> dict[str, Any]:
    method, model = METHODS[name]
    chosen = f"{method}+compress" if CODES[code] else method
    defaults = {"memory": {"size": 50}, "fedssi": {"reg_strength": 0.001, "eps": 0.1}, "compress": CODES[code]}
    return {
        "seed": seed,
        "stream": {"dataset": "digits", "scenario": "domain-incremental", "transform": "rotate", "tasks": 5,
                   "clients": 10, "partition": {"kind": "shards", "per_client": 2}},
        "model": model,
        "train": {"rounds_per_task": 6, "local_epochs": 2, "optimizer": {"lr": 0.2}},
        "method": {"name": chosen, "defaults": defaults},
    }  # fmt: skip


def measured(name: str, code: str, seed: int, folder: Path) -> dict[str, Any]:
    """A run's final accuracy (%) and the megabytes that clients sent."""
    result = everfed.run(recipe(name, code, seed), folder, progress=False)
    return {"method": name, "code": code, "seed": seed, "acc": 100 * result.metrics["acc"],
            "megabytes": result.data["cost"]["bytes_up"] / 1e6}  # fmt: skip


def measure(record: Path, seeds: int) -> list[dict[str, Any]]:
    """All runs, those that `record` lacks made now."""
    rows: list[dict[str, Any]] = json.loads(record.read_text()) if record.exists() else []
    done = {(row["method"], row["code"], row["seed"]) for row in rows}
    for seed in range(seeds):
        for name in METHODS:
            for code in CODES:
                if (name, code, seed) not in done:
                    with tempfile.TemporaryDirectory() as folder:
                        rows.append(measured(name, code, seed, Path(folder) / "run"))
                    record.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown: accuracy and megabytes of every method and code."""
    yield f"| sent as | {' | '.join(METHODS)} |"
    yield "|---|" + "---|" * len(METHODS)
    for code in CODES:
        cells = []
        for name in METHODS:
            own = [row for row in rows if (row["method"], row["code"]) == (name, code)]
            found = [row["acc"] for row in own]
            spread = f" ± {stdev(found):.1f}" if len(found) > 1 else ""
            cells.append(f"{mean(found):.1f}{spread}, {mean(row['megabytes'] for row in own):.1f} MB" if own else "")
        yield f"| {code} | {' | '.join(cells)} |"


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name in METHODS:
        points = []
        for code in CODES:
            own = [row for row in rows if (row["method"], row["code"]) == (name, code)]
            if own:
                points.append((mean(row["megabytes"] for row in own), mean(row["acc"] for row in own)))
        axes.plot(*zip(*sorted(points), strict=True), "o-", label=name)
    axes.set(xscale="log", xlabel="MB sent by clients", ylabel="final accuracy (%)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("compression.json"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = measure(options.out, options.seeds)
    print("\n".join(table(rows)))
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
