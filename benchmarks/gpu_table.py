"""What a run of a table costs beside its rounds, and what several runs together gain, on one GPU.

whole: one command from start to result, split into start-up, rounds, first rounds (capture, choice of kernels and of
slots), scoring, checkpoints and the end, against the same number of warm rounds. together: several methods as
processes, with and without CUDA MPS, in images a second, against each of them alone.

python -m benchmarks.gpu_table [--only whole] [--data DIR] [--rounds 5] [--device cpu] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, write

Event = dict[str, Any]
MPS = "nvidia-cuda-mps-control"
POLL = 0.1


# one run ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Command:
    """An `everfed run` of a recipe."""

    recipe: str
    sets: tuple[str, ...]
    data: Path | None

    def start(self, folder: Path, method: str, *more: str, **env: str) -> subprocess.Popen[bytes]:
        """Begin it in `folder`; what it prints goes into a file beside it."""
        command = [sys.executable, "-m", "everfed", "run", self.recipe, "--method", method, "--out", str(folder)]
        command += [f"--set={entry}" for entry in (*self.sets, *more)]
        command += [] if self.data is None else ["--data", str(self.data)]
        with open(folder.with_suffix(".txt"), "wb") as printed:
            return subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, env={**os.environ, **env})


def whole(command: Command, method: str, rounds: int, full: int, folder: Path) -> dict[str, Any]:
    """One run with `rounds` rounds a task, split; and what the recipe's own number, `full`, would take."""
    begun = time.time()
    process = command.start(folder, method, f"train.rounds_per_task={rounds}")
    if process.wait() != 0:
        raise SystemExit(f"the run failed:\n{folder.with_suffix('.txt').read_text()[-3000:]}")
    ended = time.time()
    result = json.loads((folder / "result.json").read_text())
    return {**split(read_events(folder), begun, ended, full), "engine": result.get("environment", {})}


def read_events(folder: Path) -> list[Event]:
    """The events so far; a line that is being written is left out."""
    log = folder / "events.jsonl"
    lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
    return [json.loads(line) for line in lines]


def split(events: Sequence[Event], begun: float, ended: float, full: int) -> dict[str, Any]:
    """Where the seconds between `begun` and `ended` went. Every moment is counted once, by the event that ends it.

    Warm rounds: the fastest of the later half of a task's rounds, times their number. What rounds took beyond that is
    `first_rounds`. expected: with `full` rounds a task, where only the number of warm rounds differs.
    """
    kinds = {"start": "start_up", "evaluation": "scoring", "checkpoint": "checkpoints", "end": "end"}
    seconds = dict.fromkeys(("start_up", "warm_rounds", "first_rounds", "scoring", "checkpoints", "end"), 0.0)
    rounds: dict[int, dict[int, float]] = {}
    before = begun
    for event in events:
        if "round" not in event and event["event"] not in kinds:  # a warning
            continue
        passed, before = event["time"] - before, event["time"]
        if event["event"] in kinds:
            seconds[kinds[event["event"]]] += passed
        else:
            of_task = rounds.setdefault(event.get("task", 0), {})
            of_task[event["round"]] = of_task.get(event["round"], 0.0) + passed
    seconds["end"] += ended - before
    warm = {task: min(list(of_task.values())[len(of_task) // 2 :]) for task, of_task in rounds.items()}
    seconds["warm_rounds"] = sum(warm[task] * len(of_task) for task, of_task in rounds.items())
    in_rounds = sum(sum(of_task.values()) for of_task in rounds.values())
    seconds["first_rounds"] = in_rounds - seconds["warm_rounds"]
    total, warm_full = ended - begun, full * sum(warm.values())
    longer = total - seconds["warm_rounds"] + warm_full
    return {
        "total_s": total,
        "seconds": seconds,
        "warm_round_s_by_task": list(warm.values()),
        "first_round_s_by_task": [next(iter(of_task.values())) for of_task in rounds.values()],
        "total_over_warm_rounds": total / seconds["warm_rounds"],
        "expected": {"rounds_per_task": full, "total_s": longer, "total_over_warm_rounds": longer / warm_full},
    }


# several runs -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Window:
    """When rates are taken: after `warm` rounds of every run, over `rounds` further ones; at most `limit` seconds."""

    warm: int
    rounds: int
    limit: float


def rates(
    command: Command, methods: Sequence[str], images: int, window: Window, folder: Path, env: Mapping[str, str]
) -> dict[str, Any]:
    """Images a second of every method, all at once, and their sum. The runs are stopped when they were measured."""
    folder.mkdir(parents=True)
    started = time.monotonic()
    runs = {method: command.start(folder / method, method, "train.rounds_per_task=100000", **env) for method in methods}
    try:
        while time.monotonic() - started < window.limit:
            ends = [ends_of_rounds(read_events(folder / method)) for method in methods]
            by_method = dict(zip(methods, rates_of(ends, images, window), strict=True))
            if all(by_method.values()):
                break
            if failed := [method for method, process in runs.items() if process.poll() is not None]:
                return {"failed": {method: (folder / f"{method}.txt").read_text()[-1000:] for method in failed}}
            time.sleep(POLL)
    finally:
        for process in runs.values():
            process.kill()
            process.wait()
    known = [rate for rate in by_method.values() if rate is not None]
    total = sum(known) if len(known) == len(runs) else None
    return {"images_per_s": by_method, "total": total, "seconds": time.monotonic() - started}


def ends_of_rounds(events: Sequence[Event]) -> list[float]:
    """When each round's training ended."""
    return [event["time"] for event in events if event["event"] == "phase" and event["phase"] == "train"]


def rates_of(ends: Sequence[Sequence[float]], images: int, window: Window) -> list[float | None]:
    """Images a second of every run, from the moment at which all are warm; None for those with too few rounds since."""
    if not all(len(own) >= window.warm for own in ends):
        return [None] * len(ends)
    begun = max(own[window.warm - 1] for own in ends)
    counted = [[end for end in own if end >= begun] for own in ends]
    return [images * (len(own) - 1) / (own[-1] - own[0]) if len(own) > window.rounds else None for own in counted]


def over_alone(together: Mapping[str, Any], alone: Mapping[str, float | None]) -> float | None:
    """The total rate over that of the same methods one after the other, each with the same number of images."""
    if together.get("total") is None or not all(alone.values()):
        return None
    one_by_one = len(alone) / sum(1 / rate for rate in alone.values() if rate)
    return float(together["total"]) / one_by_one


@contextmanager
def mps() -> Iterator[dict[str, str] | None]:
    """The environment of processes that share the GPU by CUDA MPS; None where it is not installed or does not start."""
    with tempfile.TemporaryDirectory() as place:
        env = {"CUDA_MPS_PIPE_DIRECTORY": f"{place}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{place}/log"}
        for path in env.values():
            Path(path).mkdir()
        whole_env = {**os.environ, **env}
        try:
            subprocess.run([MPS, "-d"], env=whole_env, check=True, capture_output=True, timeout=20)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"no CUDA MPS: {error}", flush=True)
            yield None
            return
        try:
            yield env
        finally:
            subprocess.run([MPS], input=b"quit\n", env=whole_env, check=False, capture_output=True, timeout=60)


def together(
    command: Command, methods: Sequence[str], images: int, window: Window, folder: Path, gpu: bool
) -> dict[str, Any]:
    """Every method alone, then all at once."""
    found: dict[str, Any] = {"images_a_round": images}
    alone: dict[str, float | None] = {}
    for method in methods:
        alone[method] = rates(command, [method], images, window, folder / f"alone-{method}", {}).get("total")
        show(f"{method} alone", f"{alone[method] or 0:.0f} images/s")
    found["alone"] = alone
    found["processes"] = _all_at_once(command, methods, images, window, folder / "processes", {}, alone)
    if gpu:
        with mps() as env:
            if env is not None:
                found["mps"] = _all_at_once(command, methods, images, window, folder / "mps", env, alone)
    return found


def _all_at_once(
    command: Command,
    methods: Sequence[str],
    images: int,
    window: Window,
    folder: Path,
    env: Mapping[str, str],
    alone: Mapping[str, float | None],
) -> dict[str, Any]:
    found = rates(command, methods, images, window, folder, env)
    found["over_alone"] = over_alone(found, alone)
    show(f"{len(methods)} runs, {folder.name}", json.dumps(found))
    return found


# the command --------------------------------------------------------------------------------------------------
def images_a_round(command: Command) -> tuple[int, int]:
    """(images of a round of the first task, all epochs counted; the recipe's own rounds a task)"""
    from everfed.recipe import read
    from everfed.session import assemble

    recipe = read(command.recipe, sets=[*command.sets, 'engine.device="cpu"', 'engine.kind="eager"'])
    stream = assemble(recipe, None if command.data is None else str(command.data)).stream
    samples = sum(len(stream.data(client, 0)) for client in stream.round(0).participants)
    return samples * recipe.train.local_epochs, recipe.train.rounds_per_task


def show(what: str, value: str) -> None:
    print(f"{what}: {value}", flush=True)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["whole", "together"])
    parser.add_argument("--recipe", default="fedgp/table1-cifar100")
    parser.add_argument("--method", default="fedavg", help="of the whole run")
    parser.add_argument("--methods", default="fedavg,fedprox,der,ewc", help="that run together")
    parser.add_argument("--rounds", type=int, default=5, help="a task, of the whole run")
    parser.add_argument("--warm", type=int, default=6, help="rounds before rates are taken")
    parser.add_argument("--window", type=int, default=3, help="rounds over which rates are taken")
    parser.add_argument("--limit", type=float, default=70.0, help="seconds for each measurement of rates")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    data = given.data or (Path(os.environ["EVERFED_DATA"]) if "EVERFED_DATA" in os.environ else None)
    command = Command(given.recipe, (f'engine.device="{given.device}"', *given.sets), data)
    images, full = images_a_round(command)
    found: dict[str, Any] = {"recipe": given.recipe, "sets": list(command.sets), "machine": machine()}
    with tempfile.TemporaryDirectory() as place:
        if given.only != "together":
            found["whole"] = whole(command, given.method, given.rounds, full, Path(place) / "whole")
            show("whole run", json.dumps(found["whole"], indent=1))
            write(found, given.out)
        if given.only != "whole":
            window = Window(given.warm, given.window, given.limit)
            methods = given.methods.split(",")
            found["together"] = together(command, methods, images, window, Path(place), given.device != "cpu")
    write(found, given.out)
    return found


if __name__ == "__main__":
    main()
