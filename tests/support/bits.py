"""Fingerprints of small runs of every preset, to compare two versions of everfed bit by bit.

    python -m tests.support.bits --out before.json
    python -m tests.support.bits --out after.json
    python -m tests.support.bits --compare before.json after.json

Only the public API and recipes are used, so another version runs the same file: PYTHONPATH=FOLDER python -P
tests/support/bits.py. A run's entry is written as soon as the run is over; entries that --out has already are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import everfed

Table = dict[str, Any]

ROUNDS = 2  # of a task; twice as many where a run is stopped in the middle of its second task
HOW = ("eager", "processes", "resumed")
SYNTHESIS = {"syn_round": 2, "warmup": 1, "synth_batch": 4, "g_steps": 2, "nz": 4, "kd_steps": 2, "kd_batch": 4,
             "batch": 4, "n_syn": 8}  # fmt: skip
# options by part, for whichever method has that part
SMALL: Table = {
    "memory": {"size": 8},
    "af-fcl": {"hidden": 6},
    "ccvr": {"per_class": 10, "epochs": 2},
    "fed-cprompt": {"components": 2, "length": 2, "blocks": [0], "near": 1.0, "far": 0.1},
    "fedcil": {"server_steps": 2, "server_chunk": 2, "server_batch": 4, "noise": 3, "width": 4},
    "fedl2p": {"epochs": 2, "outer_epochs": 1, "terms": 2, "hidden": 5},
    "glfc": {"perturbation": 1, "reconstruction": 1, "iterates": 1},
    "hgp": {"per_class": 10, "epochs": 2},
    "lander": {**SYNTHESIS, "width": 4, "group": 3},
    "lora": {"rank": 2},
    "ffa-lora": {"rank": 2},
    "dolfin": {"rank": 2},
    "lorm": {"rank": 2},
    "pilora": {"rank": 2},
    "mfcl": {"gen_steps": 4, "gen_chunk": 2, "gen_batch": 8, "syn_batch": 4, "z_dim": 4, "gen_light": True},
    "prompt-coda": {"components": 2, "length": 2, "blocks": [0]},
    "prompt-dual": {"length": 2, "general": [0], "expert": []},
    "prompt-l2p": {"pool": 4, "length": 2, "top": 2},
    "prompt-shared": {"length": 2, "blocks": [0]},
    "ranpac": {"width": 16},
    "fedran": {"width": 16, "rank": 6},
    "target": SYNTHESIS,
}
VIT = {"kind": "vit", "patch": 4, "width": 8, "depth": 1, "heads": 2}
CNN = {"kind": "conv-4", "width": 4}  # has BatchNorm
NETWORKS: Mapping[str, Table] = {
    **dict.fromkeys(("lora", "ffa-lora", "dolfin", "regmean", "lorm", "pilora", "prompt-l2p", "prompt-dual",
                     "prompt-coda", "coda-lwf", "fed-cprompt", "prompt-hgp"), VIT),
    **dict.fromkeys(("target", "lander", "fedprox", "fedcurv", "fednova", "scaffold", "glfc"), CNN),
}  # fmt: skip


def recipe(method: str, how: str = "eager") -> Table:
    """A run of three tasks of four clients, three of them in a round, on a few digits."""
    stream = {"dataset": "digits", "scenario": "class-incremental", "tasks": 3, "clients": 4, "participation": 0.75,
              "max_train": 120, "max_test": 40, "partition": {"kind": "dirichlet", "alpha": 1.0}}  # fmt: skip
    optimizer = {"kind": "sgd", "lr": 0.1, "momentum": 0.0 if "scaffold" in method else 0.5}
    network = NETWORKS.get(method.removeprefix("fedgp+"), {"kind": "mlp", "hidden": [8]})
    if network is CNN:
        stream["image_size"] = 16
    engine = {"kind": "processes", "workers": 2} if how == "processes" else {"kind": "eager"}
    rounds = 2 * ROUNDS if how == "resumed" else ROUNDS
    return {
        "name": "bits",
        "seed": 3,
        "stream": stream,
        "model": network,
        "train": {
            "rounds_per_task": rounds,
            "local_epochs": 3 if network is VIT else 1,
            "batch_size": 10,
            "optimizer": optimizer,
        },
        "method": {"name": method, "defaults": {part: own for part, own in SMALL.items() if part in parts()}},
        "engine": {**engine, "device": "cpu"},
    }


def presets() -> list[str]:
    return list(_registry().names())


def parts() -> list[str]:
    """Of the version that runs: an older one has fewer."""
    return list(_registry().PARTS)


def _registry() -> Any:
    try:
        from everfed.methods import registry
    except ImportError:  # before 0.2
        from everfed import methods as registry  # type: ignore[no-redef]
    return registry


# one run --------------------------------------------------------------------------------------------------------------
class Stop(Exception):
    """Ends a run as a crash would."""


class Stopper:
    """Ends a run when a checkpoint in the middle of its second task is on its way to the disk. patience: seconds that
    the thread which writes checkpoints gets to end; the next one would be left out meanwhile."""

    def __init__(self, folder: Path, rounds: int, patience: float) -> None:
        self.folder, self.rounds, self.patience, self.number = folder / "checkpoint", rounds, patience, 0

    def __call__(self, event: Table) -> None:
        if event["event"] != "checkpoint":
            return
        self.settle()
        if self.rounds < event["round"] < 2 * self.rounds:
            raise Stop

    def settle(self) -> None:
        """Wait until the checkpoint has its name and older ones are gone."""
        end, found = time.monotonic() + 10, [self.number]
        while len(found) != 1 or found[0] <= self.number:
            if time.monotonic() > end:
                raise RuntimeError("a checkpoint was not written in 10 s")
            time.sleep(0.002)
            found = checkpoints(self.folder)
        self.number = found[0]
        time.sleep(self.patience)


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def stopped(table: Table, folder: Path) -> list[Table]:
    """Run until the middle of the second task; returns what was reported."""
    for patience in (0.01, 0.1, 1.0):
        events = list[Table]()
        stopper = Stopper(folder, table["train"]["rounds_per_task"], patience)
        observers = [events.append, stopper]
        try:
            everfed.run(table, folder, progress=False, observers=observers, checkpoint_every=0.0, overwrite=True)
        except Stop:
            return events
    raise RuntimeError("the run was not stopped: no checkpoint in the middle of its second task")


def measured(method: str, how: str, folder: Path) -> Table:
    """The fingerprint of a run."""
    table, events = recipe(method, how), list[Table]()
    if how == "resumed":
        events = stopped(table, folder)
        result = everfed.resume(folder, progress=False, observers=[events.append])
    else:
        result = everfed.run(table, folder, progress=False, observers=[events.append])
    return fingerprint(folder, result.data, events)


def fingerprint(folder: Path, data: Table, events: list[Table]) -> Table:
    """Of a finished run: its model, scores, traffic and phases, and what server and clients keep."""
    cost = data["cost"]
    return {
        "model": tensors_of(folder / "model.safetensors"),
        "finite": finite(folder / "model.safetensors"),
        "metrics": data["metrics"],
        "scores": {key: data.get(key) for key in ("accuracy_matrix", "by_logits", "curves", "parts")},
        "bytes": {key: cost[key] for key in sorted(cost) if "up" in key or "down" in key},
        "samples": cost["samples"],
        "phases": phases(events),
        "state": state_of(folder),
    }


def phases(events: list[Table]) -> list[list[Any]]:
    """Round, phase, repeat, bytes up and down, loss; what was run again after a resume counts once."""
    found = {}
    for event in events:
        if event["event"] == "phase":
            found[event["round"], event["phase"], event["repeat"]] = [
                event.get(key) for key in ("bytes_up", "bytes_down", "loss")
            ]
    return [[*key, *value] for key, value in sorted(found.items())]


def tensors_of(file: Path) -> dict[str, str]:
    """name -> digest of a tensor."""
    return {name: digest(tensor) for name, tensor in sorted(safetensors.torch.load_file(file).items())}


def finite(file: Path) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in safetensors.torch.load_file(file).values())


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode() + raw).hexdigest()[:32]


def state_of(folder: Path) -> dict[str, str]:
    """Digests of what the last checkpoint has of every part's server side, and of every client's state by part. Order
    of insertion does not count."""
    found: dict[str, str] = {}
    last = str(checkpoints(folder / "checkpoint")[-1])
    server = leaves(folder / "checkpoint" / last / "run.safetensors")["server"]
    found |= {f"server/{part}": digest_of(held) for part, held in server.items()}
    versions = {}
    for path in (folder / "clients").glob("*.safetensors"):
        client, version, _ = path.name.split(".")
        versions[int(client)] = max(int(version), versions.get(int(client), 0))
    for client, version in sorted(versions.items()):
        held = leaves(folder / "clients" / f"{client}.{version}.safetensors")
        found |= {f"{client}/{part}": digest_of(own) for part, own in held.items()}
    return found


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def leaves(file: Path) -> Table:
    """The tree in a file, with digests in place of tensors."""
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = safetensors.torch.load(data)

    def filled(value: Any) -> Any:
        kind = value.get("$")
        if kind is None or isinstance(kind, dict):
            return {key: filled(inner) for key, inner in value.items()}
        return digest(tensors[value["at"]]) if kind == "tensor" else value["is"]

    found: Table = filled(json.loads(header["__metadata__"]["tree"]))
    return found


# all of them ----------------------------------------------------------------------------------------------------------
def jobs(only: list[str] | None, hows: list[str]) -> Iterator[tuple[str, str]]:
    names = presets()
    for unknown in set(only or ()) - set(names):
        raise SystemExit(f"there is no preset {unknown!r}")
    for how in hows:
        for name in names:
            if only is None or name in only:
                yield name, how


def measure_all(out: Path, only: list[str] | None, hows: list[str], show: Callable[[str], None] = print) -> int:
    """Measure what `out` lacks; returns how many runs failed."""
    found: Table = json.loads(out.read_text()) if out.exists() else {}
    todo = [(name, how) for name, how in jobs(only, hows) if "error" in found.get(f"{name} {how}", {"error": ""})]
    show(f"everfed of {Path(everfed.__file__).parent.parent}; {len(todo)} runs")
    for number, (name, how) in enumerate(todo, 1):
        began = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            try:
                entry = measured(name, how, Path(folder) / "run")
            except Exception as error:
                entry = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc().splitlines()[-6:]}
        found[f"{name} {how}"] = entry
        temporary = out.with_name(f"{out.name}.tmp")
        temporary.write_text(json.dumps(found, indent=1))
        os.replace(temporary, out)
        said = entry.get("error") or f"{len(entry['model'])} tensors"
        show(f"{number:3}/{len(todo)} {name:28} {how:10} {time.process_time() - began:5.1f} s  {said}")
    return sum("error" in entry for entry in found.values())


def compare(before: Table, after: Table) -> list[str]:
    """What differs, a line each; runs that only one side has count where both measured such runs."""
    lines = []
    for key in sorted(before.keys() | after.keys()):
        if key not in before or key not in after:
            lines.append(f"{key}: only in the {'second' if key in after else 'first'} file")
        elif before[key] != after[key]:
            lines += [f"{key}: {line}" for line in differences(before[key], after[key])]
    return lines


def differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from differences(a.get(key), b.get(key), f"{where}.{key}" if where else key)
    elif a != b:
        yield f"{where}: {str(a)[:60]} -> {str(b)[:60]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file that is written, or gone on with")
    parser.add_argument("--only", help="names of presets, with commas")
    parser.add_argument("--how", default=",".join(HOW), help="eager, processes, resumed")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"))
    given = parser.parse_args()
    if given.compare:
        sides = [json.loads(path.read_text()) for path in given.compare]
        lines = compare(*sides)
        print("\n".join(lines) or f"{len(sides[0])} runs are equal in every bit")
        return bool(lines)
    if given.out is None:
        parser.error("--out FILE or --compare A B")
    only = given.only.split(",") if given.only else None
    return measure_all(given.out, only, given.how.split(","), lambda line: print(line, flush=True)) > 0


if __name__ == "__main__":
    sys.exit(main())
