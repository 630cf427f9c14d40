"""A federation of real processes on loopback, small enough for a laptop: a SuperLink and clients that can be hurt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from everfed.federation.joining import Joining, children
from everfed.federation.superlink import Settings, running
from everfed.federation.supervisor import Child
from everfed.recipe import Recipe, read
from tests.support.ports import free_port
from tests.support.waiting import HANG

RECIPE = """\
name = "small"

[stream]
dataset = "digits"
transform = "rotate"
tasks = 2
clients = {clients}
max_train = 90
max_test = 40

[model]
kind = "mlp"
hidden = [12]

[train]
rounds_per_task = {rounds}
batch_size = 10
optimizer = {{ kind = "sgd", lr = 0.1 }}

[method]
name = "fedavg"

[engine]
kind = "eager"
"""
# what makes a method small; a recipe's file may also be of another stream
OPTIONS = {
    "fedavg": [],
    "fedgp+der": ["method.memory.size=10"],
    "fedssi": [],
    "coordinated": ["method.memory.size=10"],
    "stamp": [],
    "mfcl": [f"method.mfcl.{name}" for name in ("gen_steps=4", "gen_chunk=2", "gen_batch=8", "syn_batch=4", "z_dim=6")],
}
WAIT = HANG


class Site:
    """One client: its processes, tended by a thread as `everfed join` tends them. without: some of them; env, prefix:
    of every command; start: now, or when `start` is called."""

    def __init__(
        self,
        joining: Joining,
        without: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        start: bool = True,
    ) -> None:
        self.joining, self.folder = joining, joining.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        made = children(joining)
        self.children = [child for child in made if child.name.removeprefix("the ") not in without]
        for child in self.children:
            child.env, child.command = {**child.env, **(env or {})}, [*prefix, *child.command]
        self.said: list[str] = []
        self._ended = threading.Event()
        self._tender = threading.Thread(target=self._tend, daemon=True)
        if start:
            self.start()

    def start(self) -> None:
        self._tender.start()

    def _tend(self) -> None:
        while not self._ended.wait(0.1):
            for child in self.children:
                child.check(self.said.append)

    def child(self, name: str) -> Child:
        return next(child for child in self.children if child.name == f"the {name}")

    def kill(self, name: str) -> int:
        """Kill -9 one of its processes; returns its pid."""
        child = self.child(name)
        until(lambda: child.process is not None)
        pid = child.process.pid  # type: ignore[union-attr]
        os.kill(pid, signal.SIGKILL)
        return pid

    def steps(self) -> list[str]:
        """The steps it has made and still remembers."""
        return sorted(path.name for path in self.folder.glob("*/steps/*.safetensors"))

    def close(self) -> None:
        self._ended.set()
        self._tender.join()
        for child in self.children:
            child.stop(1.0)


class Field:
    """clients: how many. link: keep a SuperLink (else `everfed serve` starts its own at the same port)."""

    def __init__(self, folder: Path, clients: int, link: bool = True) -> None:
        self.folder, self.clients, self.port = folder, clients, free_port()
        self.settings = Settings("127.0.0.1", self.port, folder / "link")
        self.said: list[str] = []
        self._link = running(self.settings, self.said.append) if link else None
        if self._link is not None:
            self._link.__enter__()
        self.sites = {client: Site(self.joining(client)) for client in range(clients)}

    def joining(self, client: int, **changes: Any) -> Joining:
        folder = self.folder / f"c{client}"
        return Joining(f"127.0.0.1:{self.port}", folder, f"site-{client}", client, poll=0.3, **changes)

    def link_pid(self) -> int:
        return int((self.settings.folder / "superlink.pid").read_text())

    def recipe(self, *sets: str, method: str = "fedavg", rounds: int = 1) -> Recipe:
        return small_recipe(self.folder, self.clients, *sets, method=method, rounds=rounds)

    def serve(self, recipe: Recipe, name: str, observe: Callable[[dict[str, Any]], None] = lambda event: None) -> Path:
        """Run the server in this process; returns its run folder."""
        from everfed.federation.flower.link import Address, open_grid
        from everfed.federation.serving import Serving, serve

        out = self.folder / name
        address = Address("127.0.0.1", self.port)
        serve(Serving(recipe, out, checkpoint_every=0.0), lambda: open_grid(address), [observe])
        return out

    def command(self, *words: str) -> subprocess.Popen[bytes]:
        """everfed as a user runs it."""
        with open(self.folder / "command.log", "ab") as log:
            return subprocess.Popen([sys.executable, "-m", "everfed", *words], cwd=self.folder, stdout=log, stderr=log)

    def close(self) -> None:
        for site in self.sites.values():
            site.close()
        if self._link is not None:
            self._link.__exit__(None, None, None)


@contextmanager
def field(folder: Path, clients: int, link: bool = True) -> Iterator[Field]:
    made = Field(folder, clients, link)
    try:
        yield made
    finally:
        made.close()


def small_recipe(folder: Path, clients: int, *sets: str, method: str = "fedavg", rounds: int = 1) -> Recipe:
    """Two tasks of digits, in a file of `folder`."""
    path = folder / f"small-{rounds}.toml"
    path.write_text(RECIPE.format(clients=clients, rounds=rounds))
    return read(path, method=method, sets=[*OPTIONS.get(method, []), *sets])


def expected(folder: Path, method: str) -> dict[str, Any]:
    """What two clients must come to in two tasks of two rounds: the outcome of the simulation."""
    return outcome(simulated(small_recipe(folder, 2, method=method, rounds=2), folder / "run"))


def simulated(recipe: Recipe, out: Path) -> Path:
    """The same recipe in simulation, the reference."""
    import everfed

    everfed.run(recipe, out)
    return out


def outcome(folder: Path) -> dict[str, Any]:
    """What must be equal, bit for bit, however the run went: the model, the scores, the bytes that were counted."""
    result = json.loads((folder / "result.json").read_text())
    counted = {name: result["cost"][name] for name in ("rounds", "samples", "bytes_up", "bytes_down", "bytes_by_part")}
    return {
        "model": (folder / "model.safetensors").read_bytes(),
        "matrix": result["accuracy_matrix"],
        "cost": counted,
    }


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    with suppress(OSError), open(folder / "events.jsonl") as file:
        lines = [json.loads(line) for line in file if line.endswith("\n")]
    return [event for event in lines if event["event"] == kind]


def until(true: Callable[[], Any], seconds: float = WAIT, what: str = "") -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited {seconds} s {what}"
        time.sleep(0.05)


# processes --------------------------------------------------------------------------------------------------------
def everfed(words: list[str], folder: Path, log: str) -> subprocess.Popen[bytes]:
    with open(folder / log, "ab") as output:
        return subprocess.Popen([sys.executable, "-m", "everfed", *words], cwd=folder, stdout=output, stderr=output)


def descendants(pid: int) -> list[int]:
    """The processes below this one, the eldest first."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    below = [pid]
    for one in below:
        below += [child for child, parent in parents.items() if parent == one]
    return below[1:]


def runs(pid: int, module: str) -> bool:
    with suppress(OSError):
        return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def alive(pid: int) -> bool:
    """And not a process that ended and was not waited for."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
