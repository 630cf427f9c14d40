"""A run on a SuperLink, for a server in this process: submitted by `flwr run`, carried by its ServerApp.

So the server is the process that the user started, with its own console, and needs nothing of Flower but its commands.
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import time
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from everfed.errors import UserError
from everfed.federation import packet as wire
from everfed.federation.flower.app import write
from everfed.federation.flower.gate import LIMIT, through
from everfed.federation.flower.superlink import REGISTERED
from everfed.federation.local import Entrance, entrance, listen, run_socket
from everfed.federation.packet import Packet
from everfed.federation.supervisor import environment
from everfed.federation.transport import Failure, Seen
from everfed.store.files import make_private, write_atomic

START = 120.0  # seconds to wait for the ServerApp of a run
LOOK = 1.0  # seconds between two looks whether the SuperLink is still the same
CONNECTION = "everfed"  # the name of the SuperLink in Flower's configuration


class LinkLost(ConnectionError):
    """The SuperLink has ended, or another one was started in its place."""


@dataclass(frozen=True)
class Address:
    """A SuperLink of this user."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def entrance(self) -> Entrance:
        found = entrance(self.port)
        if found is None:
            raise LinkLost(f"no SuperLink of yours runs at {self}")
        return found


def command(found: Entrance, *words: str) -> dict[str, Any]:
    """Run `flwr WORDS` on a SuperLink; returns what it answers. Raises UserError with what it says instead."""
    home = Path(found.folder) / "flwr-command"
    make_private(home)
    address = f'[superlink.{CONNECTION}]\naddress = "127.0.0.1:{found.port}"\ninsecure = true\n'
    (home / "config.toml").write_text(address)
    env = through(found.port, found.secret, environment(home))
    done = subprocess.run(["flwr", *words, CONNECTION, "--format", "json"], env=env, capture_output=True, text=True)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = {}
    if not answer.get("success"):
        said = answer.get("error-message") or done.stderr.strip() or done.stdout.strip()
        raise UserError(f"`flwr {' '.join(words[:2])}` failed: {said[-500:]}")
    return answer


class CarriedRun:
    """The connection to the ServerApp of a run. limit: bytes of one reply."""

    def __init__(self, address: Address, found: Entrance, carrier: socket.socket) -> None:
        self._address, self._entrance, self._carrier = address, found, carrier
        self.limit = self._set = 0

    def get_nodes(self) -> list[Seen]:
        nodes = self._call({"call": "nodes"}).json("nodes")
        return [Seen(int(node), since, key.encode("latin-1")) for node, since, key in nodes]

    def push(self, node: int, packet: Packet, kind: str) -> str:
        if self.limit != self._set:
            set_limit(self._entrance, self.limit)
            self._set = self.limit
        header = {"call": "push", "node": str(node), "kind": kind, "header": json.dumps(packet.header)}
        return self._call(header, packet.pieces).text("ticket")

    def pull(self, tickets: Iterable[str]) -> list[tuple[str, Packet | Failure]]:
        count = self._call({"call": "pull", "tickets": json.dumps(list(tickets))}).number("count")
        return [self._answer(self._receive()) for _ in range(count)]

    def _answer(self, packet: Packet) -> tuple[str, Packet | Failure]:
        if "failure" in packet.header:
            return packet.text("ticket"), Failure(packet.text("failure"), bool(packet.header["own"]))
        return packet.text("ticket"), Packet(packet.json("header"), packet.pieces)

    def wait(self, seconds: float) -> None:
        self._call({"call": "wait", "seconds": seconds})

    def forget(self, tickets: Iterable[str]) -> None:
        self._call({"call": "forget", "tickets": json.dumps(list(tickets))})

    def close(self) -> None:
        self._carrier.close()

    def _call(self, header: dict[str, Any], pieces: dict[str, bytes] | None = None) -> Packet:
        wire.send(self._carrier, Packet(header, pieces or {}))
        return self._receive()

    def _receive(self) -> Packet:
        """The next packet. A ServerApp whose SuperLink has ended may wait for it for ever."""
        while not select.select([self._carrier], [], [], LOOK)[0]:
            if entrance(self._address.port) != self._entrance:
                raise LinkLost("the SuperLink was away")
        return wire.receive(self._carrier)


def register(address: Address, keys: dict[str, bytes]) -> None:
    """Make these public keys, by name, the ones that the SuperLink accepts: new ones are added, those of clients that
    were removed or have a new key are withdrawn, and their connections end."""
    found = address.entrance()
    path = Path(found.folder) / REGISTERED
    nodes: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}  # by key; "" for one withdrawn
    for name, key in ((name, key.decode()) for name, key in keys.items()):
        if nodes.get(key) is None:
            nodes[key] = _register(found, key)
            write_atomic(path, json.dumps(nodes).encode())
        elif not nodes[key]:
            raise UserError(
                f"the SuperLink does not accept the key of {name!r}, which was withdrawn before; make a new one: "
                f"everfed federation keys --client {name} --renew"
            )
    wanted = {key.decode() for key in keys.values()}
    for key in [key for key, node in nodes.items() if node and key not in wanted]:
        command(found, "supernode", "unregister", nodes[key])
        nodes[key] = ""
        write_atomic(path, json.dumps(nodes).encode())


def _register(found: Entrance, key: str) -> str:
    """The number of the key's node."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

    public = load_pem_public_key(key.encode()).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path = Path(found.folder) / "registering.pub"
    path.write_bytes(public)
    try:
        return str(command(found, "supernode", "register", str(path))["node-id"])
    finally:
        path.unlink(missing_ok=True)


def set_limit(found: Entrance, count: int) -> None:
    """Tell the gate of a SuperLink how many bytes a reply may have."""
    secret = b64encode(f"everfed:{found.secret}".encode()).decode()
    connection = HTTPConnection("127.0.0.1", found.port, timeout=LOOK * 30)
    try:
        connection.request("POST", f"{LIMIT}{count}", headers={"Proxy-Authorization": f"Basic {secret}"})
        connection.getresponse().read()
    except HTTPException as error:
        raise LinkLost(f"the SuperLink was away: {error}") from error
    finally:
        connection.close()


def open_grid(address: Address) -> CarriedRun:
    """Submit a run and wait for its ServerApp. Raises LinkLost while the SuperLink is away."""
    found = address.entrance()
    app = Path(found.folder) / "app"
    write(app)
    try:
        run = int(command(found, "run", str(app))["run-id"])
    except UserError as error:
        if entrance(address.port) != found:
            raise LinkLost(f"the SuperLink was away: {error}") from error
        raise
    path = run_socket(run)
    try:
        with listen(path) as listener:
            listener.settimeout(LOOK)
            end = time.monotonic() + START
            while True:
                try:
                    return CarriedRun(address, found, listener.accept()[0])
                except TimeoutError as error:
                    if entrance(address.port) != found or time.monotonic() > end:
                        raise LinkLost(f"the ServerApp of run {run} did not start") from error
    finally:
        path.unlink(missing_ok=True)
