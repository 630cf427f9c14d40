"""Rounds of Flower's simulation, one whenever the driver asks for it (`benchmarks/cpu_rounds.py` does).

Run by the Python of an environment of its own, in which torch and flwr[simulation] are installed:

    python -m benchmarks.flower_rounds CASE WORKERS ROUNDS READ_FD WRITE_FD

A round begins when a byte arrives on READ_FD; its seconds are written to WRITE_FD as a line. A round is everything from
the strategy's configure_train to its aggregate_train; nothing is evaluated.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def main() -> None:
    case, workers, rounds, asked, answer = sys.argv[1], *map(int, sys.argv[2:6])
    os.environ["FLOWER_CASE"] = case

    from flwr.app import ArrayRecord, Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from benchmarks import flower_app

    class OneAtATime(FedAvg):
        """FedAvg that waits to be asked for a round, and says how long it took."""

        def configure_train(self, *arguments: Any, **named: Any) -> Iterable[Any]:
            os.read(asked, 1)
            self.started = time.perf_counter()
            return super().configure_train(*arguments, **named)

        def aggregate_train(self, *arguments: Any, **named: Any) -> tuple[Any, Any]:
            result = super().aggregate_train(*arguments, **named)
            os.write(answer, f"{time.perf_counter() - self.started}\n".encode())
            return result

    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = OneAtATime(fraction_evaluate=0.0, min_available_nodes=flower_app.CLIENTS)
        strategy.start(grid, ArrayRecord(flower_app.build_model().state_dict()), num_rounds=rounds)

    run_simulation(
        server,
        flower_app.app,
        num_supernodes=flower_app.CLIENTS,
        backend_config={
            "init_args": {"num_cpus": workers, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    main()
