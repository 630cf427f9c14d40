"""The processes engine equals the eager one bit for bit, for every preset, and says who died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from everfed.core import tree
from everfed.core.context import Place, Setup, TrainOptions
from everfed.core.engine import ClientError
from everfed.core.optimizer import Optimizer
from everfed.engines.processes import Processes
from everfed.store.clients import ClientStore
from tests.support.presets import each_kind
from tests.support.toy import Bench, Norm, Outcome, Toy, comparable


def on_processes(bench: Bench, workers: int = 2) -> Outcome:
    engines: list[Processes] = []

    def build(setup: Setup, store: ClientStore) -> Processes:
        engines.append(Processes(setup, store, bench.build_module, workers))
        return engines[0]

    try:
        return bench.run(build)
    finally:
        engines[0].close()


def bench(method: str, **changes: object) -> Bench:
    stream = Toy(clients=4, sizes={(1, 0): 3, (2, 1): 20, (3, 0): 0}, augmented=True)
    return Bench(method, stream=stream, module=Norm, train=TrainOptions(1, 5, Optimizer(lr=0.1))).change(**changes)


@pytest.mark.parametrize("method", each_kind())
def test_processes_equal_eager(method: str) -> None:
    case = bench(method)
    eager, result = case.run(), on_processes(case)
    assert tree.equal(comparable(result.state), comparable(eager.state))
    for client, state in eager.clients.items():
        assert tree.equal(result.clients[client], state)


def test_the_number_of_workers_does_not_matter() -> None:
    """One for all four clients, and more than there are clients; above there are two."""
    case = bench("fedgp+der", train=TrainOptions(1, 5, Optimizer("adam", lr=0.01, state="kept"), sync_every=2))
    eager = case.run()
    for workers in (1, 6):
        assert torch.equal(on_processes(case, workers).params, eager.params)


def test_replies_are_handed_on_in_client_order_whoever_ran_first() -> None:
    """One worker runs the largest client first once it knows the sizes: client 2, then 1, then 0."""
    case = Bench(stream=Toy(sizes={(0, 0): 2, (1, 0): 10, (2, 0): 30}))
    setup = case.setup()
    engine = Processes(setup, ClientStore(), case.build_module, 1)
    message = {"model": dict(case.model())}
    try:
        for index in range(2):
            place = Place(index, case.stream.round(index))
            replies = engine.exchange(setup.method.train_phase(), (0, 1, 2), message, place)
            assert [(client, reply.samples) for client, reply in replies] == [(0, 2), (1, 10), (2, 30)]
    finally:
        engine.close()


def test_a_fault_in_a_client_names_it() -> None:
    # one sample is too few for BatchNorm over 1 x 1 maps; any error of the client's code will do
    case = bench("fedavg", module=lambda shape, classes: torch.nn.Linear(3, classes))
    message = r"client \d failed in phase 'train' of round 1: RuntimeError: .* \(.*\.py, line \d+, in \w+\)"
    with pytest.raises(ClientError, match=message):
        on_processes(case)


def test_no_worker_can_be_ended_by_ctrl_c_however_young() -> None:
    """SIGINT is blocked or ignored from birth on (a terminal sends it to all processes of a command); of the parent it
    is not blocked."""
    case = bench("fedavg")
    engine = Processes(case.setup(), ClientStore(), case.build_module, 3)
    try:
        status = [Path(f"/proc/{crew.process.pid}/status").read_text() for crew in engine.crews]
    finally:
        engine.close()
    for text in status:
        masks = dict(line.split(":\t") for line in text.splitlines() if line.startswith("Sig"))
        assert (int(masks["SigBlk"], 16) | int(masks["SigIgn"], 16)) & 1 << (signal.SIGINT - 1)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


INTERRUPTED_FORK = """
import os, signal, sys, threading

armed = []


def ctrl_c():
    if armed:
        armed.clear()
        os.kill(os.getpid(), signal.SIGINT)


os.register_at_fork(before=ctrl_c)
signal.signal(signal.SIGINT, signal.default_int_handler)
from everfed.engines.processes import Processes
from everfed.store.clients import ClientStore
from tests.support.toy import Bench

bench = Bench()
if "beside" in sys.argv:  # another thread takes the signal where this one blocks it
    threading.Thread(target=threading.Event().wait, daemon=True).start()
armed.append(True)
try:
    Processes(bench.setup(), ClientStore(), bench.build_module, 2)
except KeyboardInterrupt:
    sys.exit(7)
"""


@pytest.mark.parametrize("thread", ["alone", "beside"])
def test_a_ctrl_c_during_a_fork_is_not_lost(thread: str) -> None:
    """Python runs hooks around a fork (logging has some) and drops what they raise, so the first thing that runs after
    a signal that arrived meanwhile must not be such a hook."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", INTERRUPTED_FORK, thread]
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True)
    assert ended.returncode == 7, ended.stderr.decode()


def test_a_killed_worker_is_named() -> None:
    case = bench("fedavg")
    setup = case.setup()
    engine = Processes(setup, ClientStore(), case.build_module, 2)
    os.kill(engine.crews[0].process.pid or 0, signal.SIGKILL)
    engine.crews[0].process.join()
    with pytest.raises(
        ClientError, match=r"client \d failed in phase 'train' of round 1: worker process \d+ was killed"
    ):
        case.run(lambda setup, store: engine)
    engine.close()
