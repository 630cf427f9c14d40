"""`everfed federation`: keys, proxy, status and Flower app of a federation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from everfed.commands import options
from everfed.commands.output import show_table

federation = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Keys, proxy, status and Flower app of a federation."
)

Folder = Annotated[Path, typer.Option(metavar="DIR", help="Folder of certificates and keys.")]


@federation.command()
def keys(
    out: Folder = Path("pki"),
    host: Annotated[
        list[str], typer.Option(metavar="HOST", help="A name or address by which clients reach the server; repeat it.")
    ] = [],  # noqa: B006 (typer copies it)
    client: Annotated[list[str], typer.Option(metavar="NAME", help="A client that may take part; repeat it.")] = [],  # noqa: B006
    name: Annotated[str, typer.Option(metavar="NAME", help="The federation's name, in its authority.")] = "everfed",
    days: Annotated[int, typer.Option(metavar="N", help="How long the server's certificate is valid.")] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="Replace the server's certificate and clients' keys.")] = False,
) -> None:
    """Create keys and certificates; nothing is overwritten without --renew.

    Creates what is missing: an authority (ca.crt, ca.key), with --host a
    certificate of the server (server.crt, server.key), with --client a key
    for each client (clients/NAME.pub, secrets/NAME).

    Copy ca.crt to each client, move secrets/NAME there, and keep ca.key away
    from the server.

    \b
    Examples:
      everfed federation keys --host fl.example.org --client site-a --client site-b
      everfed federation keys --client site-c
      everfed federation keys --host fl.example.org --client site-a --renew
    """
    from everfed.federation import certificates

    certificates.require()
    if not (out / certificates.CA).exists():
        certificates.make_authority(out, name)
        typer.echo(f"{out / certificates.CA}: the federation's authority; copy it to every client")
    if host and renew:
        certificates.withdraw_server(out)
    if host:
        certificates.make_server(out, host, days)
        typer.echo(f"{out / certificates.SERVER}: the server's certificate for {', '.join(host)}, {days} days")
    for one in client:
        if renew:
            certificates.revoke(out, one)
        secret = certificates.make_client(out, one)
        typer.echo(f"{secret}: the private key of {one}; move it to that client")


@federation.command()
def revoke(
    client: Annotated[list[str], typer.Argument(metavar="NAME", help="Clients that may no longer take part.")],
    out: Folder = Path("pki"),
) -> None:
    """Withdraw clients' keys.

    A SuperLink accepts the keys that its folder has when `everfed serve`
    starts: end a running server, and give the same command again.

    \b
    Example:
      everfed federation revoke site-b
    """
    from everfed.federation import certificates

    for one in client:
        certificates.revoke(out, one)
        typer.echo(f"{one} is no longer enrolled in {out}; start `everfed serve` again")


@federation.command()
def proxy(
    listen: Annotated[str, typer.Option(metavar="PORT", help="Where clients connect: PORT or HOST:PORT.")] = "443",
    upstream: Annotated[str, typer.Option(metavar="HOST:PORT", help="The SuperLink, on loopback.")] = "127.0.0.1:8000",
    certificates: Folder = Path("pki"),
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write (default: print it).")] = None,
) -> None:
    """Write the configuration of an nginx that exposes only what clients call.

    A SuperLink listens on loopback, behind this proxy; what it answers there
    is limited once more, by name.

    \b
    Examples:
      everfed federation proxy --listen 443 --upstream 127.0.0.1:8000 --out nginx.conf
      mkdir -p /var/lib/everfed-proxy && nginx -p /var/lib/everfed-proxy -c $PWD/nginx.conf
    """
    from everfed.federation.certificates import check_server, require
    from everfed.federation.proxy import Proxy, nginx

    require()
    for warning in check_server(certificates):
        typer.echo(f"warning: {warning}", err=True)
    text = nginx(Proxy(listen, upstream, certificates))
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text)
        typer.echo(f"{out}: for nginx -p FOLDER -c {out.absolute()}")


@federation.command()
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder of `everfed serve`.")],
    as_json: options.Json = False,
) -> None:
    """Show the clients of a federated run: connected or not, replies, failures and the last error.

    \b
    Example:
      everfed federation status runs/demo-fedgp+der-0
    """
    from everfed.federation.status import status as read_status

    found = read_status(run)
    if as_json:
        typer.echo(json.dumps(found))
        return
    typer.echo(f"{run}: {found['state']}, round {found['round']}, server started {found['epoch']} times")
    columns = ("client", "name", "state", "answers", "failures", "trouble")
    show_table(columns, [[str(one[name]) for name in columns] for one in found["clients"]])


@federation.command()
def audit(
    log: Annotated[Path, typer.Argument(metavar="FILE", help="audit.jsonl of a run folder or of a client's folder.")],
    holds: Annotated[str, typer.Option(metavar="HASH", help="A hash noted earlier, which the log must contain.")] = "",
) -> None:
    """Check that no line of an audit log was changed, removed or added.

    A server's log notes the last hash of each client's log with every answer
    ("their"), so --holds finds a client's log that was written anew.

    \b
    Examples:
      everfed federation audit runs/hospital/audit.jsonl
      everfed federation audit everfed-site-a/audit.jsonl --holds 5f1c...
    """
    from everfed.federation.audit import AuditError, verify

    last = verify(log)
    if holds and holds.encode() not in log.read_bytes():
        raise AuditError(f"{log}: no line has the hash {holds}; the log was written anew")
    typer.echo(f"{log}: {last.number} lines, unchanged; the last hash is {last.hash}")


@federation.command("app")
def write_app(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write.")]) -> None:
    """Write everfed as a Flower app, for a site that uses `flwr run`.

    \b
    Example:
      everfed federation app everfed-app
      flwr run everfed-app LINK -c 'recipe="demo"'
    """
    from everfed.federation.flower.app import write

    write(folder)
    typer.echo(f"{folder}: a Flower app; its config is in {folder / 'pyproject.toml'}")
