"""What a table costs on one GPU, in one sitting: rounds and what each piece brings to them, MFCL's generator, what a
run takes beside its rounds, and what several runs together gain.

rounds: FedAvg of three networks, with everything and without each piece (a kernel, several steps in one graph) in
turns, and fedgp+der beside it. generator: a step of MFCL's generator at the paper's size, with and without the kernels.
whole: one command from start to result, split into start-up, rounds, first rounds (capture, choice of kernels and of
slots), scoring, checkpoints and the end, against the same number of warm rounds. together: several methods as
processes, under CUDA MPS where it is installed, in images a second, against each of them alone.

No part begins after --minutes; what was found is written after every part.

python -m benchmarks.gpu_table [--only "rounds mcmahan-b32,whole"] [--data DIR] [--rounds 5] [--device cpu] [--toy]
                               [--out FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import machine, write

if TYPE_CHECKING:
    from everfed.session import Run

Event = dict[str, Any]
POLL = 0.1
PARTS = ("rounds", "generator", "whole", "together")

# what can be left out: a name in a module, and what stands there without it
PIECES: dict[str, tuple[str, str, Any]] = {
    "batchnorm": ("everfed.models.fused", "batchnorm", None),
    "pooling": ("everfed.models.fused", "pooling", None),
    "thin": ("everfed.models.convolution", "thin", None),
    "convolution": ("everfed.models.convolution", "many", None),
    "dense": ("everfed.models.fused", "dense", None),
    "loss": ("everfed.core.stream", "loss_kernel", None),
    "sgd": ("everfed.core.replica", "sgd_kernel", None),
    "rows": ("everfed.core.data", "rows_kernel", None),
    "several steps": ("everfed.engines.captured_steps", "OFTEN", sys.maxsize),
}
OF_CASE = {
    "resnet18-b32": ("batchnorm", "convolution", "thin", "sgd"),
    "resnet18-b128": ("batchnorm", "convolution", "thin", "sgd"),
    "mcmahan-b32": ("pooling", "thin", "loss", "sgd", "rows", "several steps"),
    "small-b32": ("pooling", "thin", "dense", "sgd", "several steps"),
}
TOY = {"clients": 2, "per_client": 6, "batch": 4, "epochs": 1, "model": "small-cnn"}  # in place of a case's own


# rounds -------------------------------------------------------------------------------------------------------
@contextmanager
def without(piece: str | None) -> Iterator[None]:
    """Inside, everfed does without one of its PIECES, or has all. Kernels are chosen when a step is captured."""
    if piece is None:
        yield
        return
    module, name, off = PIECES[piece]
    place = importlib.import_module(module)
    before = getattr(place, name)
    setattr(place, name, off)
    try:
        yield
    finally:
        setattr(place, name, before)


def new_engine(run: Run, device: str, like: Any = None, precision: str = "bf16") -> Any:
    """like: an engine that has found its numbers of slots and threads; the new one takes them over."""
    from everfed.engines.eager import Eager
    from everfed.engines.graphs import Graphs
    from everfed.store.clients import ClientStore

    if device == "cpu":
        return Eager(run.setup, ClientStore(), run.build_module)
    known = {} if like is None else {"slots": like.tuner.used.slots, "host_threads": like.tuner.used.threads}
    return Graphs(run.setup, ClientStore(), run.build_module, device, precision, **known)


def rounds_of(name: str, device: str, warm: int, rounds: int, toy: bool) -> dict[str, Any]:
    """Median seconds of a round of each contender, and fedgp+der and each missing piece over fedavg, turn by turn."""
    from benchmarks.gpu_rounds import (
        CASES,
        ROUNDS,
        TIMED_SECONDS,
        WARM_SECONDS,
        build,
        round_of,
        seconds,
        set_precision,
        turns,
        warm_up,
    )

    case = {**CASES[name], **(TOY if toy else {})}
    precision = set_precision(case)
    contenders: dict[str, tuple[str, str | None]] = {"fedavg": ("fedavg", None), "fedgp+der": ("fedgp+der", None)}
    contenders |= {f"without {piece}": ("fedavg", piece) for piece in OF_CASE[name]}
    runs: dict[str, Any] = {}
    engines: dict[str, Any] = {}
    last: dict[str, float] = {}
    for contender, (method, piece) in contenders.items():
        run = build(case, method, ROUNDS)
        with without(piece):
            first = engines.get("fedavg")
            engines[contender] = new_engine(run, device, first, precision)
            runs[contender] = round_of(run, engines[contender])
            least = warm if first is None else min(2, warm)  # the first one also searches for its number of slots
            last[contender] = warm_up(runs[contender], engines[contender], least, 0.0 if toy else WARM_SECONDS)
        show(f"{name}, {contender}", f"warm, last round {last[contender]:.4f} s")
    times: dict[str, list[float]] = {contender: [] for contender in contenders}
    for _ in range(turns(rounds, min(last.values()), 0.0 if toy else TIMED_SECONDS)):
        for contender, (_, piece) in contenders.items():
            with without(piece):
                times[contender].append(seconds(runs[contender]))
    found = {
        contender: {
            "median_s": statistics.median(own),
            "spread_s": [min(own), max(own)],
            "rounds": len(own),
            "over_fedavg": statistics.median(a / b for a, b in zip(own, times["fedavg"], strict=True)),
            "engine": engines[contender].describe(),
        }
        for contender, own in times.items()
    }
    images = case.get("clients", 10) * case["per_client"] * case["epochs"]
    for contender, row in found.items():
        row["images_per_s"] = images / row["median_s"]
        show(f"{name}, {contender}", f"{row['median_s']:.4f} s, {row['over_fedavg']:.3f} times fedavg")
        engines[contender].close()
    return found


def generator(device: str, steps: int, toy: bool) -> dict[str, float]:
    """Milliseconds of a step of MFCL's generator: 128 images of 32 x 32 from 1,000 numbers, ResNet-18, 100 classes."""
    from benchmarks.gpu_rounds import seconds

    found: dict[str, float] = {}
    for piece in (None, "batchnorm"):
        with without(piece):
            run = generator_training(device, toy)
            run(steps)  # captures
            found["all pieces" if piece is None else f"without {piece}"] = 1000 * seconds(partial(run, steps)) / steps
    show("ms a step of MFCL's generator", json.dumps(found))
    return found


def generator_training(device: str, toy: bool) -> Callable[[int], object]:
    """A function that trains a generator for a number of steps."""
    import torch

    from benchmarks.gpu_rounds import CASES, build
    from everfed.core.replica import initial_weights
    from everfed.engines.captured_steps import LoopingTrainer
    from everfed.engines.eager import new_trainer
    from everfed.methods.generative.inversion import GeneratorTraining, Inversion
    from everfed.models.generators import GeneratorBlueprint

    run = build({**CASES["resnet18-b128"], **(TOY if toy else {})}, "fedavg", 1)
    blueprint = GeneratorBlueprint((3, 32, 32), 16 if toy else 1000, toy)
    precision, kind = ("fp32", None) if device == "cpu" else ("bf16", LoopingTrainer)
    how = (device, precision, *([] if kind is None else [kind]))
    trainer = new_trainer(run.setup, run.build_module, *how)
    training = GeneratorTraining(trainer, blueprint, Inversion(batch=4 if toy else 128))
    first = {k: v.to(trainer.device) for k, v in initial_weights(blueprint, 0).items()}
    moments = training.optimizer.init(first["params"])
    seen = torch.ones(trainer.stream.classes, dtype=torch.bool)
    return lambda steps: training.run(trainer.replica.model(), first, moments, seen, steps, 0)


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


def together(
    command: Command, methods: Sequence[str], images: int, window: Window, folder: Path, gpu: bool
) -> dict[str, Any]:
    """Every method alone, then all at once."""
    from everfed.experiments import mps

    found: dict[str, Any] = {"images_a_round": images}
    alone: dict[str, float | None] = {}
    for method in methods:
        alone[method] = rates(command, [method], images, window, folder / f"alone-{method}", {}).get("total")
        show(f"{method} alone", f"{alone[method] or 0:.0f} images/s")
    found["alone"] = alone
    with mps.private(partial(print, flush=True)) if gpu else nullcontext() as env:
        name = "processes" if env is None else "mps"
        found[name] = _all_at_once(command, methods, images, window, folder / name, env or {}, alone)
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
    parser.add_argument(
        "--only",
        default=",".join(PARTS),
        help="parts, or single ones such as 'rounds mcmahan-b32', with commas between",
    )
    parser.add_argument("--minutes", type=float, default=4.0, help="after which no part begins")
    parser.add_argument("--steps", type=int, default=100, help="of MFCL's generator")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--recipe", default="fedgp/table1-cifar100")
    parser.add_argument("--method", default="fedavg", help="of the whole run")
    parser.add_argument("--methods", default="fedavg,fedprox,der,ewc", help="that run together")
    parser.add_argument("--rounds", type=int, default=5, help="a task, of the whole run")
    parser.add_argument("--warm", type=int, default=8, help="rounds before rates are taken")
    parser.add_argument("--window", type=int, default=3, help="rounds over which rates are taken")
    parser.add_argument("--limit", type=float, default=70.0, help="seconds for each measurement of rates")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    data = given.data or (Path(os.environ["EVERFED_DATA"]) if "EVERFED_DATA" in os.environ else None)
    command = Command(given.recipe, (f'engine.device="{given.device}"', *given.sets), data)
    only = given.only.split(",")
    parts = [*PARTS, *(f"rounds {name}" for name in OF_CASE)]
    if unknown := set(only) - set(parts):
        parser.error(f"--only {', '.join(sorted(unknown))}: the parts are {', '.join(parts)}")
    if given.device != "cpu":
        from everfed import engines

        engines._set_precision("bf16")  # as for every run on a GPU
    started = time.monotonic()
    found: dict[str, Any] = {"recipe": given.recipe, "sets": list(command.sets), "machine": machine(), "left_out": []}
    with tempfile.TemporaryDirectory() as place:
        for name, measure in _measurements(given, command, Path(place)).items():
            if name not in only and name.partition(" ")[0] not in only:
                continue
            if time.monotonic() - started > 60 * given.minutes:
                found["left_out"].append(name)
                continue
            found[name] = measure()
            found["seconds"] = time.monotonic() - started
            write(found, given.out)
    show("all of it", f"{found.get('seconds', 0):.0f} s; left out: {', '.join(found['left_out']) or 'nothing'}")
    write(found, given.out)
    return found


def _measurements(given: argparse.Namespace, command: Command, place: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is measured, the most important first."""

    def all_together() -> dict[str, Any]:
        window = Window(given.warm, given.window, given.limit)
        methods, images = given.methods.split(","), images_a_round(command)[0]
        return together(command, methods, images, window, place, given.device != "cpu")

    def whole_run() -> dict[str, Any]:
        found = whole(command, given.method, given.rounds, images_a_round(command)[1], place / "whole")
        show("whole run", json.dumps(found, indent=1))
        return found

    of_rounds = {
        f"rounds {name}": partial(rounds_of, name, given.device, given.warm, given.window, given.toy)
        for name in OF_CASE
    }
    one = {"generator": partial(generator, given.device, given.steps, given.toy)}
    return {**of_rounds, **one, "whole": whole_run, "together": all_together}


if __name__ == "__main__":
    main()
