"""`everfed bench`: the engines of this machine side by side."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everfed.commands import options
from everfed.errors import RecipeError
from everfed.naming import split_names

if TYPE_CHECKING:
    from everfed.core.engine import Engine
    from everfed.core.server import Runner
    from everfed.recipe import EngineSection
    from everfed.session import Run

ENGINES = ("eager", "processes", "graphs")  # the others are compared with the first
WARM_UP = {"graphs": 8}  # rounds in which it captures its steps and tunes the number of slots
# FedAvg with ten clients on random images: shape, images per client, local epochs, model
BUILT_IN: dict[str, tuple[tuple[int, ...], int, int, dict[str, Any]]] = {
    "demo": ((1, 8, 8), 144, 5, {"kind": "mlp", "hidden": [100, 100]}),
    "mcmahan": ((1, 28, 28), 600, 1, {"kind": "mcmahan-cnn"}),
    "resnet18": ((3, 32, 32), 500, 5, {"kind": "resnet18"}),
}
COLUMNS = ("case", "engine", "start", "a round (quartiles)", "samples/s", f"times {ENGINES[0]} (quartiles)")


def bench(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A TOML file or a shipped recipe, else built-in cases.")
    ] = None,
    cases: Annotated[
        str | None, typer.Option(metavar="C,C,...", help=f"Built-in cases: {', '.join(BUILT_IN)}.")
    ] = None,
    engines: Annotated[
        str | None, typer.Option(metavar="E,E,...", help="Engines (default: all that this machine can run).")
    ] = None,
    method: Annotated[str | None, typer.Option(metavar="M", help="Another method than the recipe's own.")] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Timed rounds of each engine.")] = 5,
    sets: options.Sets = [],  # noqa: B006 (typer copies it)
    data: options.Data = None,
    scale: options.Scale = 1.0,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File for the numbers.")] = Path("runs/bench.json"),
    as_json: options.Json = False,
) -> None:
    """Time rounds in every engine this machine can run, and print how many times faster than eager each is.

    All engines do the same arithmetic on the same clients, so ratios compare:
    "2.0 times eager" means that an experiment takes half the time. Give it your
    recipe to see which engine.kind is fastest for your model (the default,
    auto, makes that choice by itself). Without a recipe it times FedAvg with
    ten clients on random images: a small MLP, bound by overhead, and the CNN of
    the FedAvg paper, bound by arithmetic; on a GPU ResNet-18, too.

    A round includes extra phases and the scoring at a task's end. Engines are
    warmed up first; the time to start them is a column of its own. Other work
    on the machine distorts the numbers, so the load average is printed below
    the table.

    \b
    Examples:
      everfed bench
      everfed bench demo --method fedgp+der --rounds 10
      everfed bench my.toml --engines eager,processes --set engine.workers=4
      everfed bench --cases mcmahan --set engine.device=cpu --out bench.json
    """
    import torch

    torch.set_num_threads(1)
    machine = _machine()  # the load before the benchmark
    rows: list[dict[str, Any]] = []
    for name, run in _assemblies(recipe, cases, method, sets, options.absolute(data), scale):
        rows += _side_by_side(name, run, _engines(engines, run.recipe.engine), rounds)
    result = {"machine": machine, "timed_rounds": rounds, "rows": rows}
    _print_result(result, as_json)  # before writing, which may fail
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    if not as_json:
        typer.echo(f"written to {out}")


def _print_result(result: dict[str, Any], as_json: bool) -> None:
    from everfed.commands.output import show_table

    if as_json:
        typer.echo(json.dumps({"event": "bench", **result}))
        return
    machine = result["machine"]
    show_table(COLUMNS, [_cells(row) for row in result["rows"]])
    typer.echo(f"load average {machine['load_average']:.1f} on {machine['cores']} cores")


# cases -----------------------------------------------------------------------------------------------------------


def _assemblies(
    recipe: str | None, cases: str | None, method: str | None, sets: Sequence[str], data: Path | None, scale: float
) -> Iterator[tuple[str, Run]]:
    """Name and pieces of each case."""
    from everfed.recipe import placed, read_placed, scaled
    from everfed.session import assemble

    if recipe is None:
        for name in _names(cases, BUILT_IN, "--cases") or _usual_cases(sets):
            yield name, _built_in(name, method or "fedavg", sets)
        return
    if cases is not None:
        raise RecipeError(f"--cases {cases}: built-in cases do not go with a recipe; leave out {recipe} or --cases")
    reading = read_placed(recipe, method=method, sets=sets)
    with placed(reading.places):
        yield reading.recipe.name, assemble(scaled(reading.recipe, scale), None if data is None else str(data), scale)


def _usual_cases(sets: Sequence[str]) -> list[str]:
    """All of them on a GPU; a round of ResNet-18 takes minutes on a CPU."""
    from everfed import engines
    from everfed.recipe import from_table

    recipe = from_table(_with_sets({"name": "bench", "method": {"name": "fedavg"}}, sets))
    gpu = engines.device(recipe.engine).type == "cuda"
    return [name for name in BUILT_IN if gpu or name != "resnet18"]


def _built_in(name: str, method: str, sets: Sequence[str]) -> Run:
    import numpy as np

    from everfed import streams
    from everfed.recipe import from_table
    from everfed.session import assemble

    shape, per_client, epochs, model = BUILT_IN[name]
    train = {"rounds_per_task": 10_000, "local_epochs": epochs, "batch_size": 32}
    recipe = from_table(_with_sets({"name": name, "method": {"name": method}, "model": model, "train": train}, sets))
    x = np.random.default_rng(0).integers(0, 256, (10 * per_client, *shape), dtype=np.uint8)
    y = np.arange(len(x)) % 10
    stream = streams.from_arrays(
        *(x, y, x[:100], y[:100]),
        scenario="class-incremental",
        tasks=1,
        clients=10,
        rounds_per_task=recipe.train.rounds_per_task,
    )
    return assemble(recipe, stream=stream)


def _with_sets(table: dict[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """A recipe's table with `--set` on top. The stream of a built-in case is fixed."""
    from everfed.recipe import parse_set

    for setting in map(parse_set, sets):
        *path, last = setting.key
        if path[:1] == ["stream"]:
            raise RecipeError(f"{setting.option}: the stream of a built-in case is fixed; name a recipe")
        inner = table
        for key in path:
            if not isinstance(inner.setdefault(key, {}), dict):
                raise RecipeError(f"{setting.option}: {key} is not a table")
            inner[key] = dict(inner[key])
            inner = inner[key]
        inner[last] = setting.value
    return table


def _engines(listed: str | None, section: EngineSection) -> list[str]:
    """The engines to time; the reference comes first."""
    from everfed import engines

    on_cpu = ["processes"] if engines.cores() > 1 else []
    usual = ["graphs"] if engines.device(section).type == "cuda" else on_cpu
    names = list(dict.fromkeys([ENGINES[0], *(_names(listed, ENGINES, "--engines") or usual)]))
    for name in names:
        engines.check(section.model_copy(update={"kind": name}))
    return names


def _names(text: str | None, allowed: Collection[str], option: str) -> list[str]:
    """The names of a list on the command line; none when there is no list."""
    names = split_names(text)
    for name in names:
        if name not in allowed:
            raise RecipeError(f"{option} {name}: allowed are {', '.join(allowed)}")
    return names


# timing ----------------------------------------------------------------------------------------------------------


class _Lane:
    """One engine with a run of its own, and its timings."""

    def __init__(self, name: str, run: Run, stack: ExitStack) -> None:
        from everfed import engines
        from everfed.core.option import EvalOptions
        from everfed.core.server import Runner
        from everfed.core.tree import on_device
        from everfed.store.clients import ClientStore

        section = run.recipe.engine.model_copy(update={"kind": name})
        started = time.perf_counter()
        engine: Engine = engines.build(section, run.setup, ClientStore(), run.build_module, lambda event: None)
        stack.enter_context(closing(engine))
        self.name, self.start = name, time.perf_counter() - started
        self.device = engines.device(section)
        model = on_device(run.first_model(), self.device)
        options = run.recipe.eval.as_options(EvalOptions)
        self.runner: Runner = Runner(run.setup, engine, model, options)
        self.seconds: list[float] = []
        self.samples: list[int] = []

    def round(self) -> None:
        samples, started = self.runner.state.samples, time.perf_counter()
        self.runner.round()
        self._finish()
        self.seconds.append(time.perf_counter() - started)
        self.samples.append(self.runner.state.samples - samples)

    def warm_up(self) -> None:
        """Rounds that are not timed; the first one counts as start-up time."""
        for _ in range(WARM_UP.get(self.name, 1)):
            self.round()
        self.start += self.seconds[0]
        self.seconds, self.samples = [], []

    def _finish(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)


def _side_by_side(case: str, run: Run, names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """A row for each engine."""
    there, needed = run.stream.rounds, rounds + max(WARM_UP.get(name, 1) for name in names)
    if there < needed:
        raise RecipeError(
            f"{case} has {there} rounds, but timing {rounds} after warming up needs {needed}: lower --rounds, or raise "
            "--set train.rounds_per_task=..."
        )
    with ExitStack() as stack:
        lanes = [_Lane(name, run, stack) for name in names]
        for lane in lanes:
            lane.warm_up()
        for _ in range(rounds):
            for lane in lanes:
                lane.round()
        return [_row(case, lane, lanes[0]) for lane in lanes]


def _row(case: str, lane: _Lane, reference: _Lane) -> dict[str, Any]:
    faster = [theirs / own for own, theirs in zip(lane.seconds, reference.seconds, strict=True)]
    return {
        "case": case,
        "engine": lane.name,
        "device": str(lane.device),
        "start_s": lane.start,
        "round_s": _spread(lane.seconds),
        "samples_per_s": statistics.median(n / s for n, s in zip(lane.samples, lane.seconds, strict=True)),
        "times_eager": _spread(faster),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * list(values)
    return {"median": middle, "q1": low, "q3": high}


def _machine() -> dict[str, Any]:
    import torch

    from everfed import engines

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    facts = {"machine": platform.machine(), "gpus": gpus, "cores": engines.cores(), "torch": torch.__version__}
    return {**facts, "load_average": os.getloadavg()[0]}


def _cells(row: dict[str, Any]) -> list[str]:
    spent, faster = row["round_s"], row["times_eager"]
    return [
        row["case"],
        row["engine"] if row["device"] == "cpu" else f"{row['engine']} ({row['device']})",
        f"{row['start_s']:.2f} s",
        f"{spent['median']:.4f} s ({spent['q1']:.4f} to {spent['q3']:.4f})",
        f"{row['samples_per_s']:,.0f}",
        f"{faster['median']:.2f} ({faster['q1']:.2f} to {faster['q3']:.2f})",
    ]
