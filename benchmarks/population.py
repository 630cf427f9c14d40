"""Time a round, memory and start-up against the number of clients, ten of which take part in a round.

python -m benchmarks.population [--clients 100 1000 10000] [--rounds 15] [--budget-mib 32] [--method fedgp+der]

Every population is a process of its own, all stay alive, and their rounds alternate. Every client has taken part before
(its buffer of 200 lies in the store), so that a round pages the states of its ten clients in and others out. Writes
population.json, population.md and population.png into benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import measure

RESULTS = Path(__file__).parent / "results"
TAKING_PART, PER_CLIENT, BUFFER = 10, 60, 200


class Population:
    """The driver's side of one population's process."""

    def __init__(self, clients: int, options: argparse.Namespace, folder: str) -> None:
        self.clients = clients
        arguments = ["--inside", str(clients), folder, str(options.budget_mib), options.method]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.population", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, what: str) -> dict[str, Any]:
        """`what`: "start", "fill", "round", "checkpoint"."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(what, file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def __enter__(self) -> Population:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Inside:
    """One population: built at "start", then asked for rounds."""

    def __init__(self, clients: int, folder: Path, budget: int, method: str) -> None:
        self.clients, self.folder, self.budget, self.method = clients, folder, budget, method

    def start(self) -> dict[str, Any]:
        """Everything up to the first round: imports, data, division among clients, model, engine."""
        started = time.perf_counter()
        import torch

        from benchmarks import synthetic
        from everfed.core.evaluate import EvalOptions
        from everfed.core.server import Runner
        from everfed.engines.eager import Eager
        from everfed.recipe import Recipe
        from everfed.session import assemble
        from everfed.store.checkpoint import Checkpoints
        from everfed.store.clients import ClientStore

        torch.set_num_threads(1)
        table = {"method": {"name": self.method, "memory": {"size": BUFFER}}, "model": {"kind": "small-cnn"}}
        recipe = Recipe.model_validate({**table, "train": {"rounds_per_task": 10_000}})
        share = TAKING_PART / self.clients
        stream = synthetic.stream("mnist", self.clients, PER_CLIENT, 10_000, participation=share)
        run = assemble(recipe, stream=stream)
        self.store = ClientStore(self.folder / "clients", self.budget)
        self.checkpoints = Checkpoints(self.folder / "checkpoint", self.store, every=0.0)
        engine = Eager(run.setup, self.store, run.build_module)
        self.runner = Runner(run.setup, engine, run.first_model(), EvalOptions())
        return {"startup_s": time.perf_counter() - started, **self._memory()}

    def fill(self) -> dict[str, Any]:
        """One round, then everybody gets the state of its first client: as after many rounds."""
        self.runner.round()
        state = self.store.get(self.store.clients()[0])
        assert state is not None
        started = time.perf_counter()
        for client in range(self.clients):
            self.store.put(client, state)
        return {"fill_s": time.perf_counter() - started, "state_bytes": self.store.bytes(), **self._memory()}

    def round(self) -> dict[str, Any]:
        timing = measure.timed(measure.Contender(self.runner.round))
        return {"seconds": timing.seconds, "cpu": timing.cpu, "others": timing.others, **self._memory()}

    def checkpoint(self) -> dict[str, Any]:
        """What a run waits for (the snapshot), and what its writing thread does meanwhile."""
        started = time.perf_counter()
        self.checkpoints.offer(self.runner.state, must=True)
        offered = time.perf_counter()
        self.checkpoints.wait()
        return {"waited_s": offered - started, "written_s": time.perf_counter() - offered}

    def _memory(self) -> dict[str, int]:
        return {"resident_bytes": measure.resident(os.getpid()), "hot_bytes": self.store.hot_bytes()}


def run_inside(clients: int, folder: Path, budget: int, method: str) -> None:
    """Answer the driver, a line for a line."""
    population = Inside(clients, folder, budget, method)
    for line in sys.stdin:
        print(json.dumps(getattr(population, line.strip())()), flush=True)


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        populations = [
            stack.enter_context(Population(count, options, str(folder / str(count)))) for count in options.clients
        ]
        rows = [
            {"clients": p.clients, "start": p.ask("start"), "fill": p.ask("fill"), "rounds": []} for p in populations
        ]
        for p in populations:
            p.ask("checkpoint")  # the first one writes what filling left behind
            p.ask("round")
        for _ in range(options.rounds):
            for row, population in zip(rows, populations, strict=True):
                row["rounds"].append(population.ask("round"))
        for row, population in zip(rows, populations, strict=True):
            row["checkpoint"] = population.ask("checkpoint")
    return [_summary(row, rows[0]) for row in rows]


def _summary(row: dict[str, Any], smallest: dict[str, Any]) -> dict[str, Any]:
    def ratio(of: str) -> dict[str, float]:
        return measure.spread([a[of] / b[of] for a, b in zip(row["rounds"], smallest["rounds"], strict=True)])

    last = row["rounds"][-1]
    return {
        "clients": row["clients"],
        "startup_s": row["start"]["startup_s"],
        "round_s": measure.spread([r["seconds"] for r in row["rounds"]]),
        "round_cpu_s": measure.spread([r["cpu"] for r in row["rounds"]]),
        "cores_used_by_others": measure.spread([r["others"] for r in row["rounds"]]),
        "ratio_clock": ratio("seconds"),
        "ratio_cpu": ratio("cpu"),
        "state_bytes": row["fill"]["state_bytes"],
        "hot_bytes": last["hot_bytes"],
        "resident_at_start_bytes": row["start"]["resident_bytes"],
        "resident_bytes": last["resident_bytes"],
        "checkpoint": row["checkpoint"],
    }


COLUMNS = (
    *("clients", "start-up", "CPU time a round", "ratio, CPU time", "ratio, clock"),
    *("states", "of them in memory", "resident at start", "resident", "checkpoint: waited, written"),
)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(_cells, rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cells(row: dict[str, Any]) -> list[str]:
    def mib(key: str) -> str:
        return f"{row[key] / 2**20:,.0f} MiB"

    def middle(key: str, digits: int) -> str:
        found = row[key]
        return f"{found['median']:.{digits}f} ({found['q1']:.{digits}f} to {found['q3']:.{digits}f})"

    saved = row["checkpoint"]
    return [
        f"{row['clients']:,}",
        f"{row['startup_s']:.1f} s",
        middle("round_cpu_s", 3) + " s",
        middle("ratio_cpu", 2),
        middle("ratio_clock", 2),
        *(mib(key) for key in ("state_bytes", "hot_bytes", "resident_at_start_bytes", "resident_bytes")),
        f"{1e3 * saved['waited_s']:.0f} ms, {1e3 * saved['written_s']:.0f} ms",
    ]


def plot(rows: list[dict[str, Any]], budget: int, path: Path) -> None:
    """Time a round and memory against the population."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    clients = [row["clients"] for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    middle, low, high = ([row["round_cpu_s"][key] for row in rows] for key in ("median", "q1", "q3"))
    left.plot(clients, middle, "o-", color="tab:blue")
    left.fill_between(clients, low, high, alpha=0.2, color="tab:blue")
    left.set(xscale="log", ylim=(0, 1.5 * max(high)), xlabel="clients", ylabel="CPU seconds a round")
    series = {"all states": "state_bytes", "states in memory": "hot_bytes", "process": "resident_bytes"}
    for (label, key), marker in zip(series.items(), "s^o", strict=True):
        right.plot(clients, [row[key] / 2**20 for row in rows], f"{marker}-", label=label)
    right.axhline(budget / 2**20, color="grey", linestyle=":", label="budget of the store")
    right.set(xscale="log", yscale="log", xlabel="clients", ylabel="MiB")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    left.set_title("ten clients take part", loc="left", fontsize=10)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget-mib", type=int, default=32)
    parser.add_argument("--method", default="fedgp+der")
    parser.add_argument("--folder", type=Path, help="where client states are paged to (default: the temporary folder)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--inside", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        clients, folder, budget, method = options.inside
        run_inside(int(clients), Path(folder), int(budget) << 20, method)
        return
    rows = measure_all(options)
    settings = {"method": options.method, "buffer": BUFFER, "images_per_client": PER_CLIENT, "taking_part": TAKING_PART}
    result = {"machine": measure.machine(), **settings, "budget_mib": options.budget_mib, "populations": rows}
    print(table(rows))
    measure.write(result, options.out / "population.json")
    (options.out / "population.md").write_text(table(rows) + "\n")
    plot(rows, options.budget_mib << 20, options.out / "population.png")


if __name__ == "__main__":
    main()
