"""A federation of real processes on loopback, and what can happen to it: kills, stops, cuts, full disks, lost files."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from everfed.federation.certificates import CA, SECRETS, make_authority, make_client, make_server
from everfed.federation.joining import Joining
from everfed.federation.local import entrance_file, socket_path
from everfed.recipe import Recipe
from tests.federation.field import OPTIONS, Site, alive, descendants, events, everfed, runs, small_recipe
from tests.federation.test_faults import CLOCK
from tests.support.ports import free_port

WORKER, NODE, LINK = "everfed.federation.worker", "flower.supernode", "flower.superlink"
STOPPED = 5.0  # seconds for which a process is stopped, or the network is cut


class Relay:
    """The network between a client and the server: open, cut (connections end and are refused) or stalled (nothing
    passes)."""

    def __init__(self, target: int) -> None:
        self.target, self.port = target, free_port()
        self.flowing, self.up = threading.Event(), True
        self.flowing.set()
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self.up = False
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends = []

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket()
            if not self.up or far.connect_ex(("127.0.0.1", self.target)):
                near.close()
                continue
            self._ends += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.flowing.wait()
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()


class Federation:
    """`everfed serve` and `everfed join` as a user runs them. What the campaign kills it starts again, as systemd
    would; a process that ends by itself is not started again. keyed: TLS and keys. liars: clients that are not started.
    small_disk: a client whose folder is a disk of a few megabytes. joining: further options of `everfed join`."""

    def __init__(
        self,
        folder: Path,
        clients: int,
        rounds: int,
        *sets: str,
        method: str = "fedavg",
        keyed: bool = False,
        liars: tuple[int, ...] = (),
        small_disk: int | None = None,
        joining: tuple[str, ...] = (),
    ) -> None:
        self.joining = joining
        self.folder, self.port, self.out, self.keyed = folder, free_port(), folder / "run", keyed
        self.rounds, self.method, self.sets = rounds, method, [*OPTIONS.get(method, []), *sets]
        self.recipe: Recipe = small_recipe(folder, clients, *sets, method=method, rounds=rounds)
        if keyed:
            make_authority(folder / "pki")
            make_server(folder / "pki", ["localhost", "127.0.0.1"])
            for name in [f"site-{client}" for client in range(clients)] + ["spare"]:
                make_client(folder / "pki", name)
        self.small_disk = small_disk is not None and _mount(folder / f"c{small_disk}")
        self.relays = {client: Relay(self.port) for client in range(clients)}
        self.clock = folder / "clock"
        self.clock.mkdir()
        (self.clock / "sitecustomize.py").write_text(CLOCK.format(path=str(self.clock / "off")))
        self.server = self.serve()
        self.clients = {client: self.join(client) for client in range(clients) if client not in liars}
        self.sites: dict[int, Site] = {}

    def serve(self) -> subprocess.Popen[bytes]:
        words = [
            "serve",
            f"small-{self.rounds}.toml",
            "--method",
            self.method,
            "--out",
            "run",
            "--port",
            str(self.port),
        ]
        words += [word for one in self.sets for word in ("--set", one)]
        words += ["--checkpoint-every", "0", *(["--certificates", "pki"] if self.keyed else ["--insecure"])]
        return everfed(words, self.folder, "serve.log")

    def join(self, client: int) -> subprocess.Popen[bytes]:
        words = ["join", "--server", f"localhost:{self.relays[client].port}", "--name", f"site-{client}"]
        words += ["--client", str(client), "--folder", f"c{client}", "--poll", "0.5", *self.joining]
        if self.keyed:
            words += ["--certificate", f"pki/{CA}", "--key", f"pki/{SECRETS}/site-{client}"]
        return everfed(words if self.keyed else [*words, "--insecure"], self.folder, f"join-{client}.log")

    def lie(self, client: int, lies: list[str]) -> Path:
        """Start this client with a worker and a SuperNode that lie; returns the file of its plan."""
        plan = self.folder / f"plan-{client}.json"
        plan.write_text(json.dumps(lies))
        pki = self.folder / "pki"
        root, key = (pki / CA, pki / SECRETS / f"site-{client}") if self.keyed else (None, None)
        joining = Joining(f"localhost:{self.port}", self.folder / f"c{client}", f"site-{client}", client,
                          poll=0.5, root=root, key=key)  # fmt: skip
        site = Site(joining, start=False)
        liar = [sys.executable, "-m", "benchmarks.campaign_lies"]
        worker, node = site.child("worker"), site.child("supernode")
        worker.command = [*liar, "worker", *_words(worker.command), "--plan", str(plan)]
        node.command = [*liar, "supernode", *_words(node.command)]
        site.start()
        self.sites[client] = site
        return plan

    def pids(self, module: str, client: int | None = None) -> list[int]:
        """The processes of a client that run `module`; without a client, of the server."""
        parent = self.server if client is None else self.clients[client]
        return [pid for pid in descendants(parent.pid) if runs(pid, module)]

    def rounds_done(self) -> int:
        return sum(event["phase"] == "train" for event in events(self.out, "phase"))

    def over(self) -> bool:
        return self.server.poll() is not None

    def restart_server(self) -> None:
        self.server.wait()
        self.server = self.serve()

    def restart_client(self, client: int) -> None:
        self.clients[client].wait()
        self.clients[client] = self.join(client)

    def close(self) -> None:
        everyone = [self.server, *self.clients.values()]
        below = [pid for one in everyone for pid in descendants(one.pid)]
        for one in everyone:
            one.terminate()
        for one in everyone:
            with suppress(subprocess.TimeoutExpired):
                one.wait(20)
        for site in self.sites.values():
            site.close()
        for pid in below:
            _signal([pid], signal.SIGKILL)
        for relay in self.relays.values():
            relay.close()
        if self.small_disk:
            subprocess.run(["umount", "-l", str(self.folder / "c0")], check=False)


@contextmanager
def federation(folder: Path, clients: int, rounds: int, *sets: str, **options: Any) -> Iterator[Federation]:
    folder.mkdir(parents=True)
    made = Federation(folder, clients, rounds, *sets, **options)
    try:
        yield made
    finally:
        made.close()


def _mount(folder: Path) -> bool:
    """A disk of 6 MB; False where it cannot be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m,mode=700", "none", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


# faults: (federation, client) -> what was done, "" where it was not possible ------------------------------------------
Fault = Callable[[Federation, int], str]


def killed(module: str, of_client: bool = True) -> Fault:
    def fault(fed: Federation, client: int) -> str:
        pids = fed.pids(module, client if of_client else None)
        _signal(pids, signal.SIGKILL)
        return f"killed {module}" if pids else ""

    return fault


def stopped(module: str, of_client: bool = True) -> Fault:
    """Stopped for some seconds. module "": the supervisor itself."""

    def fault(fed: Federation, client: int) -> str:
        parent = fed.clients[client] if of_client else fed.server
        pids = fed.pids(module, client if of_client else None) if module else [parent.pid]
        return _stopped(pids)

    return fault


def _stopped(pids: list[int]) -> str:
    _signal(pids, signal.SIGSTOP)
    time.sleep(STOPPED)
    _signal(pids, signal.SIGCONT)
    return f"stopped {len(pids)} processes" if pids else ""


def client_stopped(fed: Federation, client: int) -> str:
    return _stopped([fed.clients[client].pid, *descendants(fed.clients[client].pid)])


def join_killed(fed: Federation, client: int) -> str:
    """The supervisor alone; its processes end with it."""
    below = descendants(fed.clients[client].pid)
    fed.clients[client].kill()
    _gone(below)
    fed.restart_client(client)
    return "killed join"


def client_killed(fed: Federation, client: int) -> str:
    below = descendants(fed.clients[client].pid)
    _signal([fed.clients[client].pid, *below], signal.SIGKILL)
    _gone(below)
    fed.restart_client(client)
    return "killed a client's processes"


def _gone(pids: list[int]) -> None:
    end = time.monotonic() + 20
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)


def server_ended(how: signal.Signals, link: bool = False) -> Fault:
    def fault(fed: Federation, client: int) -> str:
        below = descendants(fed.server.pid)
        _signal([fed.server.pid, *(below if link else [])], how)
        fed.restart_server()
        return f"sent {how.name} to serve"

    return fault


def all_killed(fed: Federation, client: int) -> str:
    everyone = [fed.server, *fed.clients.values()]
    below = [pid for one in everyone for pid in descendants(one.pid)]
    _signal([*(one.pid for one in everyone), *below], signal.SIGKILL)
    _gone(below)
    fed.restart_server()
    for one in fed.clients:
        fed.restart_client(one)
    return "killed everything"


def network_cut(fed: Federation, client: int) -> str:
    fed.relays[client].cut()
    time.sleep(STOPPED)
    fed.relays[client].up = True
    return "cut"


def network_stalled(fed: Federation, client: int) -> str:
    fed.relays[client].flowing.clear()
    time.sleep(STOPPED)
    fed.relays[client].flowing.set()
    return "stalled"


def all_networks_cut(fed: Federation, client: int) -> str:
    for relay in fed.relays.values():
        relay.cut()
    time.sleep(STOPPED)
    for relay in fed.relays.values():
        relay.up = True
    return "cut"


def disk_full(fed: Federation, client: int) -> str:
    if not fed.small_disk:
        return ""
    filler = fed.folder / "c0" / "filler"
    with suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    time.sleep(STOPPED)
    filler.unlink(missing_ok=True)
    return "filled"


def state_removed(fed: Federation, client: int) -> str:
    folder = fed.folder / f"c{client}"
    if fed.small_disk and client == 0:
        for path in folder.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return "removed"


def worker_socket_removed(fed: Federation, client: int) -> str:
    socket_path(fed.folder / f"c{client}").unlink(missing_ok=True)
    return "removed"


def entrance_removed(fed: Federation, client: int) -> str:
    entrance_file(fed.port).unlink(missing_ok=True)
    return "removed"


def half_lines(fed: Federation, client: int) -> str:
    """What a power cut may leave at the end of files that only grow."""
    _signal(fed.pids(WORKER, client), signal.SIGSTOP)
    folder, pids = fed.folder / f"c{client}", fed.pids(WORKER, client)
    _signal(pids, signal.SIGKILL)
    for name in ("ledger.jsonl", "privacy.jsonl", "audit.jsonl"):
        if (folder / name).exists():
            with suppress(OSError), open(folder / name, "ab") as file:
                file.write(b'{"half": "a li')
    return "appended" if pids else ""


def audit_changed(fed: Federation, client: int) -> str:
    pids, path = fed.pids(WORKER, client), fed.folder / f"c{client}" / "audit.jsonl"
    _signal(pids, signal.SIGKILL)
    _gone(pids)
    with suppress(OSError):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        return "changed"
    return ""


def clock_wrong(fed: Federation, client: int) -> str:
    """Its clock is a quarter of an hour ahead after a restart, and is put right after some seconds."""
    (fed.clock / "off").write_text("900")
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(fed.clock), before])
    fed.clients[client].terminate()
    fed.restart_client(client)
    os.environ["PYTHONPATH"] = before
    time.sleep(3 * STOPPED)
    (fed.clock / "off").write_text("0")
    return "wrong"


FAULTS: dict[str, Fault] = {
    "worker killed": killed(WORKER),
    "SuperNode killed": killed(NODE),
    "SuperLink killed": killed(LINK, of_client=False),
    "join killed": join_killed,
    "client killed": client_killed,
    "serve killed": server_ended(signal.SIGKILL),
    "serve and SuperLink killed": server_ended(signal.SIGKILL, link=True),
    "serve interrupted": server_ended(signal.SIGINT),
    "serve terminated": server_ended(signal.SIGTERM),
    "everything killed": all_killed,
    "worker stopped": stopped(WORKER),
    "SuperNode stopped": stopped(NODE),
    "SuperLink stopped": stopped(LINK, of_client=False),
    "join stopped": stopped(""),
    "serve stopped": stopped("", of_client=False),
    "client stopped": client_stopped,
    "network cut": network_cut,
    "network stalled": network_stalled,
    "all networks cut": all_networks_cut,
    "disk full": disk_full,
    "state folder removed": state_removed,
    "worker's socket removed": worker_socket_removed,
    "SuperLink's entrance removed": entrance_removed,
    "half lines": half_lines,
    "audit log changed": audit_changed,
    "clock wrong": clock_wrong,
}
STALLS = ("worker stopped", "SuperNode stopped", "client stopped", "network stalled", "network cut", "worker killed",
          "client killed", "join stopped")  # fmt: skip


def drawn(rng: random.Random, count: int, names: tuple[str, ...] = tuple(FAULTS)) -> list[str]:
    """So many faults, every kind before any comes again."""
    found: list[str] = []
    while len(found) < count:
        kinds = list(names)
        rng.shuffle(kinds)
        found += kinds
    return found[:count]


def _words(command: Sequence[str]) -> list[str]:
    """What follows the module in `python ... -m MODULE ...`."""
    return list(command)[list(command).index("-m") + 2 :]
