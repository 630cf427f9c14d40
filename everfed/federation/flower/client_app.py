"""The ClientApp: passes each message to the worker on this machine and returns its answer. No torch, no methods.

The SuperNode's configuration names the worker's socket: --node-config 'everfed-socket="/path/worker.sock"'.

Flower's executor starts the command `flwr-clientapp` for every message, from PATH; loading it takes a second. With
`everfed join` PATH names a few lines that pass the command's arguments on to a process of this module, which forks and
runs the same command:

    python -m everfed.federation.flower.client_app SOCKET
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from everfed.federation import packet as wire
from everfed.federation.flower.records import from_records, to_records
from everfed.federation.flower.superlink import beside, installed
from everfed.federation.local import NODE_KEY, call_worker, listen, own_folder
from everfed.federation.packet import digest
from everfed.federation.supervisor import die_with_parent, python
from everfed.store.files import make_folder

COMMAND = "flwr-clientapp"
MODULE = "everfed.federation.flower.client_app"
_CALLER = """\
#!{python} -IS
import json, socket, struct, sys, time
head = json.dumps({{"header": {{"words": json.dumps(sys.argv[1:])}}, "pieces": []}}).encode()
with socket.socket(socket.AF_UNIX) as caller:
    for _ in range(600):  # it may be starting
        if not caller.connect_ex({path!r}):
            break
        time.sleep(0.1)
    caller.sendall(struct.pack("<I", len(head)) + head)
"""

app = ClientApp()


@app.train()
@app.evaluate()
@app.query()
def forward(message: Message, context: Context) -> Message:
    """Pass any message to the worker."""
    path = context.node_config.get(NODE_KEY)
    if not isinstance(path, str):
        raise ValueError(f"this SuperNode's configuration lacks its worker: --node-config '{NODE_KEY}=\"PATH\"'")
    return Message(to_records(call_worker(path, from_records(message.content))), reply_to=message)


def start(home: Path, env: Mapping[str, str]) -> str:
    """Start the process; returns the folder in which the command lies. env: of the processes that answer messages."""
    path = own_folder() / f"{digest(os.fsencode(home))}.fork"
    folder = home / "bin"
    make_folder(folder)
    (folder / COMMAND).write_text(_CALLER.format(python=sys.executable, path=str(path)))
    (folder / COMMAND).chmod(0o700)
    beside([*python(), "-m", MODULE, str(path)], env)
    return str(folder)


def fork_for_messages(path: Path) -> None:
    """Fork a process for every call, until this one is ended."""
    import everfed.federation.flower.client_app  # noqa: F401 - by the name under which Flower will load it

    listener, run = listen(path), installed(COMMAND)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        connection, _ = listener.accept()
        with connection:
            words = json.loads(wire.receive(connection).text("words"))
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent()
            sys.argv = [COMMAND, *words]
            run()
            os._exit(0)


if __name__ == "__main__":
    fork_for_messages(Path(sys.argv[1]))
