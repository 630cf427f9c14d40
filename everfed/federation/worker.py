"""The worker of a client: a process that holds model, data and captured steps in memory and answers packets on a unix
socket. Started by `everfed join`, or by hand beside a SuperNode:

    python -m everfed.federation.worker --folder DIR --name NAME [--client K] [--data-dir DIR | --data MODULE:FUNCTION]

It ends with code 3 when its folder is removed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from everfed.data.sources import data_folder
from everfed.federation import packet as wire
from everfed.federation.audit import AUDIT, Audited, AuditLog
from everfed.federation.client import Identity, RealClient
from everfed.federation.credentials import read_credentials
from everfed.federation.local import listen, socket_path
from everfed.federation.logs import log_to_stderr
from everfed.federation.packet import PacketError
from everfed.federation.policy import Answers, Guard, Policy
from everfed.federation.runs import KEPT
from everfed.federation.supervisor import FolderWatch, StateLost
from everfed.privacy.spending import DELTA
from everfed.store.files import Locked, locked, make_private
from everfed.store.ledger import PRIVACY_LEDGER

LOST = 3  # exit code
LOOK = 1.0  # seconds between two looks at the folder


def serve(client: Answers, path: Path, watch: FolderWatch) -> None:
    """Answer one packet per connection at the unix socket `path`, one at a time, until the folder is gone. Raises
    StateLost."""
    listener = _listen(path)
    while True:
        watch.check()
        if not path.exists():  # by a program that cleans up, say: the clients' data are all there
            logging.getLogger("everfed").warning("%s was removed; listening there again", path)
            listener.close()
            listener = _listen_again(path, watch)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        # the sender may be gone; finished steps are in the journal, and the request will be repeated
        with connection, contextlib.suppress(PacketError, EOFError, OSError):
            wire.send(connection, client.answer(wire.receive(connection)))


def _listen(path: Path) -> socket.socket:
    listener = listen(path)
    listener.settimeout(LOOK)
    return listener


def _listen_again(path: Path, watch: FolderWatch) -> socket.socket:
    try:
        return _listen(path)
    except FileNotFoundError:
        watch.check()  # the folder went after the last look at it
        raise


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="everfed-worker", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="folder of this client's state")
    parser.add_argument("--name", required=True, help="name under which the server enrols this client")
    parser.add_argument("--client", type=int, default=-1, help="index to request in the recipe's stream; -1: any")
    parser.add_argument("--data-dir", default=None, help="folder of data sets")
    parser.add_argument("--data", default=None, help="a stream of one's own, package.module:function")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda, where training steps are captured")
    parser.add_argument("--policy", type=Path, default=None, metavar="FILE", help="what this client agrees to")
    parser.add_argument("--key", type=Path, default=None, metavar="FILE", help="this client's private key")
    parser.add_argument("--roster", type=Path, default=None, metavar="FILE", help="the other clients' public keys")
    parser.add_argument("--server", default="", metavar="HOST:PORT", help="named in the audit log")
    parser.add_argument("--keep-runs", type=int, default=KEPT, help="how many earlier runs to keep on disk")
    parser.add_argument("--budget", type=float, default=0.0, help="epsilon of all replies together; 0: any")
    parser.add_argument("--delta", type=float, default=DELTA, help="at which epsilon is computed")
    chosen = parser.parse_args(arguments)
    from everfed.federation.runtime import RuntimeBuilder

    log_to_stderr()
    os.umask(0o077)
    make_private(chosen.folder)
    policy = Policy.read(chosen.policy) if chosen.policy else Policy()
    build = RuntimeBuilder(chosen.data_dir, chosen.data, chosen.device, policy)
    try:
        with locked(chosen.folder / ".lock"):
            identity, keep = Identity(chosen.name, chosen.client), max(0, chosen.keep_runs)
            budget = policy.strictest_budget(chosen.budget)
            credentials = read_credentials(chosen.name, chosen.key, chosen.roster) if chosen.key else None
            client = RealClient(chosen.folder, identity, build, keep, budget, chosen.delta, credentials)
            policy.check_roster(chosen.roster is not None and credentials is not None)
            guard = Guard(client, policy, chosen.data, data_folder(chosen.data_dir))
            guarded = Audited(guard, AuditLog(chosen.folder / AUDIT), chosen.server)
            serve(guarded, socket_path(chosen.folder), FolderWatch(chosen.folder, ".lock", PRIVACY_LEDGER))
    except Locked:
        parser.error(f"{chosen.folder} has a worker already")
    except StateLost as error:
        logging.getLogger("everfed").error("%s", error)
        sys.exit(LOST)


if __name__ == "__main__":
    main()
