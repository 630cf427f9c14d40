"""`everfed join`: a client of a federation."""

from __future__ import annotations

import socket
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everfed.commands.output import interrupt_message, same_command
from everfed.errors import UserError
from everfed.federation.runs import KEPT
from everfed.naming import load_object

if TYPE_CHECKING:
    from everfed.federation.joining import Joining


class LostState(StrEnum):
    """What to do when the state folder is removed."""

    RESTART = "restart"
    END = "end"


def join(
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the federation.")],
    data: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Your own stream; else the recipe's, from --data-dir."),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of data sets; else what EVERFED_DATA names.")
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="This client's name (default: the host's).")] = None,
    client: Annotated[int, typer.Option(metavar="K", help="Which client of the recipe's stream to be (-1: any).")] = -1,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of its state (default: everfed-NAME).")
    ] = None,
    root: Annotated[
        Path | None, typer.Option("--certificate", metavar="FILE", help="ca.crt of the federation.")
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="This client's private key.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Neither TLS nor a key; on loopback only.")] = False,
    device: Annotated[str, typer.Option(metavar="D", help="cpu or cuda.")] = "cpu",
    poll: Annotated[float, typer.Option(metavar="S", min=0.05, help="Seconds between two polls for messages.")] = 0.5,
    keep_runs: Annotated[
        int, typer.Option(metavar="N", min=0, help="Earlier runs whose state is kept; older ones are removed.")
    ] = KEPT,
    budget: Annotated[
        float, typer.Option(metavar="E", min=0, help="Most epsilon of all its replies, in any run (0: no limit).")
    ] = 0.0,
    delta: Annotated[float, typer.Option(metavar="D", help="At which epsilon is computed.")] = 1e-5,
    lost_state: Annotated[
        LostState, typer.Option(help="When its folder is removed while it runs; with --budget it ends.")
    ] = LostState.RESTART,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What this client agrees to, in TOML; the rest is refused.")
    ] = None,
    roster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The clients' public keys, from elsewhere than the server.")
    ] = None,
) -> None:
    """Take part in a federation with this machine's data, until interrupted.

    Data, buffers and state stay on this machine; only what the recipe's method
    sends leaves it. Its processes are restarted whenever they end.

    \b
    Examples:
      everfed join --server 127.0.0.1:8000 --insecure --client 0 --folder c0
      everfed join --server fl.example.org:443 --certificate ca.crt \\
          --key site-a --name site-a --data my_site:make_stream
    """
    from everfed.federation.flower import require_flower

    require_flower()
    from everfed.federation.joining import Joining
    from everfed.federation.joining import join as take_part
    from everfed.federation.names import check_name

    _check_security(server, root, insecure)
    chosen = check_name("--name", name or socket.gethostname())
    joining = Joining(
        server,
        folder or Path(f"everfed-{chosen}"),
        chosen,
        client,
        str(data_dir) if data_dir else None,
        data,
        device,
        root,
        key,
        poll,
        keep_runs,
        budget,
        delta,
        lost_state.value,
        policy,
        roster,
    )
    joining = _checked(joining)
    with interrupt_message(same_command):
        take_part(joining, lambda line: typer.echo(line, err=True))


def _check_security(server: str, root: Path | None, insecure: bool) -> None:
    if insecure == (root is not None):
        raise UserError("give --certificate (and --key), or --insecure for a federation on this machine")
    if insecure and server.rpartition(":")[0] not in ("127.0.0.1", "localhost", "[::1]"):
        raise UserError(f"--insecure is for loopback only, not {server}; use --certificate and --key")


def _checked(joining: Joining) -> Joining:
    """With the budget that its policy allows. Raises UserError for what would otherwise fail in the first round."""
    from everfed.federation.certificates import require_private
    from everfed.federation.credentials import fingerprint, read_credentials
    from everfed.federation.logs import stamped
    from everfed.federation.policy import Policy

    key, roster = joining.key, joining.roster
    for option, file in (("--certificate", joining.root), ("--key", key), ("--roster", roster)):
        if file is not None and not file.is_file():
            raise UserError(f"{option} {file}: there is no such file")
    if not 0 < joining.delta < 1:
        raise UserError(f"--delta must be between 0 and 1; got {joining.delta}")
    if key is not None:
        require_private(key)
    if roster is not None:
        read_credentials(joining.name, key, roster)
        known = f"roster {roster}, fingerprint {fingerprint(roster)}; compare it with the other clients"
        typer.echo(stamped(known), err=True)
    if joining.policy is not None:
        policy = Policy.read(joining.policy)
        policy.check_roster(joining.roster is not None)
        joining = replace(joining, budget=policy.strictest_budget(joining.budget))
    if joining.data is not None:
        load_object(joining.data, "--data")
    return joining
